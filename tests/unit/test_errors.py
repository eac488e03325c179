"""The error family: each error's base classes, its message, and that it survives pickling and
copying.
"""

from __future__ import annotations

import ast
import copy
import errno
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import nvme_offload
from nvme_offload.errors import (
    CorruptionError,
    InvariantError,
    IOFailure,
    NoSpaceError,
    OffloadError,
    TruncatedError,
    UnsupportedError,
    UsageError,
    WaitTimeout,
)
from nvme_offload.io.arguments import whole_number
from nvme_offload.swap.schedule import Schedule

FIELDS = {
    "operation": "write",
    "path": "/local_nvme/rank0.slab",
    "offset": 3 << 29,
    "nbytes": 4 << 20,
    "done": 1258291,
}
TRANSFER_ERRORS = [
    IOFailure(errno.EIO, "Input/output error", **FIELDS),  # type: ignore[arg-type]
    NoSpaceError(errno.ENOSPC, "No space left on device", **FIELDS),  # type: ignore[arg-type]
    TruncatedError("the file ends before", **FIELDS),  # type: ignore[arg-type]
    CorruptionError("other bytes came back", **FIELDS),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (UsageError, ValueError),
        (UnsupportedError, Exception),
        (WaitTimeout, TimeoutError),
        (TruncatedError, Exception),
        (CorruptionError, Exception),
        (IOFailure, OSError),
        (NoSpaceError, IOFailure),
    ],
)
def test_every_error_is_an_offload_error_and_the_builtin_that_callers_expect(
    kind: type[Exception], also: type[Exception]
) -> None:
    assert issubclass(kind, OffloadError)
    assert issubclass(kind, also)


def test_a_transfer_error_says_what_where_and_how_far() -> None:
    assert (
        str(TRANSFER_ERRORS[1])
        == "write of 4 MiB at 1.5 GiB in /local_nvme/rank0.slab: No space left on device (1.2 MiB done)"
    )


@pytest.mark.parametrize("error", TRANSFER_ERRORS, ids=lambda error: type(error).__name__)
def test_the_repr_of_a_transfer_error_makes_it_again(error: IOFailure) -> None:
    again = eval(repr(error))
    assert type(again) is type(error)
    assert {**vars(again), "errno": getattr(again, "errno", None)} == {
        **vars(error),
        "errno": getattr(error, "errno", None),
    }
    assert again.reason in repr(error)


@pytest.mark.parametrize("value", [0, 1, (1 << 63) - 1, np.int64(7), True])
def test_a_whole_number_is_an_int(value: int) -> None:
    assert whole_number("size", value) == int(value)
    assert type(whole_number("size", value)) in (int, bool)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-1, "from 0"),
        (1 << 63, "from 0"),
        (1.0, "whole number"),
        ("1", "whole number"),
        (None, "whole number"),
    ],
)
def test_what_no_size_can_be_is_refused_by_name(value: object, said: str) -> None:
    with pytest.raises(UsageError, match=rf"^size must be (a )?{said}.*{re.escape(repr(value))}$"):
        whole_number("size", value)  # type: ignore[arg-type]


def test_a_truncated_file_is_no_kernel_failure() -> None:
    assert not issubclass(TruncatedError, OSError)
    assert not issubclass(CorruptionError, OSError)


def test_an_io_failure_reads_as_an_os_error_does() -> None:
    error = TRANSFER_ERRORS[0]
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror, error.filename) == (
        errno.EIO,
        "Input/output error",
        "/local_nvme/rank0.slab",
    )


@pytest.mark.parametrize("error", TRANSFER_ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "reproduce",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_a_transfer_error_survives_a_process_boundary(error: IOFailure, reproduce: object) -> None:
    again = reproduce(error)  # type: ignore[operator]
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert {name: getattr(again, name) for name in FIELDS} == FIELDS
    assert getattr(again, "errno", None) == getattr(error, "errno", None)
    assert again.reason == error.reason


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EIO, IOFailure),
        (errno.EFBIG, IOFailure),
    ],
)
def test_the_error_number_makes_the_class(code, kind):
    made = IOFailure(code, "reason", **FIELDS)
    reported = IOFailure.of(OSError(code, "reason"), **FIELDS)
    assert (
        (type(made), made.errno, made.reason)
        == (type(reported), reported.errno, reported.reason)
        == (kind, code, "reason")
    )
    again = pickle.loads(pickle.dumps(made))
    assert (type(again), repr(again)) == (kind, repr(made))


@pytest.mark.parametrize("kind", [UsageError, UnsupportedError, WaitTimeout])
def test_plain_errors_survive_a_process_boundary(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("set block_size to 4096")))
    assert type(again) is kind
    assert str(again) == "set block_size to 4096"


def test_what_must_hold_is_no_assert():
    """Which `python -O` leaves out."""
    package = Path(nvme_offload.__file__).parent
    assert [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert)
    ] == []


def test_a_transition_that_must_not_be_is_an_error():
    schedule = Schedule(4 * 4096)
    schedule.create("a", 4096)
    schedule.plan()
    schedule.take("a")
    with pytest.raises(InvariantError, match="a value is taken that was not needed"):
        schedule.take("a")
