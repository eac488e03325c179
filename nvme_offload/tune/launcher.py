"""Under `torchrun` or DeepSpeed's launcher one process of each node sweeps with as many processes
as the node has ranks; rank 0 gathers the profiles of the nodes, and reports.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

from nvme_offload.errors import UnsupportedError, UsageError
from nvme_offload.hardware.profile import Profile

WAIT_SECONDS = 600.0  # beyond what a sweep takes: for nodes that are slow, or start late


class Place(NamedTuple):
    """The place of this process. local_ranks: of this node. node: its number."""

    rank: int
    local_rank: int
    local_ranks: int
    node: int
    nodes: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that the launcher's variables describe; None without a launcher. Raises:
    UsageError.

    Source: torch/distributed/elastic/agent/server/local_elastic_agent.py,
    deepspeed/launcher/launch.py.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not set(names) <= set(environment):
        return None
    try:
        rank, local_rank, world = (int(environment[name]) for name in names)
        given = environment.get
        local = int(given("LOCAL_WORLD_SIZE") or given("LOCAL_SIZE") or world)
        node = int(given("GROUP_RANK") or given("CROSS_RANK") or rank // local)
        nodes = int(given("GROUP_WORLD_SIZE") or given("CROSS_SIZE") or -(-world // local))
    except (ValueError, ZeroDivisionError):
        local = 0
    if local < 1 or not (
        0 <= local_rank < local <= world and 0 <= rank < world and 0 <= node < nodes
    ):
        named = ", ".join(
            f"{name}={environment[name]}"
            for name in (*names, "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
            if name in environment
        )
        raise UsageError(
            f"the launcher's variables make no sense together ({named}): unset them to sweep without a launcher"
        )
    return Place(rank, local_rank, local, node, nodes)


def gather(where: Place, profiles: list[Profile], seconds: float) -> list[Profile]:
    """On rank 0 the profiles of all nodes, in their order, each with the name of its host in
    `engine`; on other ranks []. *seconds*: how long a node's sweep takes. Raises: UnsupportedError.
    """
    host = {"host": socket.gethostname()}
    profiles = [dataclasses.replace(one, engine={**one.engine, **host}) for one in profiles]
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # which torch documents, and does not list
    except ImportError as error:
        raise UnsupportedError(
            f"the nodes exchange results by torch's store, which is missing ({error}): install torch, or sweep on each node separately"
        ) from None
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise UnsupportedError(
            "the launcher gave no MASTER_ADDR and MASTER_PORT, by which the nodes find each other: sweep on each node separately"
        )
    # torchrun hosts a store at that address if it sets the variable; otherwise rank 0 hosts it
    hosts = where.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = datetime.timedelta(seconds=seconds + WAIT_SECONDS)
    run = f"nvme-sweep/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    try:
        store = TCPStore(address, int(port), None, hosts, timeout=timeout, wait_for_workers=False)
        if where.rank != 0:
            mine = [profile.to_json() for profile in profiles]
            store.set(f"{run}/{where.node}", json.dumps(mine))
            return []
        found: list[Profile] = []
        for node in range(where.nodes):
            if node == where.node:
                found += profiles
            else:
                found += map(Profile.from_json, json.loads(store.get(f"{run}/{node}")))
        return found  # all nodes have sent, so the store may end with this process
    except RuntimeError as error:  # torch's DistStoreError and its like
        raise UnsupportedError(
            f"not all of the {where.nodes} nodes answered: {str(error).splitlines()[0]}; sweep on each node separately"
        ) from None
