"""`python -m nvme_offload.sweep`: the earlier name of `nvme_offload.tune`, for launch scripts."""

from __future__ import annotations

import sys

from .tune.cli import main

if __name__ == "__main__":
    sys.exit(main())
