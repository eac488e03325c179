"""`Closing`: what has a `close` as a context manager."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from ..errors import OffloadError

if TYPE_CHECKING:
    from types import TracebackType

_log = logging.getLogger(__name__)
_Self = TypeVar("_Self", bound="Closing")  # typing.Self is of Python 3.11


class Closing:
    """The end of a `with` block closes it. An error of that is raised, unless the block ends with
    another exception: then it is logged.
    """

    def close(self) -> None:
        """Give back what it has; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except OffloadError as failure:
            if error is None:
                raise
            _log.error("beside the exception that ends the with block: %s", failure)
