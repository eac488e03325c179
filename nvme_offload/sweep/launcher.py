"""Under `torchrun` or DeepSpeed's launcher the sweep is started once for each rank of a training.
One process of each node sweeps for all of its ranks, which contend for the node's drive as they
will in training; rank 0 gathers what the nodes found, and reports.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.hardware.profile import Profile

WAIT_SECONDS = 600.0  # beyond what a sweep takes: for nodes that are slow, or start late


class Place(NamedTuple):
    """Where this process stands. local_ranks: of this node; node, nodes: its number, and how many
    there are.
    """

    rank: int
    local_rank: int
    local_ranks: int
    node: int
    nodes: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """What the launcher said; None when there is none. Raises: UsageError when it said something
    that cannot be.

    Source: torch/distributed/elastic/agent/server/local_elastic_agent.py,
    deepspeed/launcher/launch.py.
    """
    if (
        "RANK" not in environment
        or "WORLD_SIZE" not in environment
        or "LOCAL_RANK" not in environment
    ):
        return None
    try:
        rank, world, local_rank = (
            int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        local = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world)
        node = int(environment.get("GROUP_RANK") or environment.get("CROSS_RANK") or rank // local)
        nodes = int(
            environment.get("GROUP_WORLD_SIZE")
            or environment.get("CROSS_SIZE")
            or -(-world // local)
        )
    except (ValueError, ZeroDivisionError):
        local = 0
    if local < 1 or not (
        0 <= local_rank < local <= world and 0 <= rank < world and 0 <= node < nodes
    ):
        said = ", ".join(
            f"{name}={environment[name]}"
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
            if name in environment
        )
        raise UsageError(
            f"the launcher's variables make no sense together ({said}): unset them to sweep without a launcher"
        )
    return Place(rank, local_rank, local, node, nodes)


def gather(
    where: Place, profiles: list[Profile], seconds: float
) -> list[tuple[str, list[Profile]]]:
    """All nodes' (host name, profiles) on rank 0, in the order of the nodes; nothing on the others,
    which have told theirs then.

    *seconds*: how long a node's sweep takes. Raises: UnsupportedError when a node does not answer,
    or torch is not there.
    """
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # which torch documents, and does not list
    except ImportError as error:
        raise UnsupportedError(
            f"the nodes talk by torch's store, which is not there ({error}): install torch, or sweep on each node by itself"
        ) from None
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise UnsupportedError(
            "the launcher gave no MASTER_ADDR and MASTER_PORT, by which the nodes find each other: sweep on each node by itself"
        )
    # torchrun keeps a store of its own at that address, where it says so; otherwise rank 0 does.
    hosts = where.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = datetime.timedelta(seconds=seconds + WAIT_SECONDS)
    run = f"nvme-sweep/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    try:
        store = TCPStore(host, int(port), None, hosts, timeout=timeout, wait_for_workers=False)
        if where.rank != 0:
            told = {
                "host": socket.gethostname(),
                "profiles": [profile.to_json() for profile in profiles],
            }
            store.set(f"{run}/{where.node}", json.dumps(told))
            return []
        found = [(socket.gethostname(), profiles)]
        for node in range(where.nodes):
            if node != where.node:
                answer: dict[str, Any] = json.loads(store.get(f"{run}/{node}"))
                found.insert(
                    node, (answer["host"], [Profile.from_json(text) for text in answer["profiles"]])
                )
        return found  # nobody waits for an answer any more, so the store may end with this process
    except RuntimeError as error:  # torch's DistStoreError and its like
        raise UnsupportedError(
            f"not all of the {where.nodes} nodes were heard: {str(error).splitlines()[0]}; sweep on each node by itself"
        ) from None
