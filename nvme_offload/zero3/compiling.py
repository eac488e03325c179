"""Logs a line before DeepSpeed compiles one of its ops, or waits for another process that does.
Compilation takes minutes, and DeepSpeed logs only its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .replacing import replaces

_log = logging.getLogger(__name__)


@replaces("deepspeed.ops.op_builder.builder:OpBuilder")
def jit_load(original: Callable[..., Any], builder: Any, *args: Any, **named: Any) -> Any:
    """Log a line before an op is compiled, or awaited."""
    from torch.utils import cpp_extension

    place = Path(cpp_extension._get_build_directory(builder.name, verbose=False))
    if (place / "lock").exists():  # torch waits until it is gone
        _log.warning(
            "waiting for another process that compiles DeepSpeed's %s: if none does, a compilation was killed, so remove %s",
            *(builder.name, place / "lock"),
        )
    elif not (place / f"{builder.name}.so").exists():
        _log.info(
            "compiling DeepSpeed's %s: takes minutes, once; the result is kept in %s",
            *(builder.name, place),
        )
    return original(builder, *args, **named)
