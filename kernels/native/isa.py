"""Instruction sets of the compiled kernels: which exist, which this processor has, which one is taken.

Imports neither torch nor a compiler. The choice is made once per process, by `chosen_isa`.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from longprefill.partition.errors import UserError

ISAS = ("portable", "avx2", "avx512", "amx")
"""Slowest first. Each is the whole library compiled with its own flags: no function of one is ever run by another."""

VARIABLE = "LONGPREFILL_ISA"
"""Environment variable that forces one."""

_X86_FLAGS: dict[str, tuple[str, ...]] = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"),
    "amx": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_bf16", "amx_tile", "amx_bf16"),
}
"""What /proc/cpuinfo must list; avx512 and amx also need what stands in the lines above."""

_COMPILER_FLAGS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd"),
        "-mprefer-vector-width=512",
    ),
    "amx": ("-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DLONGPREFILL_AMX=1"),
}


class IsaError(UserError):
    """An instruction set that does not exist or that this processor lacks."""


def compiler_flags(isa: str) -> tuple[str, ...]:
    """g++ options of one instruction set."""
    return (*_COMPILER_FLAGS["avx512"], *_COMPILER_FLAGS["amx"]) if isa == "amx" else _COMPILER_FLAGS[isa]


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """What this processor can run, slowest first; `portable` always (on ARM it compiles to NEON)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("portable",)
    return isas_of(_processor_flags())


def isas_of(flags: frozenset[str]) -> tuple[str, ...]:
    """Instruction sets that an x86-64 processor with these /proc/cpuinfo flags can run, slowest first."""
    found = ["portable"]
    for isa in ISAS[1:]:
        if not flags.issuperset(_X86_FLAGS[isa]):
            break
        found.append(isa)
    return tuple(found)


def chosen_isa(environment: Mapping[str, str] | None = None) -> str:
    """LONGPREFILL_ISA if it is set, else the best that this processor has.

    Raises:
        IsaError: LONGPREFILL_ISA names none of ISAS, or one that this processor lacks.
    """
    wanted = (os.environ if environment is None else environment).get(VARIABLE, "")
    supported = supported_isas()
    if not wanted:
        return supported[-1]
    if wanted not in supported:
        why = "this processor lacks it" if wanted in ISAS else "there is no such instruction set"
        raise IsaError(f"{VARIABLE}={wanted}: {why}: use one of {', '.join(supported)}, or unset it for the best")
    return wanted


def _processor_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
