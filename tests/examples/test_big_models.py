"""`examples/big_models/train.py` on its smallest model: every way to update, compared with states
in memory. One process for each rank makes all runs, since its imports take longer than a run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked
import pytest
from doors import needs
from ports import free_port
from processes import finished

pytestmark = needs("transformers")

SCRIPT = Path(__file__).parents[2] / "examples" / "big_models" / "train.py"
SMALL = "--model tiny --batch 2 --sequence 64 --steps 6 --deterministic --host-memory 1MB"
# The script's `main` alone, with other options and another port for each run.
SEVERAL = f"""
import json, os, runpy, sys

os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
main = runpy.run_path({str(SCRIPT)!r})["main"]
for port, options in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    sys.argv = ["train.py", *options]
    main()
sys.stdout.flush()
os._exit(0)  # as gloo_rank.py
"""
UPDATES = ("after", "in-backward", "under-forward", "both")
EXACT = [(update, clip) for update in UPDATES for clip in ("0", "0.5")] + [("in-backward", "1000")]
PACKED = ("split", "compact", "compact24")
RESUMED = {
    "straight": "--format {}",
    "half": "--format {} --steps 4 --save SAVED",
    "resumed": "--format {} --steps 2 --resume SAVED",
}


def trained(place, runs, ranks=1):
    """The results that the script prints at the end of each of *runs*, which are options by name."""
    whole = []
    for name, options in runs.items():
        drives = [place / name / f"drive{rank}" for rank in range(ranks)]
        for drive in drives:
            drive.mkdir(parents=True)
        options = options.replace("SAVED", str(place / "saved")).split()
        whole.append([free_port(), [*SMALL.split(), "--drive", *map(str, drives), *options]])
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    (place / "several.py").write_text(SEVERAL)
    command = [forked.PYTHON, "-W", "ignore", *launcher * (ranks > 1), place / "several.py"]
    ran = finished(
        [*command, json.dumps(whole)],
        env=forked.launching({**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}),
    )
    assert ran.returncode == 0, ran.stderr
    assert not [*place.glob("*/drive*/*")]
    results = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return dict(zip(runs, results, strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one rank."""
    how = "--format exact --update {} --clip {}"
    runs = {f"memory {clip}": f"--reference {how.format('after', clip)}" for _, clip in EXACT}
    runs |= {f"{update} {clip}": how.format(update, clip) for update, clip in EXACT}
    runs |= {name: f"--format {name}" for name in PACKED}
    runs |= {name: options.format("exact") for name, options in RESUMED.items()}
    return trained(tmp_path_factory.mktemp("one"), runs)


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """Runs of two ranks with a directory each."""
    clipped = "--clip 0.5 --format exact --update"
    runs = {update: f"{clipped} {update}" for update in UPDATES[1:]}
    runs |= {"memory": f"{clipped} after --reference"}
    runs |= {name: options.format("compact24") for name, options in RESUMED.items()}
    return trained(tmp_path_factory.mktemp("two"), runs, ranks=2)


@pytest.mark.parametrize(("update", "clip"), EXACT)
def test_exact_has_the_losses_of_states_in_memory(alone, update, clip):
    found, reference = alone[f"{update} {clip}"], alone[f"memory {clip}"]
    assert found["losses"] == reference["losses"]
    assert found["steps_clipped"] == reference["steps_clipped"]
    assert (found["steps_clipped"] > 0) == (clip == "0.5")
    assert (reference["losses"] == alone["memory 0"]["losses"]) == (clip != "0.5")


@pytest.mark.parametrize("update", UPDATES[1:])
def test_two_ranks_with_a_directory_each_have_the_losses_of_states_in_memory(by_two, update):
    on, off = by_two[update], by_two["memory"]
    assert on["losses"] == off["losses"]
    assert on["steps_clipped"] == off["steps_clipped"] > 0
    assert on["gpus"] == 2


@pytest.mark.parametrize("ranks", ["alone", "by_two"])
def test_a_resumed_run_has_the_losses_of_one_that_went_on(ranks, request):
    runs = request.getfixturevalue(ranks)
    assert runs["resumed"]["losses"] == runs["straight"]["losses"][4:]


@pytest.mark.parametrize("state_format", PACKED)
def test_other_formats_train_alike(alone, state_format):
    losses, reference = (
        [float.fromhex(loss) for loss in alone[name]["losses"]]
        for name in (state_format, "memory 0")
    )
    assert losses == pytest.approx(reference, abs=0.05)
