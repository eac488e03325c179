"""The size of the model of a Hugging Face config.json, which transformers builds on the meta
device.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import warnings
from pathlib import Path
from typing import Any

from nvme_offload.errors import UsageError
from nvme_offload.planning.model import Model, of_module


def model_of(path: Path) -> Model:
    """Size the model of the file *path*, or of the directory with it: of the first of its
    "architectures", or without that its family's causal, sequence-to-sequence or bare model.
    Raises: UsageError; OSError.
    """
    path = path / "config.json" if path.is_dir() else path
    described = _described(path)
    source = str(path)
    if described.get("quantization_config"):
        # transformers quantizes as it reads weights, and training needs them in the training's dtype
        source += ", without its quantization"
    return dataclasses.replace(of_module(_built(path, described)), source=source)


def _described(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist: give a Hugging Face config.json, or the number of parameters as --params"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise UsageError(f"{path} is not JSON: it is nested too deeply") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(
            f'{path} has no "model_type": it is not a Hugging Face model config; give the number of parameters instead'
        )
    return config


def _built(path: Path, described: dict[str, Any]) -> Any:
    family = described["model_type"]
    try:
        import torch
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(
            f"transformers counts the parameters of {path}: pip install transformers, or give --params"
        ) from None
    if family not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"{path} is of the family {family!r}, which transformers {transformers.__version__} does not have; give --params"
        )
    quiet = logging.getLogger("transformers")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            # from_pretrained takes a directory, and in it "config.json"
            config = transformers.CONFIG_MAPPING[family].from_dict(described)
            return _model(transformers, config)
    except Exception as error:  # a config's mistakes raise whatever they meet in its class
        said = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"transformers cannot build a model from {path}: {said}; give --params"
        ) from None
    finally:
        quiet.setLevel(level)


def _model(transformers: Any, config: Any) -> Any:
    for name in (config.architectures or ())[:1]:
        module = type(config).__module__.replace(".configuration_", ".modeling_")
        found: Any = getattr(transformers, name, None) or getattr(
            importlib.import_module(module), name, None
        )
        if not hasattr(found, "_from_config"):
            raise UsageError(f"transformers {transformers.__version__} has no {name}")
        return found._from_config(config)
    for auto in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModel,
    ):
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise UsageError(f"it has no model for {type(config).__name__}")
