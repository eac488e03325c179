"""Blocks of a model that torch.compile compiles: one call uses all of their parameters."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import UnsupportedError


@dataclasses.dataclass(eq=False)
class CompiledBlock:
    """A compiled *module*: `replace` exchanges its compiled *call*. *modules*, which the compiler
    traces, have the *parameters*.
    """

    module: torch.nn.Module
    call: Callable[..., Any]
    modules: set[torch.nn.Module]
    parameters: list[torch.nn.Parameter]

    def replace(self, call: Callable[..., Any]) -> None:
        """Let *module* call *call* in place of the compiled code."""
        untyped: Any = self.module
        if _is_wrapper(self.module):
            untyped.forward = call
        else:
            untyped._compiled_call_impl = call


def compiled_blocks(model: torch.nn.Module) -> Iterator[CompiledBlock]:
    """The compiled modules of *model*; those inside of another one are a part of it."""
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        untyped: Any = module
        if module in inside or not _is_compiled(module):
            continue
        wrapped = _is_wrapper(module)
        call = untyped.forward if wrapped else untyped._compiled_call_impl
        modules = set(module.modules()) - ({module} if wrapped else set())
        yield CompiledBlock(module, call, modules, list(module.parameters()))
        inside |= modules


def check_not_whole(model: torch.nn.Module) -> None:
    """Raises: UnsupportedError if *model* itself is compiled."""
    if _is_compiled(model):
        raise UnsupportedError(
            "all parameters of a compiled module are on the device together: compile the blocks of the model, not the model, before offload.parameters"
        )


def check_not_frozen() -> None:
    """Raises: UnsupportedError if the compiler copies parameters into its code."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None and config.freezing and not torch.is_grad_enabled():
        raise UnsupportedError(
            "torch._inductor.config.freezing makes parameters constants of compiled code, and streamed ones change: switch it off"
        )


def _is_compiled(module: torch.nn.Module) -> bool:
    return _is_wrapper(module) or module._compiled_call_impl is not None


def _is_wrapper(module: torch.nn.Module) -> bool:
    """Whether *module* is what torch.compile returns for a module."""
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return frame is not None and isinstance(module, frame.OptimizedModule)
