"""Operands that do not fit each other are refused by every backend: a compiled kernel would read past their ends.

Compiled kernels name the operand, its shape and the one wanted; torch's own words will do in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch

from longprefill.kernels.contracts import AttnResPhase1, Routing
from longprefill.kernels.native.library import forced, ops
from longprefill.kernels.paged import PagedRows, RowFormat
from longprefill.kernels.quant.cpu import format_code
from longprefill.kernels.quant.formats import Bf16Rows, Fp32Rows, Mxfp8Rows

from .compiled import compiled_backends

Arguments = Mapping[str, Any]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


class Call(NamedTuple):
    """A call that fits, as a function of a backend and its named operands."""

    operands: Arguments
    run: Callable[[Any, Arguments], Any]


BF16 = torch.bfloat16
CALLS: dict[str, Call] = {
    # T = 20 in 2 segments, H = 2, G = 4, K = 24, V = 40
    "kda.scan": Call(
        {"q": zeros(20, 2, 24), "k": zeros(20, 2, 24), "v": zeros(20, 4, 40), "g": zeros(20, 4, 24),
         "beta": zeros(20, 4), "initial": zeros(2, 4, 24, 40)},
        lambda b, x: b.scan(
            b.prepare(x["q"], x["k"], x["v"], x["g"], x["beta"], offsets=(0, 9, 20), scale=1.0), x["initial"]
        ),
    ),
    "kda.summarize": Call(
        {"k": zeros(20, 2, 24), "v": zeros(20, 4, 40), "g": zeros(20, 4, 24), "beta": zeros(20, 4),
         "initial": zeros(4, 24, 40)},
        lambda b, x: b.summarize(
            b.prepare(x["k"], x["k"], x["v"], x["g"], x["beta"], offsets=(0, 9, 20), scale=1.0), 1,
            initial_state_GKV=x["initial"],
        ),
    ),
    "kda.step": Call(
        {"q": zeros(3, 2, 24), "k": zeros(3, 2, 24), "v": zeros(3, 4, 40), "g": zeros(3, 4, 24), "beta": zeros(3, 4),
         "state": zeros(4, 24, 40)},
        lambda b, x: b.step(x["q"], x["k"], x["v"], x["g"], x["beta"], 3 * [x["state"]], scale=1.0),
    ),
    "kda.gate": Call(
        {"x": zeros(20, 4, 24), "a_log": zeros(4), "dt_bias": zeros(4, 24)},
        lambda b, x: b.gate(x["x"], x["a_log"], x["dt_bias"], None),
    ),
    "kda.make_inputs": Call(
        {"raw": zeros(20, 256), "weight": zeros(256, 4), "decay": zeros(20, 4, 24), "beta": zeros(20, 4),
         "history": zeros(2, 3, 256), "a_log": zeros(4), "dt_bias": zeros(4, 24)},
        lambda b, x: b.make_inputs(
            x["raw"], x["weight"], x["decay"], x["beta"], offsets=(0, 9, 20), history_NWC=x["history"], num_heads=2,
            a_log_G=x["a_log"], dt_bias_GK=x["dt_bias"], lower_bound=None, largest_beta=1.0,
        ),
    ),
    "conv.causal_conv_silu": Call(
        {"x": zeros(20, 8), "weight": zeros(8, 4), "history": zeros(2, 3, 8)},
        lambda b, x: b.causal_conv_silu(x["x"], x["weight"], offsets=(0, 9, 20), history_NWC=x["history"]),
    ),
    "norm.rms_norm": Call({"x": zeros(5, 24), "weight": zeros(24)}, lambda b, x: b.rms_norm(x["x"], x["weight"], 1e-5)),
    "norm.add_rms_norm": Call(
        {"sum": zeros(5, 24), "x": zeros(5, 24), "weight": zeros(24)},
        lambda b, x: b.add_rms_norm(x["sum"].clone(), x["x"], x["weight"], 1e-5),
    ),
    "norm.layer_norm": Call(
        {"x": zeros(5, 24), "weight": zeros(24), "bias": zeros(24)},
        lambda b, x: b.layer_norm(x["x"], x["weight"], x["bias"], 1e-5),
    ),
    "norm.gated_rms_norm": Call(
        {"x": zeros(5, 3, 24), "gate": zeros(5, 3, 24), "weight": zeros(24)},
        lambda b, x: b.gated_rms_norm(x["x"], x["gate"], x["weight"], 1e-5),
    ),
    "residual.mix": Call(
        {"source": zeros(5, 24), "other": zeros(5, 24), "query": zeros(24)},
        lambda b, x: b.mix([x["source"], x["other"]], x["query"], eps=1e-6),
    ),
    "residual.prepare": Call(
        {"block": zeros(5, 24), "other": zeros(5, 24), "queries": zeros(3, 24)},
        lambda b, x: b.prepare([x["block"], x["other"]], x["queries"], eps=1e-6),
    ),
    "residual.update": Call(
        {"partial": zeros(5, 24), "top": zeros(2, 5), "total": 1 + zeros(2, 5), "weighted": zeros(2, 5, 24),
         "query": zeros(24)},
        lambda b, x: b.update(
            x["partial"], AttnResPhase1(x["top"], x["total"], x["weighted"]), 1, x["query"], eps=1e-6
        ),
    ),
    "residual.hyper_mix": Call(
        {"streams": zeros(5, 2, 24), "projection": zeros(8, 48), "base": zeros(8), "scale": zeros(3),
         "norm": zeros(24)},
        lambda b, x: b.hyper_mix(
            x["streams"], x["projection"], x["base"], x["scale"], iterations=3, eps=1e-6, norm_eps=1e-6,
            input_norm_D=x["norm"], input_eps=1e-6,
        ),
    ),
    "residual.hyper_update": Call(
        {"streams": zeros(5, 2, 24), "output": zeros(5, 24), "post": zeros(5, 2), "comb": zeros(5, 2, 2)},
        lambda b, x: b.hyper_update(x["streams"], x["output"], x["post"], x["comb"]),
    ),
    "residual.hyper_final": Call(
        {"streams": zeros(5, 2, 24), "output": zeros(5, 24), "post": zeros(5, 2), "comb": zeros(5, 2, 2)},
        lambda b, x: b.hyper_final(x["streams"], x["output"], x["post"], x["comb"]),
    ),
    "residual.hyper_update_mix": Call(
        {"streams": zeros(5, 2, 24), "output": zeros(5, 24), "post": zeros(5, 2), "comb": zeros(5, 2, 2),
         "projection": zeros(8, 48)},
        lambda b, x: b.hyper_update_mix(
            x["streams"].clone(), x["output"], x["post"], x["comb"], x["projection"], zeros(8), zeros(3), iterations=3,
            eps=1e-6, norm_eps=1e-6,
        ),
    ),
    "linear.gated": Call({"gate_up": zeros(5, 8)}, lambda b, x: b.gated(x["gate_up"], activation="silu")),
    "linear.linear": Call(
        {"x": zeros(5, 24, dtype=BF16), "weight": zeros(7, 24, dtype=BF16)}, lambda b, x: b.linear(x["x"], x["weight"])
    ),
    "linear.linear_fp32": Call(
        {"x": zeros(70, 64, dtype=BF16), "weight": zeros(7, 64, dtype=BF16)},
        lambda b, x: b.linear_fp32(x["x"], x["weight"]),
    ),
    # T = 5, A = 2, E = 3, D = 32, F = 16
    "moe.experts": Call(
        {"x": zeros(5, 32, dtype=BF16), "experts": zeros(5, 2, dtype=torch.int64), "weights": zeros(5, 2),
         "gate_up": zeros(3, 32, 32, dtype=BF16), "down": zeros(3, 32, 16, dtype=BF16)},
        lambda b, x: b.experts(
            x["x"], Routing(x["experts"], x["weights"]), x["gate_up"], x["down"], activation="silu"
        ),
    ),
    "moe.route": Call(
        {"logits": zeros(5, 8), "bias": zeros(8)},
        lambda b, x: b.route(
            x["logits"], x["bias"], topk=2, scoring="sigmoid", num_groups=1, topk_groups=1, normalize=True, scale=1.0
        ),
    ),
    "dsa.select": Call(
        {"q": zeros(5, 2, 8), "w": zeros(5, 2), "pages": zeros(1, 64, 32, dtype=torch.uint8)},
        lambda b, x: b.select(
            x["q"], x["w"], PagedRows(pages_NPB=x["pages"], table=(0,), num_rows=60, format=Fp32Rows(8)), start=50,
            topk=4,
        ),
    ),
}  # fmt: skip

# What is wrong in each case: one operand's shape.
WRONG: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "kda.scan": [
        ("initial", (2, 4, 40, 24)), ("initial", (1, 4, 24, 40)), ("initial", (3, 4, 24, 40)),
        ("initial", (2, 4, 8, 40)), ("initial", (2, 2, 24, 40)), ("q", (20, 2, 23)), ("g", (20, 2, 24)),
        ("beta", (19, 4)),
    ],
    "kda.summarize": [("initial", (4, 40, 24)), ("initial", (2, 24, 40)), ("g", (20, 4, 23))],
    "kda.step": [
        ("state", (4, 40, 24)), ("state", (2, 24, 40)), ("q", (3, 2, 23)), ("g", (2, 4, 24)), ("beta", (3, 2)),
    ],
    "kda.gate": [("a_log", (1,)), ("a_log", (2,)), ("dt_bias", (4, 1)), ("dt_bias", (1, 24)), ("dt_bias", (2, 24))],
    "kda.make_inputs": [
        ("weight", (128, 4)), ("history", (1, 3, 256)), ("history", (2, 4, 256)), ("decay", (19, 4, 24)),
        ("beta", (20, 2)), ("a_log", (1,)), ("dt_bias", (2, 24)), ("dt_bias", (4, 1)), ("raw", (20, 255)),
    ],
    "conv.causal_conv_silu": [
        ("weight", (4, 4)), ("weight", (1, 4)), ("history", (2, 2, 8)), ("history", (2, 4, 8)), ("history", (1, 3, 8)),
        ("history", (3, 3, 8)), ("history", (2, 3, 4)),
    ],
    "norm.rms_norm": [("weight", (8,)), ("weight", (25,))],
    "norm.add_rms_norm": [("weight", (8,)), ("x", (4, 24))],
    "norm.layer_norm": [("weight", (8,)), ("bias", (8,)), ("bias", (1,))],
    "norm.gated_rms_norm": [("gate", (5, 1, 24)), ("gate", (4, 3, 24)), ("weight", (8,))],
    "residual.mix": [("query", (8,)), ("other", (4, 24)), ("other", (1, 24))],
    "residual.prepare": [("queries", (3, 8)), ("other", (4, 24))],
    "residual.update": [
        ("query", (8,)), ("weighted", (2, 4, 24)), ("weighted", (2, 6, 24)), ("weighted", (2, 5, 8)), ("top", (2, 4)),
        ("total", (2, 3)),
    ],
    "residual.hyper_mix": [
        ("projection", (8, 24)), ("projection", (7, 48)), ("base", (7,)), ("scale", (2,)), ("norm", (8,)),
    ],
    **{f"residual.{name}": [
        ("output", (1, 24)), ("output", (5, 8)), ("post", (1, 2)), ("post", (5, 1)), ("comb", (1, 2, 2)),
        ("comb", (5, 2, 1)),
    ] for name in ("hyper_update", "hyper_final", "hyper_update_mix")},
    "linear.gated": [("gate_up", (5, 9))],
    "linear.linear": [("weight", (7, 23)), ("weight", (7, 25))],
    "linear.linear_fp32": [("weight", (7, 32)), ("weight", (7, 96))],
    "moe.experts": [
        ("weights", (5, 1)), ("gate_up", (3, 32, 16)), ("gate_up", (3, 34, 32)), ("down", (3, 8, 16)),
        ("down", (3, 32, 8)),
    ],
    "moe.route": [("bias", (2,)), ("bias", (9,))],
    "dsa.select": [
        ("w", (5, 1)), ("w", (4, 2)), ("q", (5, 2, 7)), ("pages", (1, 64, 16)), ("pages", (1, 64, 36)),
        ("pages", (1, 32, 32)),
    ],
}  # fmt: skip


def backends_of(folder: str) -> list[Any]:
    plainly = [
        pytest.param(import_module(f"longprefill.kernels.{folder}.{name}"), id=name) for name in ("plain", "reference")
    ]
    return [*plainly, *compiled_backends(folder)]


def shape_of(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


CASES = [
    pytest.param(backend.values[0], name, operand, shape, id=f"{name}-{operand}-{shape_of(shape)}-{backend.id}")
    for name, wrong in WRONG.items()
    for operand, shape in wrong
    for backend in backends_of(name.partition(".")[0])
]


@pytest.mark.parametrize(("backend", "name", "operand", "shape"), CASES)
def test_a_wrong_shape_is_refused(backend: Any, name: str, operand: str, shape: tuple[int, ...]) -> None:
    operands, run = CALLS[name]
    run(backend, operands)
    wrong = dict(operands) | {operand: zeros(*shape, dtype=operands[operand].dtype)}
    is_compiled = not hasattr(backend, "__file__")
    with pytest.raises(ValueError if is_compiled else (ValueError, RuntimeError, IndexError)):
        run(backend, wrong)


@pytest.mark.parametrize("backend", compiled_backends("kda"))
def test_the_refusal_says_what_was_found_and_what_must_be(backend: Any) -> None:
    operands, run = CALLS["kda.scan"]
    with pytest.raises(ValueError, match=r"initial has shape \[2, 4, 40, 24\]: must be \[2, 4, 24, 40\]"):
        run(backend, {**operands, "initial": zeros(2, 4, 40, 24)})


@pytest.mark.parametrize("backend", backends_of("kda"))
def test_a_step_needs_a_state_of_every_request(backend: Any) -> None:
    x = CALLS["kda.step"].operands
    with pytest.raises((ValueError, RuntimeError)):
        backend.step(x["q"], x["k"], x["v"], x["g"], x["beta"], 2 * [x["state"]], scale=1.0)


@pytest.mark.parametrize("backend", compiled_backends("kda"))
@pytest.mark.parametrize("rows", [-16, 8, 16, 128])
def test_the_compiled_scan_checks_states_inside_by_itself(backend: Any, rows: int) -> None:
    x = CALLS["kda.scan"].operands
    inputs = (x["q"], x["k"], x["v"], x["g"], x["beta"])
    with forced(backend.isa), pytest.raises(ValueError, match=f"after {rows} rows of segment 0: .* within its 9"):
        ops().kda_scan(*inputs, [0, 9, 20], 1.0, None, [0], [rows])


@pytest.mark.parametrize("backend", backends_of("residual"))
@pytest.mark.parametrize("function", ["mix", "prepare"])
def test_sources_of_two_dtypes_are_refused_by_name(backend: Any, function: str) -> None:
    query = zeros(24) if function == "mix" else zeros(1, 24)
    for other, name in ((BF16, "(bfloat16|BFloat16)"), (torch.float64, "(float64|Double)")):
        with pytest.raises(ValueError, match=rf"sources of dtypes (torch\.float32|Float) and .*{name}: cast them"):
            getattr(backend, function)([zeros(5, 24), zeros(5, 24, dtype=other)], query, eps=1e-6)


def nothing(*shape: int) -> torch.Tensor:
    """No row at all, in a view that no kernel could read were there one."""
    wide = torch.zeros([size + 3 for size in (0, *shape)])
    return wide[(slice(1, 1), *(slice(1, 1 + size) for size in shape))]


EMPTY: dict[str, Callable[[Any], Any]] = {
    "kda.scan": lambda b: b.scan(
        b.prepare(
            nothing(2, 24), nothing(2, 24), nothing(4, 40), nothing(4, 24), nothing(4), offsets=(0, 0), scale=1.0
        ),
        None,
    ),
    "kda.step": lambda b: b.step(
        nothing(2, 24), nothing(2, 24), nothing(4, 40), nothing(4, 24), nothing(4), [], scale=1.0
    ),
    "kda.gate": lambda b: b.gate(nothing(4, 24), zeros(4), zeros(4, 24), None),
    "kda.l2_normalize": lambda b: b.l2_normalize(nothing(4, 24)),
    "kda.make_inputs": lambda b: b.make_inputs(
        nothing(256), zeros(256, 4), nothing(4, 24), nothing(4), offsets=(0, 0), history_NWC=zeros(1, 3, 256),
        num_heads=2, a_log_G=zeros(4), dt_bias_GK=zeros(4, 24), lower_bound=None, largest_beta=1.0,
    ),
    "conv.causal_conv_silu": lambda b: b.causal_conv_silu(
        nothing(8), zeros(8, 4), offsets=(0, 0), history_NWC=zeros(1, 3, 8)
    ),
    "norm.rms_norm": lambda b: b.rms_norm(nothing(24), zeros(24), 1e-5),
    "norm.gated_rms_norm": lambda b: b.gated_rms_norm(nothing(3, 24), nothing(3, 24), zeros(24), 1e-5),
    "residual.mix": lambda b: b.mix([nothing(24), nothing(24)], zeros(24), eps=1e-6),
    "residual.prepare": lambda b: b.prepare([nothing(24)], zeros(2, 24), eps=1e-6),
    "residual.prepare, no query": lambda b: b.prepare([zeros(5, 24)], zeros(0, 24), eps=1e-6),
    "residual.hyper_update": lambda b: b.hyper_update(nothing(2, 24), nothing(24), nothing(2), nothing(2, 2)),
    "linear.gated": lambda b: b.gated(nothing(8), activation="silu"),
    "linear.linear": lambda b: b.linear(nothing(8).bfloat16(), zeros(7, 8, dtype=BF16)),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_empty_operands_may_be_strided_at_will(name: str) -> None:
    plainly, _, *compiled = (backend.values[0] for backend in backends_of(name.partition(".")[0]))
    expected = leaves(EMPTY[name](plainly))
    for backend in compiled:
        assert [x.shape for x in leaves(EMPTY[name](backend))] == [x.shape for x in expected]


def leaves(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in leaves(part)]


def make_pages(table: tuple[int, ...], row_format: RowFormat, *, row_bytes: int | None = None) -> PagedRows:
    """40 rows on pages of 16, in a pool of 4."""
    pages_NPB = torch.zeros(4, 16, row_format.row_bytes if row_bytes is None else row_bytes, dtype=torch.uint8)
    return PagedRows(pages_NPB=pages_NPB, table=table, num_rows=40, format=row_format)


DSA_BACKENDS = backends_of("dsa")


@pytest.mark.parametrize("backend", DSA_BACKENDS)
@pytest.mark.parametrize("table", [(0, 1, 99), (0, 1, 4), (-1, 1, 2), (99, 100, 101)])
def test_a_page_outside_the_pool_is_refused(backend: Any, table: tuple[int, ...]) -> None:
    with pytest.raises(IndexError):
        backend.select(zeros(5, 2, 32), zeros(5, 2), make_pages(table, Mxfp8Rows(32)), start=35, topk=4)


@pytest.mark.parametrize("backend", compiled_backends("dsa"))
def test_the_pages_that_hold_the_rows_are_checked_and_no_others(backend: Any) -> None:
    q_TIX, w_TI = zeros(5, 2, 32), zeros(5, 2)
    with pytest.raises(IndexError, match="page 2 of the table is 99: the pool has pages 0 to 3"):
        backend.select(q_TIX, w_TI, make_pages((0, 3, 99), Mxfp8Rows(32)), start=35, topk=4)
    backend.select(q_TIX, w_TI, make_pages((0, 3, 1, 99), Mxfp8Rows(32)), start=35, topk=4)
    with pytest.raises(ValueError, match="40 rows on 2 pages of 16 rows: must be 0 to 32"):
        backend.select(q_TIX, w_TI, make_pages((0, 3), Mxfp8Rows(32)), start=35, topk=4)


@pytest.mark.parametrize("backend", compiled_backends("dsa"))
@pytest.mark.parametrize(("row_format", "wanted"), [(Fp32Rows(32), 128), (Bf16Rows(32), 64), (Mxfp8Rows(32), 33)])
@pytest.mark.parametrize("change", [-1, 1])
def test_rows_of_another_length_than_their_format_are_refused(
    backend: Any, row_format: RowFormat, wanted: int, change: int
) -> None:
    with pytest.raises(ValueError, match=rf"pages of shape \[4, 16, {wanted + change}\] .* {wanted}\]"):
        make_pages((0, 1, 2), row_format, row_bytes=wanted + change)
    pages_NPB, table = torch.zeros(4, 16, wanted + change, dtype=torch.uint8), torch.arange(3)
    with forced(backend.isa), pytest.raises(ValueError, match=rf"rows of {wanted + change} bytes .* take {wanted}"):
        ops().indexer_select(zeros(5, 2, 32), zeros(5, 2), pages_NPB, table, 40, format_code(row_format), 35, 1, 4)


@pytest.mark.parametrize("start", [0, 20])
@pytest.mark.parametrize("table", [(99, 1, 2), (99, 98, 97), (0, -1, 2)])
def test_reading_a_page_outside_the_pool_is_refused(table: tuple[int, ...], start: int) -> None:
    if not {0, 1, 2}.issuperset(table[start // 16 : 3]):
        with pytest.raises(IndexError, match="the pool has pages 0 to 3"):
            make_pages(table, Mxfp8Rows(32)).read_bytes(start, 40)
