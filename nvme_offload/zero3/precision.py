"""What DeepSpeed says where it refuses a precision, with what to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..errors import UsageError


def explained(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """`DeepSpeedEngine._do_sanity_check`, whose refusal of fp16 or bf16 says what it is about and
    what to do.

    Source: deepspeed/runtime/engine.py; deepspeed/accelerator/cpu_accelerator.py, which asks torch
    for fp16 instructions of the processor.
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
