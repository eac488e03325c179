"""`AioConfig` takes what an engine can do and refuses the rest by name."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from nvme_offload.errors import UsageError
from nvme_offload.hardware.config import (
    BACKENDS,
    MAX_BLOCK_SIZE,
    MAX_QUEUE_DEPTH,
    MAX_THREAD_COUNT,
    AioConfig,
)


def test_defaults() -> None:
    assert dataclasses.asdict(AioConfig()) == {
        "block_size": 1 << 20,
        "queue_depth": 32,
        "thread_count": 1,
        "backend": "libaio",
        "single_submit": False,
        "overlap_events": True,
        "direct": True,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 4096},
        {"block_size": 12288},
        {"block_size": MAX_BLOCK_SIZE},
        {"queue_depth": 1},
        {"queue_depth": MAX_QUEUE_DEPTH},
        {"thread_count": MAX_THREAD_COUNT},
        {"single_submit": True},
        {"overlap_events": False},
        {"direct": False},
        {"direct": "auto"},
        *({"backend": name} for name in BACKENDS),
    ],
    ids=str,
)
def test_takes_and_keeps(settings: dict[str, object]) -> None:
    config = AioConfig(**settings)  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 0},
        {"block_size": -4096},
        {"block_size": 512},
        {"block_size": 4097},
        {"block_size": MAX_BLOCK_SIZE + 4096},
        {"block_size": 1048576.0},
        {"block_size": "1048576"},
        {"block_size": True},
        {"block_size": None},
        {"queue_depth": 0},
        {"queue_depth": MAX_QUEUE_DEPTH + 1},
        {"queue_depth": 8.0},
        {"thread_count": 0},
        {"thread_count": MAX_THREAD_COUNT + 1},
        {"thread_count": True},
        {"single_submit": 1},
        {"overlap_events": "true"},
        {"backend": "io-uring"},
        {"backend": ""},
        {"backend": None},
        {"direct": "yes"},
        {"direct": None},
        {"direct": 1},
    ],
    ids=str,
)
def test_refuses_by_name_and_value(settings: dict[str, object]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(UsageError, match=name) as caught:
        AioConfig(**settings)  # type: ignore[arg-type]
    assert str(value) in str(caught.value)


def test_is_a_value() -> None:
    config = AioConfig(block_size=4096, thread_count=2)
    assert config == AioConfig(thread_count=2, block_size=4096)
    assert len({config, AioConfig(block_size=4096, thread_count=2)}) == 1
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8192  # type: ignore[misc]
    with pytest.raises(UsageError, match="queue_depth"):
        dataclasses.replace(config, queue_depth=0)


def test_bytes_in_flight() -> None:
    assert AioConfig(block_size=8192, queue_depth=4, thread_count=3).bytes_in_flight == 98304
