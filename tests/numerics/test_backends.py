"""The backend table: what it resolves to, what it refuses, and that broken modules are not survived."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from longprefill.kernels import backends, contracts
from longprefill.kernels.backends import OPS, Backend, describe, resolve
from longprefill.kernels.native.library import refusal

PROTOCOLS = {
    "kda": contracts.KdaKernels,
    "conv": contracts.ConvKernels,
    "indexer": contracts.IndexerKernels,
    "mla": contracts.MlaKernels,
    "linear": contracts.LinearKernels,
    "moe": contracts.MoeKernels,
    "residual": contracts.ResidualKernels,
    "norm": contracts.NormKernels,
    "rope": contracts.RopeKernels,
    "sampling": contracts.SamplingKernels,
}


def functions_of(protocol: type) -> dict[str, Any]:
    return {name: member for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_"}


def module_name(backend: Any) -> str:
    return backend.__name__


@pytest.mark.parametrize("name", ["plain", "reference"])
@pytest.mark.parametrize("op", OPS)
def test_every_backend_has_the_functions_of_its_protocol(op: str, name: str) -> None:
    module = getattr(resolve("cpu", {op: name}), op)
    assert module.__name__.endswith(f".{name}")
    for function_name, expected in functions_of(PROTOCOLS[op]).items():
        parameters = list(inspect.signature(getattr(module, function_name)).parameters.values())
        wanted = list(inspect.signature(expected).parameters.values())[1:]  # without self
        for ours, theirs in zip(parameters, wanted, strict=True):
            assert ours.kind == theirs.kind, f"{op}.{function_name}: {ours}"
            # Suffixes of shapes may differ between files, the name before them may not.
            assert ours.name.split("_")[0] == theirs.name.split("_")[0], f"{op}.{function_name}: {ours}"


def test_the_best_available_backend_is_taken() -> None:
    table = resolve("cpu")
    best = "plain" if refusal("cpu") else "cpu"
    assert module_name(table.indexer) == f"longprefill.kernels.dsa.{best}"
    mixed = resolve("cpu", {"mla": "reference"})
    assert module_name(mixed.mla) == "longprefill.kernels.mla.reference"
    assert mixed.moe is table.moe


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no op is called attention: override one of kda, conv, indexer"):
        resolve("cpu", {"attention": "plain"})
    with pytest.raises(ValueError, match="mla has no backend 'fast': use one of cpu, plain, reference"):
        resolve("cpu", {"mla": "fast"})


def test_a_refusal_passes_to_the_next_backend_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    picky = Backend("picky", "longprefill.kernels.mla.missing", lambda device: f"needs a unicorn, not {device}")
    monkeypatch.setitem(backends._BACKENDS, "mla", (picky, *backends._BACKENDS["mla"][1:]))
    assert module_name(resolve("cpu").mla) == "longprefill.kernels.mla.plain"
    rows = [row for row in describe("cpu") if row.op == "mla"]
    assert [(row.backend, row.available) for row in rows] == [("picky", False), ("plain", True), ("reference", True)]
    assert rows[0].reason == "needs a unicorn, not cpu"
    with pytest.raises(ValueError, match="no backend of mla serves cpu: picky: needs a unicorn"):
        resolve("cpu", {"mla": "picky"})


def test_a_module_of_ours_that_does_not_import_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Backend("broken", "longprefill.kernels.mla.missing", lambda _device: None)
    monkeypatch.setitem(backends._BACKENDS, "mla", (broken, *backends._BACKENDS["mla"]))
    with pytest.raises(ImportError, match=r"longprefill\.kernels\.mla\.missing"):
        resolve("cpu")


def test_reference_can_always_be_asked_for() -> None:
    for op in OPS:
        assert [row.backend for row in describe("npu") if row.op == op][-1] == "reference"
        assert resolve("npu", {op: "reference"})
