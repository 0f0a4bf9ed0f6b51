"""The cost model against published systems: each quantity that no publication gives is fitted to one figure, the rest
is predicted.

Meta's context parallelism: the fixed cost of a ring's step is fitted to one figure with several machines; everything
else is the paper's (attention at 540 TF/s, 400 Gb/s a device), with the projections at the rate of attention. Beside it
the rate of the projections can be fitted to one machine at 128K tokens.
FlashKDA: the seconds a token of the chain are fitted to 12 heads; what is parallel over heads is bound by bytes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.profile import DeviceProfile, Link, Overheads, Rate
from longprefill.orchestrator.costs.rates import Rates
from longprefill.orchestrator.costs.step import StepCosts
from longprefill.partition.generators import contiguous
from longprefill.partition.layout import Slice
from longprefill.partition.operations import LayerPlace, layer_operations
from longprefill.partition.shapes import DenseShape, GqaShape, KdaShape, LayerShape, ModelShape

PUBLISHED = Path(__file__).parent / "published.toml"
Point = tuple[int, int]
"""Tokens and machines of a figure that something is fitted to."""
RATE_POINT: Point = (131_072, 1)
"""Where the projections' rate is fitted, if it is."""
RING_POINTS: tuple[Point, ...] = ((131_072, 16), (8192, 2))
"""Either figure that a ring step's fixed cost is fitted to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One published figure and its prediction."""

    what: str
    measured_s: float
    predicted_s: float
    is_fitted: bool
    """It was a calibration point: not a prediction."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1.0


def published() -> dict[str, Any]:
    """The facts."""
    return tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))


def meta_anchors(ring_point: Point | None, rate_point: Point | None = None) -> list[Anchor]:
    """All figures of the paper, with the ring's step and the projections' rate fitted to figures of it. Without a point
    the step is free, and the rate that of attention."""
    facts = published()["meta"]
    measured = {(int(tokens), int(machines)): seconds for tokens, machines, seconds in facts["measured"]}
    gemm, step_s = meta_fitted(ring_point, rate_point)
    return [
        Anchor(
            what=f"{tokens // 1024}K tokens, {machines} machine{'s' * (machines > 1)}",
            measured_s=seconds,
            predicted_s=_meta_seconds(facts, gemm, step_s, tokens, machines),
            is_fitted=(tokens, machines) in (rate_point, ring_point),
        )
        for (tokens, machines), seconds in measured.items()
    ]


def meta_fitted(ring_point: Point | None, rate_point: Point | None = None) -> tuple[float, float]:
    """(flops/s of projections a device, seconds of a ring step), each as fitted or as `meta_anchors` says."""
    facts = published()["meta"]
    measured = {(int(tokens), int(machines)): seconds for tokens, machines, seconds in facts["measured"]}
    gemm = facts["attention_flops_per_s"]
    if rate_point is not None:
        gemm = _fitted(
            lambda rate: _meta_seconds(facts, rate, 0.0, *rate_point), measured[rate_point], low=1e13, high=4e15
        )
    if ring_point is None:
        return gemm, 0.0
    step_s = _fitted(
        lambda seconds: -_meta_seconds(facts, gemm, seconds, *ring_point), -measured[ring_point], low=0.0, high=1e-2
    )
    return gemm, step_s


def kda_anchors() -> list[Anchor]:
    """FlashKDA by heads, fitted to the fewest."""
    facts = published()["flash_kda"]
    measured = {int(heads): seconds for heads, seconds in facts["measured"]}
    fewest = min(measured)
    chain_s = kda_chain_s()
    return [
        Anchor(
            what=f"{heads} heads",
            measured_s=seconds,
            predicted_s=_kda_seconds(facts, chain_s, heads),
            is_fitted=heads == fewest,
        )
        for heads, seconds in measured.items()
    ]


def kda_chain_s() -> float:
    """Seconds of a token along the chain, as fitted."""
    facts = published()["flash_kda"]
    measured = {int(heads): seconds for heads, seconds in facts["measured"]}
    fewest = min(measured)
    return _fitted(lambda chain: -_kda_seconds(facts, chain, fewest), -measured[fewest], low=0.0, high=1e-6)


def _meta_seconds(facts: dict[str, Any], gemm: float, ring_step_s: float, tokens: int, machines: int) -> float:
    """One prompt in one step."""
    num_tp = facts["tp"]
    head_bytes = 2 * 2 * facts["head_dim"]
    layer = LayerShape(
        mixer=GqaShape(
            num_heads=facts["heads"] // num_tp,
            num_kv_heads=facts["kv_heads"] // num_tp,
            head_dim=facts["head_dim"],
            row_bytes=head_bytes * facts["kv_heads"] // num_tp,
        ),
        ffn=DenseShape(intermediate=facts["intermediate"] // num_tp),
    )
    model = ModelShape(
        hidden=facts["hidden"],
        layers=(layer,) * facts["layers"],
        element_bytes=2,
        attn_res_block=None,
        vocab_size=facts["vocab"] // num_tp,
    )
    profile = DeviceProfile(
        name="meta",
        source="published",
        memory_bytes_per_s=facts["memory_bytes_per_s"],
        rates={
            "gemm": Rate(flops_per_s=gemm),
            "attention": Rate(flops_per_s=facts["attention_flops_per_s"]),
            # norms and additions are inside the projections' rate
            "memory": Rate(flops_per_s=0.0, memory_efficiency=1.0),
        },
        links=(
            # what tensor parallelism moves inside a machine is inside the projections' rate
            Link(pattern="any", scope="node", bytes_per_s=1e18),
            Link(pattern="any", scope="network", message_s=ring_step_s, bytes_per_s=facts["link_bytes_per_s"]),
        ),
        overheads=Overheads(),
    )
    placement = Placement(cp=machines, tp=num_tp, cp_per_node=1, profiles=(profile,))
    costs = StepCosts(model, placement)
    return costs.step([Slice(job=0, start=0, end=tokens)], "zigzag", num_ending=1).seconds


def _kda_seconds(facts: dict[str, Any], chain_s: float, heads: int) -> float:
    """The scan of one sequence."""
    dim, tokens = facts["key_dim"], facts["tokens"]
    kda = KdaShape(
        num_heads=heads, num_value_heads=heads, key_dim=dim, value_dim=dim, conv_width=4, gate_rank=dim,
        output_gate_rank=dim,
    )  # fmt: skip
    layer = LayerShape(mixer=kda, ffn=DenseShape(intermediate=0))
    model = ModelShape(hidden=heads * dim, layers=(layer,), element_bytes=2, attn_res_block=None)
    profile = DeviceProfile(
        name="h200",
        source="published",
        memory_bytes_per_s=facts["memory_bytes_per_s"],
        rates={
            "scan": Rate(flops_per_s=0.0, memory_efficiency=facts["memory_efficiency"], chain_s=chain_s),
        },
    )
    layout = contiguous([Slice(job=0, start=0, end=tokens)], 1)
    (work,) = layer_operations(layout, layer, model, LayerPlace())
    rates = Rates(profile)
    return sum(rates.seconds(operation, ()) for operation in work.all if operation.name == "kda.scan")


def _fitted(falling: Callable[[float], float], wanted: float, *, low: float, high: float) -> float:
    """The argument at which a falling function has the wanted value, by bisection."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return (low + high) / 2


def bound_of(anchor: Anchor) -> float:
    """How far a prediction may be off."""
    return 0.2 if anchor.what == "128K tokens, 16 machines" else 0.1
