"""What `Progress` makes of the steps that it sees."""

from __future__ import annotations

import logging
import types

import pytest
import torch

from nvme_offload.zero3.progress import Progress
from nvme_offload.zero3.step_stats import StepStats


def engine_after(
    step,
    seconds=2.0,
    waited=0.5,
    read=3_000_000_000,
    written=1_000_000_000,
    busy=0.5,
    disk_written=9_000_000_000,
):
    stats = StepStats(
        step=step,
        seconds=seconds,
        update_seconds=seconds / 2,
        bytes_read=read,
        bytes_written=written,
        waited_seconds=waited,
        update_waited_seconds=0.0,
        resident_bytes=0,
        peak_bytes=0,
        tuned_bytes_per_second=None,
        total_written_bytes=written * step,
        busy_share=busy,
        disk_written_bytes=disk_written,
    )
    return types.SimpleNamespace(
        optimizer=types.SimpleNamespace(clock=types.SimpleNamespace(last=stats))
    )


def test_metrics_are_of_the_steps_since_the_last():
    progress = Progress()
    assert progress.metrics() == {}
    first = engine_after(1)
    assert progress.see(first)
    assert not progress.see(first)  # a micro-batch later
    assert progress.metrics() == {
        "nvme_wait_share": 0.25,
        "nvme_gb_per_s": 2.0,
        "nvme_read_gb": 3.0,
        "nvme_written_gb": 1.0,
        "nvme_offload/step_seconds": 2.0,
        "nvme_offload/busy_share": 0.5,
        "nvme_offload/total_written_gb": 1.0,
        "nvme_offload/disk_written_gb": 9.0,
        "nvme_offload/resident_gb": 0.0,
    }
    assert progress.metrics() == {}
    assert progress.see(engine_after(2, waited=0.0, busy=1.0))
    assert progress.see(
        engine_after(3, seconds=6.0, waited=4.0, read=1_000_000_000, disk_written=None)
    )
    assert progress.metrics() == {
        "nvme_wait_share": 0.5,
        "nvme_gb_per_s": 0.75,
        "nvme_read_gb": 2.0,
        "nvme_written_gb": 1.0,
        "nvme_offload/step_seconds": 4.0,
        "nvme_offload/busy_share": 0.625,
        "nvme_offload/total_written_gb": 3.0,
        "nvme_offload/resident_gb": 0.0,
    }
    assert progress.see(engine_after(4, busy=None))
    assert "nvme_offload/busy_share" not in progress.metrics()


def test_an_attribute_of_the_model_is_not_taken_for_the_clock():
    """DeepSpeed's engine is a module that has the attributes of its model."""
    engine = torch.nn.Module()
    engine.clock = "of the model"
    engine.optimizer = engine_after(1).optimizer
    assert Progress().see(engine)
    del engine.optimizer
    assert not Progress().see(engine)


def test_the_summary_is_of_all_steps(caplog):
    progress = Progress()
    with caplog.at_level(logging.INFO, "nvme_offload"):
        progress.tell_summary()
        progress.see(engine_after(1))
        progress.metrics()
        progress.see(engine_after(1, seconds=6.0, waited=3.5))  # of another engine
        progress.tell_summary()
    assert caplog.messages == [
        "2 steps in 8 s, 4 s each: 50% of it waiting for the drive; read 6 GB and wrote 2 GB, 1 GB/s"
    ]


def test_a_micro_batch_before_the_first_step_shows_nothing_and_is_no_reason_to_warn(caplog):
    progress = Progress()
    assert not progress.see(
        types.SimpleNamespace(
            optimizer=types.SimpleNamespace(clock=types.SimpleNamespace(last=None))
        )
    )
    assert caplog.messages == []


@pytest.mark.parametrize("engine", [object(), types.SimpleNamespace(optimizer=object())])
def test_what_is_not_offloaded_is_said_once(caplog, engine):
    progress = Progress()
    assert [progress.see(engine), progress.see(engine)] == [False, False]
    assert progress.metrics() == {}
    assert len(caplog.messages) == 1
    assert "no parameters and no optimizer states on a drive" in caplog.messages[0]
