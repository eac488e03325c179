"""Programs that tests run to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from patience import PATIENCE


def finished(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """What *command* said, and its status; *options* as of `subprocess.run`."""
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, **{"timeout": PATIENCE, **options}
    )
