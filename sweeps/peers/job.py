"""`Job`: the bytes that a side moves in one run."""

from __future__ import annotations

import dataclasses

DIRECTIONS = {"read": ("read",), "write": ("write",), "mixed": ("read", "write")}


@dataclasses.dataclass(frozen=True)
class Job:
    """*requests* of *request_bytes* each, one after another through one file per direction.

    direction: "read", "write", or "mixed", which reads one file while it writes another and so
    moves twice as many bytes. queue_depth: blocks in flight per thread, both directions together.
    memory: "huge" (huge pages) or "locked" (from DeepSpeed's allocator). sequential: advise the
    kernel that a map is read sequentially.
    """

    direction: str
    backend: str
    block_size: int
    queue_depth: int
    thread_count: int
    memory: str
    request_bytes: int
    requests: int
    sequential: bool = False

    @property
    def directions(self) -> tuple[str, ...]:
        """The concurrent directions, each with its own file."""
        return DIRECTIONS[self.direction]

    @property
    def file_bytes(self) -> int:
        """The size of each file."""
        return self.request_bytes * self.requests

    @property
    def nbytes(self) -> int:
        """Bytes moved in total."""
        return self.file_bytes * len(self.directions)
