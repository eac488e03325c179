"""The plan in TOML: the model, and the variants that train it. Pure."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nvme_offload.errors import UsageError
from nvme_offload.hardware.config import AioConfig
from nvme_offload.units import parse_bytes

from ..plan import made, read, require_known

_DIRECTORY_KEYS = ("offload_optimizer", "offload_param")


@dataclasses.dataclass(frozen=True)
class Model:
    """*blocks* of a LayerNorm and two matrices of *hidden* x 4 *hidden*, with *tokens* input rows
    of *hidden*.
    """

    hidden: int
    blocks: int
    tokens: int = 16

    @property
    def parameters(self) -> int:
        """The number of elements."""
        return self.blocks * (8 * self.hidden**2 + 7 * self.hidden)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train. ours: call `nvme_offload.zero3.enable()` first. ds_config: the configuration
    for DeepSpeed, without the directory on the drive.

    plain: train in plain PyTorch instead, with these options of `NVMeOptimizer`, or with AdamW in
    memory if there are none. bits: losses and weights must equal the other variants with the same
    word; "" for none.
    """

    name: str
    title: str
    ds_config: Mapping[str, Any]
    ours: bool = False
    plain: Mapping[str, Any] | None = None
    bits: str = "zero3"

    @property
    def drives(self) -> bool:
        """Whether it uses the drive."""
        if self.plain is not None:
            return bool(self.plain)
        return any(section.get("device") == "nvme" for section in _offload_sections(self.ds_config))

    def ds_config_at(self, directory: str) -> dict[str, Any]:
        """The configuration, with *directory* as the path of all NVMe offload."""
        config = copy.deepcopy(dict(self.ds_config))
        for section in _offload_sections(config):
            if section.get("device") == "nvme":
                section["nvme_path"] = directory
        return config


@dataclasses.dataclass(frozen=True)
class Plan:
    """settling_steps: the first of *steps*, not counted. baseline: the variant that ratios refer to.
    fio_bytes: of each of fio's two files; 0: no fio.
    """

    model: Model
    steps: int
    settling_steps: int
    rounds: int
    fio_bytes: int
    timeout_seconds: float
    baseline: str
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError("two variants have the same name")
        if not 0 <= self.settling_steps < self.steps:
            settling = self.settling_steps
            raise ValueError(f"of {self.steps} steps, {settling} cannot be for settling")
        require_known([self.baseline], names)

    def narrowed(self, only: Collection[str] | None, **numbers: int | None) -> Plan:
        """This plan with *only* some of its variants, or with other *numbers* of rounds and steps,
        where they are not None. Raises: UsageError.
        """
        names = [variant.name for variant in self.variants]
        if only is not None and (unknown := sorted(set(only) - set(names))):
            raise UsageError(f"{unknown[0]!r} is none of the plan's variants: {', '.join(names)}")
        kept = tuple(variant for variant in self.variants if only is None or variant.name in only)
        known = {variant.name for variant in kept}
        other = {key: number for key, number in numbers.items() if number is not None}
        return dataclasses.replace(
            self,
            **other,
            settling_steps=min(self.settling_steps, other.get("steps", self.steps) - 1),
            baseline=self.baseline if self.baseline in known else kept[0].name,
            variants=kept,
        )

    def named(self, name: str) -> Variant:
        """The variant of that name."""
        return next(variant for variant in self.variants if variant.name == name)

    @property
    def aio(self) -> AioConfig:
        """The baseline's settings of the drive, with DeepSpeed's defaults; fio is run at these."""
        given = {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            **self.named(self.baseline).ds_config.get("aio", {}),
        }
        sizes = (given[key] for key in ("block_size", "queue_depth", "intra_op_parallelism"))
        return AioConfig(*map(int, sizes))


def read_plan(path: Path) -> Plan:
    """Read the plan in *path*. Raises: UsageError naming the wrong key; OSError."""
    return read(path, _plan)


def _plan(document: dict[str, Any]) -> Plan:
    common = document.pop("ds_config")
    variants = tuple(
        made(Variant, entry, ds_config=merged(common, entry.get("ds_config", {})))
        for entry in document.pop("variant")
    )
    return made(
        Plan,
        document,
        model=Model(**document["model"]),
        fio_bytes=parse_bytes(document["fio_bytes"]),
        variants=variants,
    )


def merged(common: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """*common* updated by *special*, recursively."""
    result = copy.deepcopy(dict(common))
    for key, value in special.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def _offload_sections(ds_config: Mapping[str, Any]) -> list[dict[str, Any]]:
    zero = ds_config.get("zero_optimization", {})
    return [zero[key] for key in _DIRECTORY_KEYS if key in zero]
