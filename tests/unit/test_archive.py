"""Reads and writes of a checkpoint's files that end with an exception leave nothing in flight, and
no unawaited failure.
"""

from __future__ import annotations

import contextlib
import errno
import random

import pytest
import torch

from nvme_offload._aio import FaultKind
from nvme_offload.errors import CorruptionError, IOFailure, TruncatedError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.io import archive, manifest
from nvme_offload.io.engine import Engine

CONFIG = AioConfig(direct="auto")


def test_starting_fails_after_a_read_that_will_fail(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(10))
    engine = Engine(CONFIG)

    def start():
        yield engine.read(torch.empty(8192, dtype=torch.uint8), path)
        raise KeyError("exp_avg")

    with pytest.raises(KeyError, match="exp_avg"):
        archive.wait_all(start())
    engine.close()  # raises unawaited failures


def test_every_read_ends_before_the_first_failure_is_raised(tmp_path):
    short, whole = tmp_path / "short", tmp_path / "whole"
    short.write_bytes(bytes(10))
    whole.write_bytes(bytes(range(256)) * 4096)
    into = torch.empty(256 * 4096, dtype=torch.uint8)
    with Engine(CONFIG) as engine:
        tickets = [
            engine.read(torch.empty(8192, dtype=torch.uint8), short),
            engine.read(into, whole),
            engine.read(torch.empty(20, dtype=torch.uint8), short),
        ]
        with pytest.raises(TruncatedError):
            archive.wait_all(tickets)
        assert all(ticket.done() for ticket in tickets)
    assert into[-1] == 255


def test_a_loan_that_lacks_a_tensor_leaves_no_write_in_flight(tmp_path):
    @contextlib.contextmanager
    def provider():
        yield {"first": torch.arange(5000)}

    parts = [archive.Part(provider, "first", 0), archive.Part(provider, "second", 5000)]
    with Engine(CONFIG) as engine:
        with pytest.raises(KeyError, match="second"):
            archive.write(
                str(tmp_path / "file.pt"),
                {"value": archive.offloaded([10_000], torch.int64, parts)},
                engine,
            )
        assert engine.stats().write.in_flight == 0


def test_a_file_that_is_read_to_be_verified_fails_once(tmp_path):
    """The first of its reads and the second, which is under way by then, fail: one error is raised,
    and no failure is left to report.
    """
    path = tmp_path / "states.pt"
    path.write_bytes(bytes(3 * manifest.PIECE_BYTES))
    with Engine(CONFIG) as engine:
        entry = manifest.entry_of(path, path.name, 0, [], engine, "crc32")
        manifest.verify(tmp_path, entry, engine, "crc32")
    assert [piece.nbytes for piece in entry.pieces] == 3 * [manifest.PIECE_BYTES]
    engine = Engine(CONFIG, _faults=[(0, 1 << 20, FaultKind.FAIL, errno.EIO)])
    with pytest.raises(IOFailure):
        manifest.verify(tmp_path, entry, engine, "crc32")
    engine.close()


@pytest.mark.parametrize("size", [0, 1, 4097, manifest.PIECE_BYTES, 2 * manifest.PIECE_BYTES + 5])
def test_every_byte_of_a_file_is_summed(tmp_path, size):
    path = tmp_path / "states.pt"
    path.write_bytes(random.Random(size).randbytes(size))
    with Engine(CONFIG) as engine:
        entry = manifest.entry_of(path, path.name, 0, [], engine, "crc32")
        manifest.verify(tmp_path, entry, engine, "crc32")
        for place in {0, size // 2, size - 1} if size else ():
            data = bytearray(path.read_bytes())
            data[place] ^= 1
            path.write_bytes(data)
            with pytest.raises(CorruptionError, match="checksum"):
                manifest.verify(tmp_path, entry, engine, "crc32")
            data[place] ^= 1
            path.write_bytes(data)
