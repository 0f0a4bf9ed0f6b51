"""The compiled backend once for every instruction set that this processor has, for parametrized suites."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from longprefill.kernels.native.isa import supported_isas
from longprefill.kernels.native.library import forced, refusal


class OnIsa:
    """`longprefill.kernels.<folder>.cpu` with every call run on one instruction set."""

    def __init__(self, folder: str, isa: str) -> None:
        self._folder, self._isa = folder, isa

    def __getattr__(self, name: str) -> Callable[..., Any]:
        with forced(self._isa):
            reason = refusal("cpu")
        if reason is not None and reason.startswith("no C++ compiler"):
            pytest.skip(reason)
        function = getattr(importlib.import_module(f"longprefill.kernels.{self._folder}.cpu"), name)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with forced(self._isa):
                return function(*args, **kwargs)

        return run


def compiled_backends(folder: str) -> list[Any]:
    """Pytest parameters `cpu-<isa>`; they skip, with the reason, only where there is no compiler.

    The libraries are built here, while tests are collected: no test's time limit should have to cover a compiler.
    """
    for isa in supported_isas():
        with forced(isa):
            refusal("cpu")
    return [pytest.param(OnIsa(folder, isa), id=f"cpu-{isa}") for isa in supported_isas()]
