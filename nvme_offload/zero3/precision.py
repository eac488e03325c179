"""Adds advice to DeepSpeed's error when it refuses a precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..errors import UsageError


def explained(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """`DeepSpeedEngine._do_sanity_check` with a clear message if it refuses fp16 or bf16.

    Source: deepspeed/runtime/engine.py; deepspeed/accelerator/cpu_accelerator.py, which asks torch
    whether the CPU has fp16 instructions.
    """

    @functools.wraps(check)
    def explaining(engine: Any) -> None:
        try:
            check(engine)
        except ValueError as error:
            if "is not supported on your device" not in str(error):
                raise
            raise UsageError(
                f'{error} Without a GPU, DeepSpeed trains in fp16 only on processors with AVX512-FP16: enable "bf16" in place of "fp16", or train on '
                "a GPU; `nvme-offload doctor` says what is here"
            ) from error

    return explaining
