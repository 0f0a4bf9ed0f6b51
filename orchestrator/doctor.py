"""`longprefill doctor`: devices, kernel backends, families and memory of this machine, with reasons."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from longprefill.kernels.backends import chosen, describe
from longprefill.kernels.native import library
from longprefill.kernels.native.build import BuildError, build, cache_folder, compiler_command
from longprefill.kernels.native.isa import VARIABLE, supported_isas
from longprefill.orchestrator.memory import available_bytes
from longprefill.orchestrator.yardstick import CLASSES, yardstick_refusal
from longprefill.workers.device import describe_devices
from longprefill.workers.model.config import AttnResConfig, KdaConfig, ModelConfig, MoeConfig
from longprefill.workers.model.families.registry import FAMILIES, config_from
from longprefill.workers.model.sizes import RAW_CONFIGS


def diagnose() -> dict[str, Any]:
    """What can run here, as plain data."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("longprefill", "torch", "ray", "torch_npu", "transformers")},
        "cores": len(os.sched_getaffinity(0)),
        "available_bytes": available_bytes(),
        "shared_memory_bytes": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "compiler": _compiler(),
        "compiled": _compiled(),
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
        "kernels": _kernels(),
        "families": [_family(model_type) for model_type in sorted(FAMILIES)],
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
    console.print(_compiled_line(found["compiled"]), soft_wrap=True)
    devices = Table("device", "collectives", "count", "name", "why not", title="devices", title_justify="left")
    for row in found["devices"]:
        devices.add_row(row["kind"], row["collectives"], str(row["count"]), row["name"], row["reason"])
    kernels = Table("op", "backend", "available", "used", "why", title="kernels on cpu", title_justify="left")
    for row in found["kernels"]:
        marks = ("yes" if row[key] else "no" for key in ("available", "used"))
        kernels.add_row(row["op"], row["backend"], *marks, row["why"])
    families = Table(
        "family", "layers", "runs", "align --against transformers", title="model families", title_justify="left"
    )
    for row in found["families"]:
        families.add_row(
            row["family"], row["layers"], row["reason"] or "yes", row["yardstick"] or f"no: {row['no_yardstick']}"
        )
    console.print(devices, kernels, families)


def _compiler() -> str | None:
    """The program that would compile the kernels: $CXX, or g++."""
    command = compiler_command()
    return shutil.which(command[0]) if command else None


def _compiled() -> dict[str, Any]:
    """The library of compiled kernels of this process: which, from where, or why not. Builds it if it is not there."""
    reason, path, folder = library.refusal("cpu"), None, None
    with contextlib.suppress(BuildError):  # a ready library may come from a folder that cannot be written
        folder = str(cache_folder())
    if reason is None:
        try:
            path = str(build(library.active_isa()))
        except BuildError as error:
            reason = str(error)
    return {
        "isa": library.active_isa(),
        "supported_isas": list(supported_isas()),
        "forced_isa": os.environ.get(VARIABLE) or None,
        "library": path,
        "cache": folder,
        "reason": reason or "",
    }


def _compiled_line(compiled: dict[str, Any]) -> str:
    choice = f"forced by {VARIABLE}" if compiled["forced_isa"] else f"the best here; {VARIABLE} forces another"
    isas = f"{compiled['isa']} of {', '.join(compiled['supported_isas'])} ({choice})"
    if compiled["reason"]:
        return f"compiled kernels: none for {isas}: {compiled['reason']}; cache {compiled['cache'] or 'none'}"
    return f"compiled kernels: {isas}, {compiled['library']}"


def _kernels() -> list[dict[str, Any]]:
    """Every backend of every op, best first, whether a worker on a CPU takes it, and why."""
    used, rows = chosen("cpu"), describe("cpu")
    found = []
    for row in rows:
        refused = [
            f"{other.backend} is not there: {other.reason}" for other in rows if other.op == row.op and other.reason
        ]
        if row.reason:
            why = row.reason
        elif row.backend != used[row.op]:
            why = f"{used[row.op]} comes first; taken where it is asked for by name"
        elif row.backend == "cpu":
            why = f"compiled for {library.active_isa()}"
        else:
            why = "; ".join(["torch operators", *(refused or ["this op has no compiled backend"])])
        found.append(
            {
                "op": row.op,
                "backend": row.backend,
                "available": row.available,
                "used": row.backend == used[row.op],
                "reason": row.reason,
                "why": why,
            }
        )
    return found


def _family(model_type: str) -> dict[str, Any]:
    """What a family's models are made of, whether they run here, and whether transformers can be the yardstick."""
    sizes = {family: size for family, size in RAW_CONFIGS if size == "tiny"}
    # a text config is read by the family's own rules and written only inside a multimodal one
    written = model_type if model_type in sizes else model_type.removesuffix("_text")
    reason, refusal = _no_kernels(), yardstick_refusal(model_type)
    return {
        "family": model_type,
        "layers": _parts(config_from(RAW_CONFIGS[written, "tiny"])),
        "available": reason is None,
        "reason": reason or "",
        "yardstick": None if refusal else CLASSES[model_type],
        "no_yardstick": refusal or "",
    }


def _no_kernels() -> str | None:
    """Why no family runs on this machine's CPU: an op without a backend; None: all do."""
    rows = describe("cpu")
    for op in dict.fromkeys(row.op for row in rows):
        if not any(row.available for row in rows if row.op == op):
            return f"no backend of {op} is available: " + "; ".join(row.reason for row in rows if row.op == op)
    return None


def _parts(config: ModelConfig) -> str:
    """For example "KDA, DSA with k-pool, MoE, hyper-connections"."""
    parts: list[str] = []
    for layer in config.layers:
        mixer = layer.mixer
        if isinstance(mixer, KdaConfig):
            parts.append("KDA")
        elif mixer.selection is None:
            parts.append("MLA")
        else:
            shared = " with shared selections" if mixer.shared_selection is not None else ""
            parts.append("DSA with k-pool" if mixer.selection.pool > 1 else "DSA" + shared)
    parts += ["MoE" for layer in config.layers if isinstance(layer.ffn, MoeConfig)]
    if config.residual is not None:
        parts.append("Attention Residuals" if isinstance(config.residual, AttnResConfig) else "hyper-connections")
    return ", ".join(dict.fromkeys(parts))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
