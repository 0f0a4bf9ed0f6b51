"""What a measurement says of the machine and the software that it ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def commit() -> str | None:
    """Of the checkout that this package is in; None where it is none, or without git."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def describe() -> dict[str, object]:
    """Date, machine, load, versions and commit."""
    from longprefill.kernels.backends import chosen
    from longprefill.kernels.native.library import active_isa
    from longprefill.workers import device as devices

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {
            "cpu": devices.model_name("cpu", 1),
            "cores": num_cores(),
            "memory_bytes": devices.memory(devices.resolve_device("cpu")).total_bytes,
            "isa": active_isa(),
            "kernels": chosen("cpu"),
        },
        "load": list(os.getloadavg()),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("longprefill", "torch", "ray")},
    }
