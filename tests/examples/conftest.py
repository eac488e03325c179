"""The scripts of `examples/` run in processes of their own, see `doors`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for doors
