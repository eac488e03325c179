#!/usr/bin/env -S python3 -IS
"""In place of an interpreter that a launcher starts: it asks for a fork that runs the program, see `forked.launching`."""

import array
import json
import os
import signal
import socket
import sys
import tempfile

connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(os.environ["FORKED_SERVER"])
mounts = os.open("/proc/self/ns/mnt", os.O_RDONLY)
with tempfile.TemporaryFile("w+") as request:
    here = os.getcwd()  # noqa: PTH109  # pathlib takes as long to import as all else
    wanted = {"arguments": sys.argv[1:], "env": dict(os.environ), "cwd": here}
    json.dump(wanted, request)
    request.flush()
    files = array.array("i", [request.fileno(), 1, 2, mounts])
    connection.sendmsg([b"start"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    pid = int(connection.recv(64))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
status = int(connection.recv(64))
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
