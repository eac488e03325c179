"""Ports for processes that find each other by one."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that the kernel gives to whoever names none, of which somebody may be given the same
# before the process that it is for listens on it. Source: ip(7), ip_local_port_range.
_FIRST, _EACH, _WORKERS = 16_000, 1000, 16
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _WORKERS
_next = itertools.count(os.getpid())


def free_port() -> int:
    """A port that nobody listens on, and that no other worker of the tests is given."""
    while True:
        port = _FIRST + _worker * _EACH + next(_next) % _EACH
        with socket.socket() as listener:
            # as torch's server does, since one that was just closed is free
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError:
                continue
        return port
