"""`Closing`: a `close` method as a context manager. `fail_at_exit`: a failure as a program ends."""

from __future__ import annotations

import logging
import sys
from typing import TypeVar

from ..errors import OffloadError
from ..extension import _aio

_log = logging.getLogger(__name__)
_Self = TypeVar("_Self", bound="Closing")  # typing.Self needs Python 3.11


class Closing:
    """Base class of objects that the end of a `with` block closes. An error of `close` is raised,
    unless the block ends with another exception: then it is logged.
    """

    def close(self) -> None:
        """Release the resources. A second call does nothing."""
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except OffloadError as failure:
            if error is None:
                raise
            _log.error(
                "close() failed too, after the exception that ended the with block: %s", failure
            )


def fail_at_exit(what: str, error: BaseException) -> None:
    """Print that *what* failed by *error*, and make the process exit with status 1 instead of 0."""
    if sys.stderr is not None:
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        print(f"nvme_offload: {what} failed: {text}", file=sys.stderr, flush=True)
    _aio.fail_at_exit()
