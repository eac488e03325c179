"""`python -m nvme_offload.tune`, which is `nvme-sweep`, for launchers that start modules."""

import sys

from .cli import main

sys.exit(main())
