"""`longprefill doctor`: devices, kernel backends, families and memory of this machine, with reasons."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from longprefill.kernels.backends import describe
from longprefill.orchestrator.memory import available_bytes
from longprefill.workers.device import describe_devices
from longprefill.workers.model.families.registry import FAMILIES


def diagnose() -> dict[str, Any]:
    """What can run here, as plain data."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("longprefill", "torch", "ray", "torch_npu")},
        "cores": len(os.sched_getaffinity(0)),
        "available_bytes": available_bytes(),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "compiler": shutil.which("g++"),
        "devices": [
            {
                "kind": row.kind,
                "collectives": row.backend,
                "count": row.count,
                "name": row.name,
                "available": row.refusal is None,
                "reason": row.refusal or "",
            }
            for row in describe_devices()
        ],
        "kernels": [
            {"op": row.op, "backend": row.backend, "available": row.available, "reason": row.reason}
            for row in describe("cpu")
        ],
        "families": sorted(FAMILIES),
    }


def print_diagnosis(*, as_json: bool) -> None:
    """Prints `diagnose` as JSON or as tables."""
    found = diagnose()
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    console = Console()
    packages = ", ".join(f"{name} {number or 'not installed'}" for name, number in found["packages"].items())
    console.print(f"python {found['python']}, {packages}")
    console.print(
        f"{found['cores']} cores, {found['available_bytes'] / 2**30:.1f} GiB memory available, "
        f"{found['shared_memory_bytes'] / 2**30:.1f} GiB in /dev/shm, compiler {found['compiler'] or 'none'}"
    )
    devices = Table("device", "collectives", "count", "name", "why not", title="devices", title_justify="left")
    for row in found["devices"]:
        devices.add_row(row["kind"], row["collectives"], str(row["count"]), row["name"], row["reason"])
    kernels = Table("op", "backend", "available", "why not", title="kernels on cpu", title_justify="left")
    for row in found["kernels"]:
        kernels.add_row(row["op"], row["backend"], "yes" if row["available"] else "no", row["reason"])
    console.print(devices, kernels)
    console.print(f"model families: {', '.join(found['families'])}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
