"""The table of kernel backends, resolved once per worker.

A backend of an op is a module with the functions of the op's Protocol (`contracts.py`). To add one, write the module
and put a row above the slower ones. Its `refusal` says in a sentence why it cannot serve a device, or None.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from longprefill.kernels.contracts import (
        ConvKernels,
        IndexerKernels,
        KdaKernels,
        LinearKernels,
        MlaKernels,
        MoeKernels,
        NormKernels,
        ResidualKernels,
        RopeKernels,
        SamplingKernels,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """The chosen backend of every op."""

    kda: KdaKernels
    conv: ConvKernels
    indexer: IndexerKernels
    mla: MlaKernels
    linear: LinearKernels
    moe: MoeKernels
    residual: ResidualKernels
    norm: NormKernels
    rope: RopeKernels
    sampling: SamplingKernels


OPS = tuple(field.name for field in fields(KernelTable))


class Backend(NamedTuple):
    name: str
    module: str
    refusal: Callable[[str], str | None]
    """Why the backend cannot serve a device type, or None."""


class BackendRow(NamedTuple):
    """One line of `doctor`."""

    op: str
    backend: str
    available: bool
    reason: str
    """Why it is not available; empty when it is."""


def resolve(device_type: str, overrides: Mapping[str, str] | None = None) -> KernelTable:
    """Imports the best available backend of every op.

    Args:
        device_type: torch's name of the worker's device, "cpu" or "cuda" for example.
        overrides: backend name by op, for ops that shall not take the best.

    Raises:
        ValueError: an unknown op or backend (the message lists the known ones), or a backend that refuses this device.
        ImportError: a module of ours is broken; nothing else is taken instead.
    """
    overrides = overrides or {}
    unknown = sorted(set(overrides) - set(OPS))
    if unknown:
        raise ValueError(f"no op is called {', '.join(unknown)}: override one of {', '.join(OPS)}")
    chosen = {op: _choose(op, device_type, overrides.get(op)) for op in OPS}
    modules: dict[str, Any] = {op: importlib.import_module(backend.module) for op, backend in chosen.items()}
    return KernelTable(**modules)


def chosen(device_type: str, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The backend that `resolve` takes for every op, by name."""
    return {op: _choose(op, device_type, (overrides or {}).get(op)).name for op in OPS}


def describe(device_type: str = "cpu") -> tuple[BackendRow, ...]:
    """All backends of all ops, best first, and whether they can serve the device type."""
    return tuple(
        BackendRow(op, backend.name, reason is None, reason or "")
        for op in OPS
        for backend in _BACKENDS[op]
        for reason in (backend.refusal(device_type),)
    )


def _choose(op: str, device_type: str, wanted: str | None) -> Backend:
    backends = _BACKENDS[op]
    candidates = [backend for backend in backends if wanted in (None, backend.name)]
    if not candidates:
        raise ValueError(f"{op} has no backend {wanted!r}: use one of {', '.join(b.name for b in backends)}")
    refusals = []
    for backend in candidates:
        reason = backend.refusal(device_type)
        if reason is None:
            return backend
        refusals.append(f"{backend.name}: {reason}")
    raise ValueError(f"no backend of {op} serves {device_type}: {'; '.join(refusals)}")


def _serves_any_device(device_type: str) -> None:
    """No refusal: the module is made of torch operators."""


def _compiled_refusal(device_type: str) -> str | None:
    # Building needs a compiler, loading needs torch: neither when this table is imported.
    from longprefill.kernels.native.library import refusal

    return refusal(device_type)


def _compiled_backend(folder: str) -> Backend:
    return Backend("cpu", f"longprefill.kernels.{folder}.cpu", _compiled_refusal)


def _torch_backends(folder: str) -> tuple[Backend, ...]:
    return tuple(
        Backend(name, f"longprefill.kernels.{folder}.{name}", _serves_any_device) for name in ("plain", "reference")
    )


_BACKENDS: dict[str, tuple[Backend, ...]] = {
    "kda": (_compiled_backend("kda"), *_torch_backends("kda")),
    "conv": (_compiled_backend("conv"), *_torch_backends("conv")),
    "indexer": (_compiled_backend("dsa"), *_torch_backends("dsa")),
    "mla": (_compiled_backend("mla"), *_torch_backends("mla")),
    "linear": (_compiled_backend("linear"), *_torch_backends("linear")),
    "moe": (_compiled_backend("moe"), *_torch_backends("moe")),
    "residual": (_compiled_backend("residual"), *_torch_backends("residual")),
    "norm": (_compiled_backend("norm"), *_torch_backends("norm")),
    "rope": _torch_backends("rope"),
    "sampling": _torch_backends("sampling"),
}
"""Backends by op, best first; `reference` is the last and can always be asked for."""
