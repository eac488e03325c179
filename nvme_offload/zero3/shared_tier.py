"""The `Tier` of a ds_config. Parameters and optimizer states with equal settings share one tier, so
that one budget covers both.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from ..hardware.config import AioConfig
from ..swap import live
from ..swap.tier import Tier
from .settings import Settings, aio_config, nvme_paths

_tiers: weakref.WeakValueDictionary[tuple[Settings, AioConfig, tuple[str, ...]], Tier] = (
    weakref.WeakValueDictionary()
)
_lock = threading.RLock()
# Tiers whose steps belong to a training in progress.
trained: weakref.WeakSet[Tier] = weakref.WeakSet()

_log = logging.getLogger(__name__)


def tier_of(ds_config: Mapping[str, Any]) -> Tier:
    """The tier of *ds_config*, made on first use. Raises: as `Tier`; UsageError naming a wrong key."""
    settings = Settings.of(ds_config)
    paths = settings.paths or nvme_paths(ds_config)
    key = (settings, aio := aio_config(ds_config, settings, paths[0]), paths)
    with _lock:
        tier = _tiers.get(key)
        if tier is None:
            if "aio" in ds_config:
                _log.info('engine settings are those of the section "aio"')
            tier = _tiers[key] = Tier(
                paths,
                aio,
                host_memory=settings.host_memory,
                weights=settings.weights,
                checksum=settings.checksum,
            )
    live.watch(tier)
    return tier
