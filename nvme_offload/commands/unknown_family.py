"""A module of a config.json whose family `model.of_config` has no formula for: built by
transformers on the meta device, which takes no memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvme_offload.errors import UsageError


def build(path: Path, family: str) -> Any:
    """The model that *path* describes, without weights. Raises: UsageError when transformers is not
    installed, or cannot build it.
    """
    try:
        import torch
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise UsageError(
            f"{path} is of the family {family!r}, whose size is not known here without transformers: pip install transformers, or give --params"
        ) from None
    try:
        # of this file alone: from_pretrained takes a directory, and in it "config.json"
        described = json.loads(path.read_text(encoding="utf-8"))
        config = transformers.CONFIG_MAPPING[family].from_dict(described)
        decodes = any(
            "CausalLM" in name or "LMHead" in name for name in config.architectures or ["CausalLM"]
        )
        kind = transformers.AutoModelForCausalLM if decodes else transformers.AutoModel
        with torch.device("meta"):
            return kind.from_config(config)
    except KeyError:
        raise UsageError(
            f"{path} is of the family {family!r}, which transformers {transformers.__version__} does not have; give --params"
        ) from None
    except (ValueError, TypeError, OSError, AttributeError) as error:
        raise UsageError(
            f"transformers cannot build a model from {path}: {error}; give --params"
        ) from None
