"""That a config took effect is proven by who reads it back, and a config that says something else
is found out.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from nvme_offload.ds_config import edit as ds_config
from nvme_offload.errors import UsageError
from nvme_offload.hardware.profile import DEEPSPEED_DEFAULTS, Setting
from nvme_offload.tune.proof import prove, read_by_deepspeed, setting_of

CHOSEN = Setting(2 << 20, 16, 4, single_submit=True, overlap_events=False)
HUGGING_FACE = '{\n  "train_batch_size": "auto", // by the launcher\n  "optimizer": {"params": {"lr": "auto"}},\n}\n'

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


@pytest.mark.slow
@needs_deepspeed
def test_deepspeed_reads_back_what_was_written(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(HUGGING_FACE)
    assert prove(config, CHOSEN)[1] is False  # before
    ds_config.apply(config, CHOSEN)
    found = read_by_deepspeed(config)
    assert found is not None
    assert {key: found[key] for key in ds_config.aio_section(CHOSEN)} == ds_config.aio_section(
        CHOSEN
    )
    assert prove(config, CHOSEN) == (
        "read back by DeepSpeed's own parser, and an engine was made with it",
        True,
    )


def test_without_deepspeed_this_packages_parser_reads_it(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(HUGGING_FACE)
    ds_config.apply(config, CHOSEN)
    script = (
        "import importlib.util, sys\nfind = importlib.util.find_spec\nimportlib.util.find_spec = lambda name: None if name == 'deepspeed' else find(name)\n"
        "from pathlib import Path\nfrom nvme_offload.hardware.profile import Setting\nfrom nvme_offload.tune.proof import prove\n"
        "print(prove(Path(sys.argv[1]), Setting(2 << 20, 16, 4, True, False)))\nprint(prove(Path(sys.argv[1]), Setting(2 << 20, 8, 4, True, False)))"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(config)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[0].startswith("(\"read back by this package's parser")
    assert said[0].endswith("True)")
    assert "reads queue_depth 16: set the aio section by hand" in said[1]
    assert said[1].endswith("False)")


def test_what_a_section_leaves_out_is_deepspeeds_default() -> None:
    assert setting_of({}) == DEEPSPEED_DEFAULTS
    assert setting_of({"queue_depth": 4, "thread_count": 8, "use_gds": False}) == Setting(
        1 << 20, 4, 1
    )
    with pytest.raises(UsageError, match="queue_depth"):
        setting_of({"queue_depth": "auto"})


@needs_deepspeed
def test_the_defaults_known_here_are_deepspeeds(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    found = read_by_deepspeed(tmp_path / "ds.json")
    assert found is not None
    assert {key: found[key] for key in ds_config.DEEPSPEED_AIO} == ds_config.DEEPSPEED_AIO


def test_a_file_that_deepspeed_cannot_read_is_no_proof(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"a": 1, "a": 2}')
    assert read_by_deepspeed(tmp_path / "ds.json") is None
