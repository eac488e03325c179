"""Ports for processes that find each other by one."""

from __future__ import annotations

import itertools
import os
import socket

# Below the ephemeral ports, which the kernel may assign to another process before a test listens.
# Source: ip(7), ip_local_port_range.
_FIRST, _EACH, _WORKERS = 16_000, 1000, 16
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _WORKERS
_next = itertools.count(os.getpid())


def free_port() -> int:
    """A port without a listener, which no other worker of the tests gets."""
    while True:
        port = _FIRST + _worker * _EACH + next(_next) % _EACH
        with socket.socket() as listener:
            # as torch's server does, since a port that was just closed is free
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", port))
            except OSError:
                continue
        return port
