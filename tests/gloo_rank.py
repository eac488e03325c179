"""`python gloo_rank.py SCRIPT ARGUMENTS...`: run a script as it is, and end the process without the
interpreter's own end: a thread of gloo that still releases a gathered tensor aborts it, once in
a hundred runs (pytorch/pytorch#190489).
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path

del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
