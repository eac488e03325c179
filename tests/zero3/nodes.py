"""Nodes of a cluster on one machine: each is a network namespace, joined to the others by a bridge,
where some directories are not shared with the other nodes. They need root.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h
_INTERFACE = "cluster"  # the name of the network interface in each node
_VARIABLE = "TEST_NODE"


@dataclasses.dataclass(frozen=True)
class Node:
    """The node *number*, whose network namespace process *pid* has. *own*: by directory, which
    directory is there on this node.
    """

    number: int
    pid: int
    own: dict[str, str]

    def environment(self, nodes: int) -> dict[str, str]:
        """The variables that DeepSpeed's launcher sets for the one rank of this node."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(nodes),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "CROSS_RANK": str(self.number),
            "CROSS_SIZE": str(nodes),
            "MASTER_ADDR": "10.9.8.1",
            "GLOO_SOCKET_IFNAME": _INTERFACE,
            _VARIABLE: json.dumps({"pid": self.pid, "own": self.own}),
        }


def enter() -> None:
    """Move this process, which has one thread, to the node that its environment names, if any."""
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        return
    node = json.loads(text)
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{node['pid']}/ns/net").open() as network:
        if libc.setns(network.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "no namespace")
    _run("mount", "--make-rprivate", "/")
    for place, own in node["own"].items():
        _run("mount", "--bind", own, place)


@contextlib.contextmanager
def cluster(count: int, place: Path, own: Sequence[str] = ()) -> Iterator[list[Node]]:
    """*count* nodes that share the filesystem, except for the directories *own* in *place*: node 0
    has *place*/node0/NAME there. The test is skipped where there can be none.
    """
    with contextlib.ExitStack() as stack:
        bridge = stack.enter_context(_namespace())
        _in(bridge, "ip", "link", "add", "bridge", "type", "bridge")
        _in(bridge, "ip", "link", "set", "bridge", "up")
        found = []
        for number in range(count):
            pid = stack.enter_context(_namespace())
            _in(
                bridge,
                *("ip", "link", "add", f"port{number}", "type", "veth"),
                *("peer", "name", _INTERFACE, "netns", str(pid)),
            )
            _in(bridge, "ip", "link", "set", f"port{number}", "master", "bridge", "up")
            _in(pid, "ip", "address", "add", f"10.9.8.{number + 1}/24", "dev", _INTERFACE)
            for name in ("lo", _INTERFACE):
                _in(pid, "ip", "link", "set", name, "up")
            places = {}
            for name in own:
                (place / name).mkdir(exist_ok=True)
                (mine := place / f"node{number}" / name).mkdir(parents=True, exist_ok=True)
                places[str(place / name)] = str(mine)
            found.append(Node(number, pid, places))
        yield found


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A process in a new network namespace, which ends with this one."""
    with tempfile.TemporaryFile("w+") as complaints:
        try:
            process: subprocess.Popen[str] = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
            )
        except FileNotFoundError as error:
            pytest.skip(f"a network namespace needs util-linux: {error}")
        with process:
            if _line(process.stdout) != "\n":
                complaints.seek(0)
                pytest.skip(f"a network namespace needs root: {complaints.read().strip()}")
            try:
                yield process.pid
            finally:
                process.kill()


def _line(pipe: IO[str] | None) -> str:
    assert pipe is not None
    return pipe.readline()


def _in(pid: int, *command: str) -> None:
    _run("nsenter", "--target", str(pid), "--net", *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
