"""`Storages`: which bytes of which storages are saved already, and which storages are not worth
saving.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .chunks import Chunk
    from .copies import Copy


@dataclasses.dataclass(eq=False, slots=True)
class SavedBytes:
    """A range of one storage at one version."""

    chunk: Chunk
    place: int  # the offset in the chunk, in bytes
    begin: int  # the range of the original storage, in bytes
    end: int
    version: int  # of *counter* when the bytes were saved
    device: torch.device
    source: Any  # a weak reference to the original storage
    # The tensor that counts modifications. Others on the storage may have their own counters.
    counter: weakref.ref[torch.Tensor]
    users: int = 0  # saved tensors that need these bytes
    copy: Copy | None = None  # in flight between device and chunk, which is pinned as long
    memory: torch.Tensor | None = None  # the restored bytes, while they stay on the device
    filled: Copy | None = None  # the copy that fills *memory*; None if it was synchronous
    restored: Any = None  # a weak reference to the storage of *memory*

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return self.end - self.begin

    def on_device(self) -> tuple[torch.UntypedStorage, int] | None:
        """A live storage on the device that has the bytes, and the offset in the original storage
        where it begins; None if there is none.
        """
        whole = locked(self.source)
        if whole is not None and whole.nbytes() >= self.end:
            return whole, 0
        restored = None if self.restored is None else locked(self.restored)
        return None if restored is None else (restored, self.begin)


class Storages:
    """Finds values by storage, and the storages that outlived the graphs that saved them: buffers,
    tables, frozen weights.
    """

    def __init__(self) -> None:
        # A weak reference keeps the address from being reused.
        self._values: dict[int, list[SavedBytes]] = {}
        # storages that were alive when their last value was dropped
        self._outliving: dict[int, Any] = {}
        self._lasting: dict[int, Any] = {}

    def add(self, value: SavedBytes) -> None:
        """Make *value* findable."""
        self._values.setdefault(value.source.cdata, []).append(value)

    def remove(self, value: SavedBytes) -> None:
        """Drop *value*."""
        address = value.source.cdata
        self._values[address].remove(value)
        if not self._values[address]:
            del self._values[address]
        if not value.source.expired():
            self._outliving[address] = value.source

    def find(
        self, storage: torch.UntypedStorage, counter: torch.Tensor, begin: int, end: int
    ) -> SavedBytes | None:
        """The value that covers the range at the current version of *counter*."""
        for value in self._values.get(storage._cdata, ()):
            if (
                value.counter() is counter
                and value.version == counter._version
                and value.begin <= begin
                and end <= value.end
            ):
                return value
        return None

    def lasts(self, storage: torch.UntypedStorage) -> bool:
        """Whether *storage* outlived an earlier step, so that saving it frees nothing."""
        return storage._cdata in self._lasting

    def begin_step(self) -> None:
        """A step begins; no value of the previous one is left."""
        self._lasting = {
            address: storage
            for address, storage in {**self._lasting, **self._outliving}.items()
            if not storage.expired()
        }
        self._outliving = {}


def weak_reference(storage: torch.UntypedStorage) -> Any:
    """A weak reference to *storage*. Source: torch.multiprocessing.reductions.StorageWeakRef."""
    reductions: Any = torch.multiprocessing.reductions  # untyped there
    return reductions.StorageWeakRef(storage)


def bytes_of(storage: torch.UntypedStorage, begin: int, end: int) -> torch.Tensor:
    """A uint8 view of the bytes from *begin* to *end* of *storage*."""
    whole: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    viewed: torch.Tensor = whole.set_(storage, begin, (end - begin,), (1,))
    return viewed


def locked(reference: Any) -> torch.UntypedStorage | None:
    """The storage of a weak *reference*, if it is alive."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage
