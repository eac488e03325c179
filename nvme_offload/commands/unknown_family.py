"""A module of a config.json for which `model.of_config` has no formula, built by transformers on the
meta device, without memory.
"""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from pathlib import Path
from typing import Any

from nvme_offload.errors import UsageError


def build(path: Path, family: str) -> Any:
    """Build the model that a config.json describes, without weights.

    The class is the first that "architectures" names. Without that it is the family's causal
    language model, its sequence-to-sequence model, or else its bare model.

    Raises
    ------
    UsageError
        When transformers is not installed, does not have the family, or cannot build the model.
    """
    try:
        import torch
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(
            f"{path} is of the family {family!r}, whose size is not known here without transformers: pip install transformers, or give --params"
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
            # of this file alone: from_pretrained takes a directory, and in it "config.json"
            described = json.loads(path.read_text(encoding="utf-8"))
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
