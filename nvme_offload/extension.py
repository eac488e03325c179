"""The C++ core: `_aio`, or one error that says how to get it."""

from .errors import UnsupportedError

try:
    from . import _aio as _aio
except ImportError as error:
    raise UnsupportedError(
        f"the compiled part of nvme_offload does not load: {error}; build it again with this Python: pip install --force-reinstall "
        "--no-cache-dir --no-deps nvme-offload, or in a checkout pip install --editable . (where a version of GLIBCXX is missing, "
        "first conda-forge's libstdcxx)"
    ) from error
