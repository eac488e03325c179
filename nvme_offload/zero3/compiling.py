"""Logs a line before DeepSpeed compiles one of its ops. Compilation takes minutes, and DeepSpeed
logs only its end.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


def announced(jit_load: Callable[..., Any]) -> Callable[..., Any]:
    """`OpBuilder.jit_load`, wrapped to log a line before it compiles."""

    @functools.wraps(jit_load)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = _build_directory(self.name)
        if not (place / f"{self.name}.so").exists():
            _log.info(
                "compiling DeepSpeed's %s: takes minutes, once; the result is kept in %s",
                *(self.name, place),
            )
        return jit_load(self, *args, **kwargs)

    return load


def _build_directory(name: str) -> Path:
    """The directory in which torch.utils.cpp_extension.load builds the extension *name*."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False))
