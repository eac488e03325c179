"""`python -m nvme_offload.commands`, which is `nvme-offload`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
