"""The loaded library of compiled kernels: `ops()` for backends, `refusal` for the table in `kernels/backends.py`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .build import BuildError, build
from .isa import chosen_isa

logger = logging.getLogger(__name__)

COMPILED_DTYPES = (torch.float32, torch.bfloat16)
"""Element types that the compiled kernels read and write; backends hand other ones to `plain`."""

_forced: str | None = None


@functools.cache
def load(isa: str) -> Any:
    """The operators of one instruction set, `torch.ops.longprefill_<isa>`; builds the library at its first use.

    Raises:
        BuildError: it cannot be built here.
    """
    path = build(isa)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}: remove it to have it built again") from error
    return getattr(torch.ops, f"longprefill_{isa}")


def ops() -> Any:
    """The operators of the instruction set chosen for this process."""
    return load(active_isa())


@functools.cache
def _chosen_once() -> str:
    return chosen_isa()


def active_isa() -> str:
    """The instruction set that `ops` runs: chosen once a process, apart from `forced`."""
    return _forced or _chosen_once()


@contextmanager
def forced(isa: str) -> Iterator[None]:
    """Runs a block on another instruction set: for tests and benchmarks, in one thread."""
    global _forced
    before, _forced = _forced, isa
    try:
        yield
    finally:
        _forced = before


def refusal(device_type: str) -> str | None:
    """Why the compiled kernels cannot serve a device type, or None. Builds them if they may be needed.

    Raises:
        IsaError: LONGPREFILL_ISA is wrong: that is the user's to mend, not a reason for slower kernels.
    """
    if device_type != "cpu":
        return f"compiled for the CPU, not for {device_type}"
    return _build_refusal(active_isa())


@functools.cache
def _build_refusal(isa: str) -> str | None:
    try:
        load(isa)
    except BuildError as error:
        logger.warning("compiled CPU kernels are not available, torch operators serve instead: %s", error)
        return str(error).partition("\n")[0]
    return None
