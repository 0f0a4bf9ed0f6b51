"""The compiled backend on several instruction sets of this processor, for parametrized suites.

The best one and `portable` by default: each further one costs minutes of compiling and the same tests again.
LONGPREFILL_TEST_ISAS names others, or `all`; `scripts/test --all-isas` names them one by one, each with LONGPREFILL_ISA
for the tests that take the process's own.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest

from longprefill.kernels.native.isa import supported_isas
from longprefill.kernels.native.library import forced, refusal


class OnIsa:
    """`longprefill.kernels.<folder>.cpu` with every call run on one instruction set."""

    def __init__(self, folder: str, isa: str) -> None:
        self._folder, self.isa = folder, isa

    def __getattr__(self, name: str) -> Callable[..., Any]:
        with forced(self.isa):
            reason = refusal("cpu")
        if reason is not None and reason.startswith("no C++ compiler"):
            pytest.skip(reason)
        function = getattr(importlib.import_module(f"longprefill.kernels.{self._folder}.cpu"), name)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with forced(self.isa):
                return function(*args, **kwargs)

        return run


def compiled_backends(folder: str) -> list[Any]:
    """Pytest parameters `cpu-<isa>`; they skip, with the reason, only where there is no compiler.

    The libraries are built here, while tests are collected: no test's time limit should have to cover a compiler.
    """
    isas = tested_isas()
    for isa in isas:
        with forced(isa):
            refusal("cpu")
    return [pytest.param(OnIsa(folder, isa), id=f"cpu-{isa}") for isa in isas]


def tested_isas() -> tuple[str, ...]:
    """The instruction sets that this session tests.

    Raises:
        ValueError: LONGPREFILL_TEST_ISAS names what this processor lacks or nobody knows, and is not `all`.
    """
    wanted = os.environ.get("LONGPREFILL_TEST_ISAS")
    supported = tuple(supported_isas())
    if wanted is None:
        return tuple(dict.fromkeys((supported[0], supported[-1])))
    if wanted == "all":
        return supported
    isas = tuple(wanted.split(","))
    if unknown := sorted(set(isas) - set(supported)):
        raise ValueError(f"LONGPREFILL_TEST_ISAS={wanted!r}: no {unknown[0]!r} here: use all, or {','.join(supported)}")
    return isas
