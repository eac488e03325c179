"""The proof that a config took effect: DeepSpeed's own parser reads it, and an engine is made with the
result.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from nvme_offload.ds_config import edit as ds_config
from nvme_offload.errors import OffloadError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.hardware.profile import Setting

# As deepspeed/runtime/config.py does it, in a separate process: DeepSpeed takes seconds to load, and
# prints while it does.
_READ = """
import json, sys
import hjson
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
with open(sys.argv[1]) as file:
    aio = get_aio_config(hjson.load(file, object_pairs_hook=dict_raise_error_on_duplicate_keys))
print("\\n" + json.dumps(aio))
"""
_SECONDS = 120


def read_by_deepspeed(config: Path) -> dict[str, Any] | None:
    """The aio section from DeepSpeed's own parser, defaults included; None if DeepSpeed is not
    installed or does not load.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return None
    environment = {"DS_ACCELERATOR": "cpu", **os.environ}
    try:
        command, quiet = [sys.executable, "-c", _READ, str(config)], subprocess.DEVNULL
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, env=environment, stdin=quiet
        )
        found = json.loads(ran.stdout.strip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return found if isinstance(found, dict) else None


def prove(config: Path, chosen: Setting) -> tuple[str, bool]:
    """A sentence on which parser read *chosen* back from *config*, and whether it did."""
    from nvme_offload.io.engine import Engine

    wanted = ds_config.aio_section(chosen)
    by = "DeepSpeed's own parser"
    found = read_by_deepspeed(config)
    if found is None:
        by = "this package's parser (DeepSpeed is not available here)"
        found = ds_config.read_aio(config)
    wrong = [
        f"{key} {found.get(key)!r}" for key, value in wanted.items() if found.get(key) != value
    ]
    if wrong:
        return f"{by} reads {', '.join(wrong)}: set the aio section by hand", False
    try:
        Engine(AioConfig.of(setting_of(found, chosen.backend))).close()
    except OffloadError as error:
        return f"read back by {by}, but no engine can be made with it: {error}", False
    return f"read back by {by}, and an engine was made with it", True


def setting_of(aio: dict[str, Any], backend: str = "libaio") -> Setting:
    """The setting of an aio section, with DeepSpeed's defaults for missing keys. Raises: UsageError."""
    defaults = ds_config.DEEPSPEED_AIO
    given = {key: value for key, value in aio.items() if key in defaults}
    known = ds_config.aio_section({**defaults, **given})
    return Setting(
        block_size=int(known["block_size"]),
        queue_depth=int(known["queue_depth"]),
        thread_count=int(known["intra_op_parallelism"]),
        single_submit=bool(known["single_submit"]),
        overlap_events=bool(known["overlap_events"]),
        backend=backend,
    )
