"""Autoload: a DeepSpeed configuration with the section "nvme_offload" needs no line of code.

`import torch` calls `install`, by torch's entry-point group "torch.backends" (docs.pytorch.org,
"Out-of-tree extension autoloading"; torch 2.5 and newer). `install` only registers what is to
happen when DeepSpeed has been imported: nothing else is imported here, neither DeepSpeed nor a
part of torch. Why this group: a .pth file would run in every Python process, also in those that
never import torch, and editable installs do not have it; DeepSpeed has no plugin interface.

The environment variable NVME_OFFLOAD_AUTOLOAD chooses: "0" does nothing; "always", which
`nvme-offload run` sets, enables as soon as DeepSpeed is imported; anything else, or none, enables
when DeepSpeed parses a configuration with the section.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH = "NVME_OFFLOAD_AUTOLOAD"
OFF, ALWAYS = "0", "always"

_SECTION = "nvme_offload"


def install() -> None:
    """Arrange that DeepSpeed offloads through this package where it is asked to.

    Returns at once, in microseconds, and raises nothing: this runs inside of `import torch`.
    """
    if os.environ.get(SWITCH) == OFF:
        return
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None:
        sys.meta_path.insert(0, _finder)
    elif _is_loading(deepspeed):  # it imports torch first
        sys.meta_path.insert(0, _finder)  # if this import of it fails
        _watch(deepspeed.__spec__)
    else:
        _deepspeed_is_loaded()


class _Finder:
    """Finds DeepSpeed as the other finders do, with a spec that tells when it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "deepspeed":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                _watch(spec)
                return spec
        return None


_finder = _Finder()


class _WatchedSpec(ModuleSpec):
    """A spec whose module calls `_deepspeed_is_loaded` at the end of its import.

    Source: importlib/_bootstrap.py, `_load_unlocked`: `spec._initializing` is set to False when
    the module's code has run, or has failed. A wrapped loader would not do: DeepSpeed that is
    imported before torch runs already.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # as it was found
            if self.name in sys.modules:
                _deepspeed_is_loaded()


def _watch(spec: ModuleSpec | None) -> None:
    if type(spec) is ModuleSpec:
        spec.__class__ = _WatchedSpec


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _deepspeed_is_loaded() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    if os.environ.get(SWITCH) == ALWAYS:
        try:
            _enable()
            return
        except Exception as error:
            _warn(error)
    try:
        _watch_configurations()
    except Exception as error:
        _warn(error)


def _watch_configurations() -> None:
    """Enable when DeepSpeed has parsed a configuration with the section, as `deepspeed.initialize`
    and `zero.Init` do before they make anything of it.

    Where that fails, the parse raises UnsupportedError: DeepSpeed would offload in another way than
    the configuration says.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    parse = DeepSpeedConfig.__init__

    @functools.wraps(parse)
    def parse_and_enable(self: Any, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        ds_config: Mapping[str, Any] = self._param_dict
        if _SECTION not in ds_config:
            if _offloads(ds_config):
                from .zero3.settings import question_names

                question_names(ds_config)
            return
        try:
            _enable()
        except Exception as error:
            from .errors import UnsupportedError

            raise UnsupportedError(
                f'the DeepSpeed configuration has the section "{_SECTION}", and nvme_offload cannot be enabled: {error}; '
                f"to use DeepSpeed's own offload, remove the section or set {SWITCH}={OFF}"
            ) from error
        if DeepSpeedConfig.__init__ is parse_and_enable:
            DeepSpeedConfig.__init__ = parse
        from .zero3.settings import refuse_ineffective

        refuse_ineffective(ds_config)

    DeepSpeedConfig.__init__ = parse_and_enable


def _offloads(ds_config: Mapping[str, Any]) -> bool:
    """Whether *ds_config* has "device": "nvme"."""
    zero = ds_config.get("zero_optimization")
    sections = zero.values() if isinstance(zero, Mapping) else ()
    return any(
        isinstance(section, Mapping) and section.get("device") == "nvme" for section in sections
    )


def _enable() -> None:
    from . import zero3

    zero3._enable_unless_disabled()


def _warn(error: Exception) -> None:
    import logging

    _log = logging.getLogger(__name__)
    _log.warning(
        "DeepSpeed goes on with its own offload, since nvme_offload could not be enabled: %s; "
        "%s=0 leaves it out",
        error,
        SWITCH,
    )
