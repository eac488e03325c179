"""A DeepSpeed configuration with the section "nvme_offload" needs no line of code.

`import torch` (2.5 or newer) calls `install` through torch's entry-point group "torch.backends".
Source: docs.pytorch.org, "Out-of-tree extension autoloading". `install` imports nothing. It wraps
DeepSpeed's parser of configurations when DeepSpeed imports it.

This file imports the standard library alone: `commands/startup/sitecustomize.py` runs it in
processes that may lack the package.
"""

from __future__ import annotations

import functools
import importlib.abc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "NVME_OFFLOAD_AUTOLOAD"  # "0" turns `install` off

_SECTION = "nvme_offload"


def install() -> None:
    """Call `zero3.enable` when DeepSpeed parses a configuration with the section "nvme_offload"."""
    if os.environ.get(SWITCH) != "0":
        # DeepSpeed imports torch before this module, so the order of their imports does not matter.
        after_import("deepspeed.runtime.config", _watch_configurations)


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call *act* with module *name* at the end of its import, which fails if *act* does; now, if the
    module is loaded.
    """
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """Finds one module through the other finders, and wraps its loader."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path:
            find = None if isinstance(finder, _Finder) else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                spec.loader = _Loader(spec.loader, self._act)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The *loader* of a module, after which it calls *act*."""

    def __init__(self, loader: Any, act: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # the module sees its own loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act(module)


def _watch_configurations(module: Any) -> None:
    """Wrap the parser of *module*, `deepspeed.runtime.config`. `deepspeed.initialize` and `zero.Init`
    parse the configuration before they make anything of it.
    """
    parse = module.DeepSpeedConfig.__init__

    @functools.wraps(parse)
    def parse_and_enable(self: Any, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        ds_config: Mapping[str, Any] = self._param_dict
        if _SECTION not in ds_config:
            if _offloads(ds_config):
                from .zero3.settings import question_names

                question_names(ds_config)
            return
        _enable()
        if module.DeepSpeedConfig.__init__ is parse_and_enable:
            module.DeepSpeedConfig.__init__ = parse
        from .zero3.settings import refuse_ineffective

        refuse_ineffective(ds_config)

    module.DeepSpeedConfig.__init__ = parse_and_enable


def _offloads(ds_config: Mapping[str, Any]) -> bool:
    """Whether *ds_config* has "device": "nvme"."""
    zero = ds_config.get("zero_optimization")
    sections = zero.values() if isinstance(zero, Mapping) else ()
    return any(
        isinstance(section, Mapping) and section.get("device") == "nvme" for section in sections
    )


def _enable() -> None:
    """Raises: UnsupportedError where that fails. DeepSpeed would ignore the section and use its own
    offload.
    """
    try:
        from . import zero3

        zero3.enable_for_configuration()
    except Exception as error:
        from .errors import UnsupportedError

        raise UnsupportedError(
            f'the DeepSpeed configuration has the section "{_SECTION}", and nvme_offload cannot be enabled: {error}; '
            f"to use DeepSpeed's own offload, remove the section or set {SWITCH}=0"
        ) from error
