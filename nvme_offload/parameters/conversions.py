"""The conversions of transformers between a model and its checkpoints, whose names and tensors may
differ: a model has the experts of a layer in one tensor, and its checkpoint has each apart.

Source: convert_and_load_state_dict_in_model and revert_weight_conversion, in core_model_loading of
transformers 5. Older releases have no conversions.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Named = dict[str, torch.Tensor]
Read = Callable[[Sequence[str]], Named]  # of all names at the same time


class Part(NamedTuple):
    """A tensor of a model that a checkpoint has, or the reverse: the name there, or the group of tensors
    of which it is made; and a tensor of its shape and dtype.
    """

    source: str | Made
    form: torch.Tensor


class Group:
    """Tensors that one conversion makes of others."""

    def __init__(self, model: Any, transform: Any, name: str, rename: Callable[[str], str]) -> None:
        self._model = model
        self._transform = transform
        self._name = name
        self._rename = rename  # the tensors that it makes
        self._sources: list[tuple[str, str]] = []  # the pattern that a name matches, and the name

    @property
    def sources(self) -> list[str]:
        """The names of the tensors that the conversion takes."""
        return [name for _, name in self._sources]

    def add(self, pattern: str, name: str) -> None:
        """Take the tensor *name*, too, which *pattern* of the conversion matches."""
        self._sources.append((pattern, name))

    def made(self, of: Named) -> Named:
        """The tensors by name, made of its sources, which are dropped from *of*. On the meta device they
        have shapes and dtypes alone.
        """
        transform = copy.deepcopy(self._transform)
        for pattern, name in self._sources:
            transform.add_tensor(self._name, name, pattern, of.pop(name))
        found = transform.convert(self._name, model=self._model, config=self._model.config)
        if isinstance(found, tuple):  # with errors, in early releases
            found = found[0]
        return {
            self._rename(name): one[0] if isinstance(one, list) else one
            for name, one in found.items()
        }


class Made(NamedTuple):
    """The tensor *name* of those that *group* makes."""

    group: Group
    name: str


class Tensors:
    """Reads tensors by *read*, and makes others of them, a group at a time."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._group: Group | None = None
        self._made: Named = {}

    def __call__(self, source: str | Made) -> torch.Tensor:
        """The tensor *source*. What its group makes besides is kept until the next group."""
        if isinstance(source, str):
            return self._read([source])[source]
        if self._group is not source.group or source.name not in self._made:
            self._made = {}  # before the next are made
            sources = self._read(source.group.sources)
            self._group, self._made = source.group, source.group.made(sources)
        return self._made.pop(source.name)


class _Conversions:
    """The conversions *transforms* of *model*, of classes of *core*, and their groups."""

    def __init__(self, core: Any, model: Any, transforms: Iterable[Any]) -> None:
        transforms = list(transforms)
        self.renamings = [one for one in transforms if isinstance(one, core.WeightRenaming)]
        self.converters = [one for one in transforms if isinstance(one, core.WeightConverter)]
        self._model = model
        self._of_pattern = {
            pattern: one for one in self.converters for pattern in one.source_patterns
        }
        self._groups: dict[str, Group] = {}

    def take(self, name: str, target: str, pattern: str, rename: Callable[[str], str]) -> None:
        """Make *target*, which *rename* may rename, of the tensor *name*, too, by the conversion with
        *pattern*.
        """
        if target not in self._groups:
            transform = self._of_pattern[pattern]
            self._groups[target] = Group(self._model, transform, target, rename)
        self._groups[target].add(pattern, name)

    def made_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
        """The tensors that the groups make of *tensors*."""
        found: dict[str, Part] = {}
        for group in self._groups.values():
            forms = {
                name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta")
                for name in group.sources
            }
            for name, form in group.made(forms).items():
                found[name] = Part(Made(group, name), form)
        return found


def loaded(
    model: Any, inside: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]
) -> dict[str, Part]:
    """The tensors of *model*'s state dict *inside* that a checkpoint with the tensors *saved* has.
    Both may be on the meta device.
    """
    core = _core(model)
    if core is None:
        return {name: Part(name, form) for name, form in saved.items() if name in inside}
    conversions = _Conversions(core, model, _mapping(model))
    renamings, converters = conversions.renamings, conversions.converters
    base = model.base_model_prefix
    found: dict[str, Part] = {}
    for name in sorted(saved, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, renamings, converters, base, inside)
        if target not in inside and name in inside:  # a model's own name
            target, pattern = core.rename_source_key(name, [], [], base, inside)
        if target not in inside:
            continue
        if pattern is None:
            found.setdefault(target, Part(name, saved[name]))
        else:
            conversions.take(name, target, pattern, rename=str)
    return found | conversions.made_of(saved)


def stored(model: Any, inside: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """The tensors of a checkpoint of *model*, whose state dict is *inside*."""
    core = _core(model)
    transforms = None if core is None else getattr(model, "_weight_conversions", None)
    if core is not None and transforms is None:  # not made by from_pretrained
        transforms = [
            one
            for one in _mapping(model, add_legacy=False)
            # whose prefix the checkpoint may lack; early releases have no such class
            if not isinstance(one, getattr(core, "PrefixChange", ()))
        ]
    if core is None or not transforms:
        return {name: Part(name, form) for name, form in inside.items()}
    backward = _Conversions(core, model, (one.reverse_transform() for one in reversed(transforms)))

    def rename(name: str) -> str:
        renamed: str = core.rename_source_key(name, backward.renamings, [])[0]
        return renamed

    found: dict[str, Part] = {}
    for name in sorted(inside, key=core.dot_natural_key):
        target, pattern = core.rename_source_key(name, [], backward.converters)
        if pattern is None:
            found[rename(name)] = Part(name, inside[name])
        else:
            backward.take(name, target, pattern, rename)
    return found | backward.made_of(inside)


def _mapping(model: Any, **options: Any) -> list[Any]:
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    found: list[Any] = mapping.get_model_conversion_mapping(model, **options)
    return found


def _core(model: torch.nn.Module) -> Any:
    """The module of transformers with the conversions of *model*; None if it is no model of a
    transformers that has them.
    """
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    try:
        return importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return None
