"""What is trained, and how: a plan in TOML. Pure."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from nvme_offload.errors import UsageError
from nvme_offload.units import parse_bytes

from ..models import Tensor, config_of, tensors

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

# What a target or a ratio may be about, with how the report calls it.
MEASURES = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "update": "backward + optimizer",
    "step": "step",
    "peak": "peak memory",
    "settled_peak": "peak memory past the first steps",
    "cold": "cold start",
}
# Likewise, but of one variant beside the drive.
SHARES = {
    "optimizer_floor": "optimizer phase: floor / time",
    "step_floor": "step: floor / time",
    "forward_floor": "forward: floor / time",
}
_DIRECTORY_KEYS = ("offload_optimizer", "offload_param")


@dataclasses.dataclass(frozen=True)
class Model:
    """*blocks* of a LayerNorm and two matrices of *hidden* x 4 *hidden*, and *tokens* of input, all
    of *hidden*.

    Or, with a *name*, that language model of `sweeps.models`, its small-width form with *width*,
    trained on *batch* rows of *tokens*.
    """

    hidden: int = 0
    blocks: int = 0
    tokens: int = 16
    name: str | None = None
    width: int | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        if bool(self.name) == bool(self.hidden and self.blocks):
            raise ValueError("the model needs either hidden and blocks, or a name")
        if self.width is not None and self.name is None:
            raise ValueError("only a model with a name has a small-width form")

    @property
    def config(self) -> dict[str, Any] | None:
        """Of the language model, as Hugging Face has it; None of the blocks. Raises: UsageError
        where there is none of that name.
        """
        return config_of(self.name, self.width) if self.name is not None else None

    @functools.cached_property
    def parameters(self) -> int:
        """Elements in all matrices and vectors."""
        return (
            self.blocks * (8 * self.hidden**2 + 7 * self.hidden)
            if self.name is None
            else sum(tensor.elements for tensor in self._tensors)
        )

    @property
    def title(self) -> str:
        """What it is, for a report."""
        if self.name is None:
            return f"{self.blocks} blocks of {self.hidden}"
        width = "" if self.width is None else f" at width {self.width}"
        return f"the {len(self._tensors)} tensors of {self.name}{width}, a batch of {self.batch} x {self.tokens} tokens"

    @functools.cached_property
    def _tensors(self) -> list[Tensor]:
        config = self.config
        assert config is not None
        return tensors(config)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train. ours: call `nvme_offload.zero3.enable()` first. *ds_config* as DeepSpeed is
    given it, but for the directory on the drive.

    equal: its losses and weights must be those of the other variants that say so.
    """

    name: str
    title: str
    ours: bool
    equal: bool
    ds_config: Mapping[str, Any]

    @property
    def drives(self) -> bool:
        """Whether it uses the drive."""
        return any(section.get("device") == "nvme" for section in _offload_sections(self.ds_config))

    def ds_config_at(self, directory: str) -> dict[str, Any]:
        """The configuration with *directory* for everything that goes to NVMe."""
        config = copy.deepcopy(dict(self.ds_config))
        for section in _offload_sections(config):
            if section.get("device") == "nvme":
                section["nvme_path"] = directory
        return config


@dataclasses.dataclass(frozen=True)
class Target:
    """What a variant should reach: a measure's ratio to the variant *against*, or a share of the
    floor (*against* None).
    """

    variant: str
    measure: str
    against: str | None
    most: float | None
    least: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """settling_steps: of the *steps* the first ones, which count for nothing but the cold start.
    cold_rounds: with nothing compiled before, one step each.

    baseline: the variant that all others are compared with. fio_bytes: of each of fio's two files;
    0: no fio.
    """

    model: Model
    steps: int
    settling_steps: int
    rounds: int
    cold_rounds: int
    cold_variants: tuple[str, ...]
    fio_bytes: int
    timeout_seconds: float
    baseline: str
    variants: tuple[Variant, ...]
    targets: tuple[Target, ...]

    def narrowed(
        self,
        rounds: int | None,
        cold_rounds: int | None,
        steps: int | None,
        only: Collection[str] | None,
        model: Model | None = None,
    ) -> Plan:
        """This plan with other numbers, with *only* some of its variants, or with another model,
        where they are not None. Raises: UsageError.
        """
        names = [variant.name for variant in self.variants]
        if only is not None and (unknown := sorted(set(only) - set(names))):
            raise UsageError(f"{unknown[0]!r} is none of the plan's variants: {', '.join(names)}")
        kept = tuple(variant for variant in self.variants if only is None or variant.name in only)
        known = {variant.name for variant in kept} | {None}
        wanted = self.steps if steps is None else steps
        return dataclasses.replace(
            self,
            model=model or self.model,
            steps=wanted,
            settling_steps=min(self.settling_steps, wanted - 1),
            rounds=self.rounds if rounds is None else rounds,
            cold_rounds=self.cold_rounds if cold_rounds is None else cold_rounds,
            cold_variants=tuple(name for name in self.cold_variants if name in known),
            baseline=self.baseline if self.baseline in known else kept[0].name,
            variants=kept,
            targets=tuple(
                target for target in self.targets if {target.variant, target.against} <= known
            ),
        )

    def named(self, name: str) -> Variant:
        """The variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)

    @property
    def aio(self) -> Mapping[str, Any]:
        """The baseline's settings of the drive, with DeepSpeed's defaults; fio is run at these."""
        section = self.named(self.baseline).ds_config.get("aio", {})
        return {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, **section}


_PLAN_KEYS = {
    "steps",
    "settling_steps",
    "rounds",
    "cold_rounds",
    "cold_variants",
    "fio_bytes",
    "timeout_seconds",
    "baseline",
    "model",
    "ds_config",
}
_VARIANT_KEYS = {"name", "title", "ours", "equal", "ds_config"}
_TARGET_KEYS = {"variant", "measure", "against", "most", "least"}


def read_plan(path: Path) -> Plan:
    """The plan in *path*.

    Raises: UsageError naming what is missing, unknown or not possible; OSError.
    """
    try:
        return _plan(tomllib.loads(path.read_text()))
    except KeyError as error:
        raise UsageError(f"{path}: {error} is missing") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path}: {error}") from None


def _plan(document: dict[str, Any]) -> Plan:
    _require_known(document, _PLAN_KEYS | {"variant", "target"})
    common = document["ds_config"]
    variants = tuple(_variant(entry, common) for entry in document["variant"])
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise ValueError("two variants have the same name")
    targets = tuple(_target(entry) for entry in document.get("target", []))
    cold_variants = tuple(document.get("cold_variants", names))
    _require_known([document["baseline"], *cold_variants], names)
    _require_known(
        [
            name
            for target in targets
            for name in (target.variant, target.against)
            if name is not None
        ],
        names,
    )
    plan = Plan(
        Model(**document["model"]),
        document["steps"],
        document["settling_steps"],
        document["rounds"],
        document.get("cold_rounds", 0),
        cold_variants,
        parse_bytes(document["fio_bytes"]),
        document["timeout_seconds"],
        document["baseline"],
        variants,
        targets,
    )
    if not 0 <= plan.settling_steps < plan.steps:
        raise ValueError(f"of {plan.steps} steps, {plan.settling_steps} cannot be for settling")
    return plan


def _variant(entry: dict[str, Any], common: Mapping[str, Any]) -> Variant:
    _require_known(entry, _VARIANT_KEYS)
    return Variant(
        entry["name"],
        entry["title"],
        entry["ours"],
        entry.get("equal", True),
        merged(common, entry.get("ds_config", {})),
    )


def _target(entry: dict[str, Any]) -> Target:
    _require_known(entry, _TARGET_KEYS)
    target = Target(
        entry["variant"],
        entry["measure"],
        entry.get("against"),
        entry.get("most"),
        entry.get("least"),
    )
    _require_known([target.measure], MEASURES if target.against is not None else SHARES)
    if (target.most is None) == (target.least is None):
        raise ValueError(f"the target for {target.variant} needs either most or least")
    return target


def merged(common: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """*common* with what *special* says otherwise, section by section."""
    result = copy.deepcopy(dict(common))
    for key, value in special.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def _offload_sections(ds_config: Mapping[str, Any]) -> list[dict[str, Any]]:
    zero = ds_config.get("zero_optimization", {})
    return [zero[key] for key in _DIRECTORY_KEYS if key in zero]


def _require_known(found: Iterable[str], known: Collection[str]) -> None:
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(sorted(known))}")
