"""`Storages`: which bytes of which storages are saved already, and which storages are not worth
saving.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .chunks import Chunk
    from .copies import Copy


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """The bytes from *begin* to *end* of the storage *source*, as they were at the *version* of the
    tensor *counter*; *users* saved tensors are on them.

    They are in *chunk*, from its byte *place* on.

    copy: between the device and the chunk, which is pinned as long. memory: with the bytes that
    came back, where they are to stay on the device, and *filled* the copy that fills it. source,
    restored: weak references to the storages of the original and of *memory*. counter: one to the
    tensor that counts modifications, which others on the storage may not be counted by.
    """

    chunk: Chunk
    place: int
    begin: int
    end: int
    version: int
    device: torch.device
    source: Any
    counter: weakref.ref[torch.Tensor]
    users: int = 0
    copy: Copy | None = None
    memory: torch.Tensor | None = None
    filled: Copy | None = None
    restored: Any = None

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return self.end - self.begin

    def on_device(self) -> tuple[torch.UntypedStorage, int] | None:
        """A storage that has the bytes, as long as anybody has it, and where in the original one it
        begins.
        """
        whole = _locked(self.source)
        if whole is not None and whole.nbytes() >= self.end:
            return whole, 0
        restored = None if self.restored is None else _locked(self.restored)
        return None if restored is None else (restored, self.begin)


class Storages:
    """The values by what they are of, and the storages that outlived the graphs that saved them:
    buffers, tables, frozen weights.
    """

    def __init__(self) -> None:
        # A weak reference keeps a storage's address from being another's.
        self._values: dict[int, list[Value]] = {}
        self._outliving: dict[int, Any] = {}  # storages that were there when their values went
        self._lasting: dict[int, Any] = {}

    def add(self, value: Value) -> None:
        """*value* can be found from now on."""
        self._values.setdefault(value.source.cdata, []).append(value)

    def remove(self, value: Value) -> None:
        """*value* is no more."""
        address = value.source.cdata
        self._values[address].remove(value)
        if not self._values[address]:
            del self._values[address]
        if not value.source.expired():
            self._outliving[address] = value.source

    def find(
        self, storage: torch.UntypedStorage, counter: torch.Tensor, begin: int, end: int
    ) -> Value | None:
        """The value that has these bytes, as far as *counter* can tell."""
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
        """Whether *storage* was still there when the next step began, so that saving it frees
        nothing.
        """
        return storage._cdata in self._lasting

    def begin_step(self) -> None:
        """A step begins; nothing is left of the one before."""
        self._lasting = {
            address: storage
            for address, storage in {**self._lasting, **self._outliving}.items()
            if not storage.expired()
        }
        self._outliving = {}


def weak_reference(storage: torch.UntypedStorage) -> Any:
    """A reference that does not keep *storage*. Source: torch.multiprocessing.reductions, which
    shares storages among processes by it.
    """
    import torch

    reductions: Any = torch.multiprocessing.reductions  # untyped there
    return reductions.StorageWeakRef(storage)


def bytes_of(storage: torch.UntypedStorage, begin: int, end: int) -> torch.Tensor:
    """A tensor of the bytes from *begin* to *end* of *storage*."""
    import torch

    whole: Any = torch.empty(0, dtype=torch.uint8, device=storage.device)
    viewed: torch.Tensor = whole.set_(storage, begin, (end - begin,), (1,))
    return viewed


def _locked(reference: Any) -> torch.UntypedStorage | None:
    """The storage of a weak *reference*, if anybody has it."""
    import torch

    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage
