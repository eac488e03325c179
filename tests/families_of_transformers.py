"""The models of transformers, family by family."""

from __future__ import annotations

import importlib
from typing import Any


def classes_of(transformers: Any, family: str) -> list[Any]:
    """The models of *family*, from its own modeling file; empty where that needs a missing package."""
    config_class = transformers.CONFIG_MAPPING[family]
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return []
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, transformers.PreTrainedModel)
        and each.__module__ == name
        and each.config_class is config_class
        and not each.__name__.endswith("PreTrainedModel")
    ]
