"""`python -m nvme_offload.commands`, which is `nvme-offload`."""

import sys

from .cli import main

sys.exit(main())
