"""`Ranks`: processes that write or read something together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..errors import OffloadError


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Processes that call the same functions in the same order."""

    rank: int  # of this process
    count: int
    # A collective call: takes a value that pickle can take, and returns the values of all ranks, in
    # the order of their numbers.
    gather: Callable[[Any], list[Any]]

    @classmethod
    def of_group(cls, group: Any = None) -> Ranks:
        """The ranks of the ProcessGroup *group*, or all ranks; only this one if there are no others."""
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, lambda value: [value])

        def gather(value: Any) -> list[Any]:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, value, group=group)
            return found

        return cls(dist.get_rank(group), dist.get_world_size(group), gather)

    def agree(self, failure: BaseException | None, refusal: str) -> None:
        """Raise on every rank if one has failed: the *failure* of this rank, or an OffloadError
        with the *refusal* and the error of a rank that has failed. A collective call.
        """
        texts = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise OffloadError(f"{refusal}, because rank {rank} failed: {text}")

    def together(self, action: Callable[[], None], refusal: str) -> None:
        """Run *action*, which makes no collective call, on every rank. Raises: as `agree`."""
        failure = None
        try:
            action()
        except Exception as error:
            failure = error
        self.agree(failure, refusal)
