"""Listening TCP sockets of a command's processes, by what the processes are."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from .processes import marked

LISTENING = "0A"
PROGRAMS = {
    "gcs_server": "gcs_server",
    "raylet/raylet ": "raylet",
    "dashboard/dashboard.py": "dashboard",
    "dashboard_agent": "ray::DashboardAgent",
    "monitor.py": "monitor",
    "log_monitor": "log_monitor",
    "longprefill serve": "longprefill serve",
}


class Listener(NamedTuple):
    program: str
    """Ray's title of a worker (ray::ClassName), or the program."""
    reach: str
    """"loopback", "all" interfaces, or "node" (this machine's address)."""
    port: int


def listeners(mark: str, owner: int) -> set[Listener]:
    """Of all processes with this mark, and of their owner."""
    inodes = _listening_inodes()
    found = set()
    for pid, line in marked(mark).items():
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    match = re.fullmatch(r"socket:\[([0-9]+)\]", os.readlink(link))
                    if match and match[1] in inodes:
                        address, port = inodes[match[1]]
                        program = "longprefill serve" if pid == owner else _program(line)
                        found.add(Listener(program, _reach(address), port))
    return found


def _listening_inodes() -> dict[str, tuple[str, int]]:
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                address, port = fields[1].split(":")
                found[fields[9]] = (address, int(port, 16))
    return found


def _reach(address: str) -> str:
    words = [struct.pack("<I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
    where = ipaddress.ip_address(b"".join(words))
    if isinstance(where, ipaddress.IPv6Address) and where.ipv4_mapped is not None:
        where = where.ipv4_mapped
    return "loopback" if where.is_loopback else "all" if where.is_unspecified else "node"


def _program(line: str) -> str:
    if line.startswith("ray::"):
        return re.split(r"[:. ]", line.removeprefix("ray::"))[0].join(("ray::", ""))
    return next((name for part, name in PROGRAMS.items() if part in line), line)
