"""`examples/train_deepspeed.py` by each launcher: two processes on the CPU, on one machine or as on
two, by one drive or two, whole or resumed.
"""

from __future__ import annotations

import re
import sys

import pytest
from doors import DEEPSPEED, TORCHRUN, configuration, moved, needs, place_with_drives, run, run_well
from ports import free_port

pytestmark = [pytest.mark.deepspeed, needs("deepspeed")]

# bytes of host memory a rank: less than half of the model's, so that the rest must go to the drive
SMALL = 6_000_000


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return place_with_drives(tmp_path_factory)


def script(config, steps, *options):
    return ["train_deepspeed.py", "--deepspeed", config, "--steps", str(steps), *options]


def assert_same_losses(interrupted, whole):
    """Of four steps, interrupted after the second: the same to the last digit until the first step
    after that.

    From there to about 16 bit: DeepSpeed's Adam for the CPU multiplies up what corrects its bias,
    and takes a power of it after a checkpoint.
    """
    assert interrupted[:3] == whole[:3]
    last, expected = (float(losses[3].rpartition(" ")[2]) for losses in (interrupted, whole))
    assert last == pytest.approx(expected, rel=0.01)


@pytest.fixture(scope="module")
def config(place):
    return configuration("ds_config.json", place / "drive", place, host_memory=SMALL)


@pytest.fixture(scope="module")
def half(place, config):
    """Two steps on one machine under the deepspeed launcher, then saved."""
    command = [*DEEPSPEED, "--num_gpus=2", "--master_port", str(free_port())]
    (ended,) = run_well([*command, *script(config, 2, "--checkpoint", place / "saved")])
    return ended


def test_the_deepspeed_launcher(half):
    assert [loss.partition(":")[0] for loss in half.losses] == ["step 1", "step 2"]
    assert min(moved(half.said)) > 0
    assert half.said.count("host memory for offload: 5.72 MiB") == 1  # logged by one rank


@pytest.fixture(scope="module")
def resumed(place, half):
    """Two more steps with torchrun, as on two machines, with two drives each."""
    several = configuration(
        "ds_config_several_drives.json", place / "drive", place, host_memory=SMALL
    )
    machine = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    machine += ["--master-port", str(free_port())]
    training = script(several, 4, "--checkpoint", place / "saved")
    first, _ = run_well(*([*machine, f"--node-rank={number}", *training] for number in (0, 1)))
    return first


def test_torchrun_on_two_machines_with_two_drives(place, resumed):
    assert [loss.partition(":")[0] for loss in resumed.losses] == ["step 3", "step 4"]
    assert min(moved(resumed.said)) > 0
    assert (place / "drive0").is_dir()
    assert (place / "drive1").is_dir()


def test_a_hostfile_of_two_and_no_interruption(place, config, half, resumed):
    (place / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    machine = [*DEEPSPEED, "--hostfile", place / "hostfile", "--no_ssh"]
    machine += ["--master_addr=127.0.0.1", "--master_port", str(free_port())]
    first, _ = run_well(
        *([*machine, f"--node_rank={number}", *script(config, 4)] for number in (0, 1))
    )
    assert_same_losses(half.losses + resumed.losses, first.losses)


def test_too_little_host_memory_is_refused_with_the_numbers(place):
    config = configuration("ds_config_host_memory.json", place / "drive", place)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    # in a new interpreter, as no other test of the script
    (ended,) = run([sys.executable, *script(config, 4)], forks=False, **address, **rank)
    assert ended.status != 0
    assert ended.losses == []
    (refusal,) = re.findall(r"UsageError: (.*)", ended.said)
    assert re.search(
        r'"host_memory" of 977 KiB cannot hold .* allow at least \d+ bytes \(\d.*iB\)', refusal
    )
