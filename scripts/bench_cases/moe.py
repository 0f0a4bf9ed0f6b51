"""Routed experts of one layer.

Legend: T tokens, D hidden, F inner, E experts, A experts a token. 6 D F flops a token and expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from longprefill.kernels.contracts import Routing
from longprefill.kernels.moe import cpu, plain, reference

from .measure import Case, assert_close

T, D, F, E, A = 4096, 2048, 768, 32, 8


def experts(seed: int) -> Iterator[Case]:
    """Tokens spread evenly by random routing. The peer `torch` runs two matrix products an expert."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=generator).bfloat16()
    gate_up = (torch.randn(E, 2 * F, D, generator=generator) * D**-0.5).bfloat16()
    down = (torch.randn(E, D, F, generator=generator) * F**-0.5).bfloat16()
    chosen = torch.rand(T, E, generator=generator).topk(A, dim=1).indices
    routing = Routing(chosen, torch.rand(T, A, generator=generator))

    def check() -> None:
        few = Routing(chosen[:8], routing.weight_TA[:8])
        found = cpu.experts(x[:8], few, gate_up, down, activation="silu", out_dtype=torch.float32)
        expected = reference.experts(x[:8].double(), few, gate_up.double(), down.double(), activation="silu")
        assert_close(found, expected, 4e-3)

    yield Case(
        shape=f"T={T} D={D} F={F} E={E} A={A}",
        dtype="bf16",
        run=lambda: cpu.experts(x, routing, gate_up, down, activation="silu"),
        check=check,
        flops=6 * T * A * D * F,
        bytes=6 * E * D * F + 4 * T * D,
        bound="bf16",
        peers={"torch": lambda: plain.experts(x, routing, gate_up, down, activation="silu")},
    )
