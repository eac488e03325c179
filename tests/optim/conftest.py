"""`reference` is imported by these tests and by those on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
