"""KDA: prefill (outputs and states), summary [E | M], one token of decode.

Legend: T tokens, H heads, K key dim, V value dim. Flops at a tile of C = 64: 6 K V + 2 C (K + V) a token and head of
prefill, 8 K V of a summary, 7 K V of decode (kernels/kda/README.md).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from longprefill.kernels.kda import cpu, plain, reference

from .measure import Case, assert_close

T, H, K, V, C = 8192, 8, 128, 128, 64
CHECK_TOKENS = 200
TOLERANCE = 2e-6


def prefill(seed: int) -> Iterator[Case]:
    """One segment from a zero state; `fla naive_chunk` is flash-linear-attention's plain-torch chunk form."""
    inputs = _inputs(seed, T)

    def run(backend: Any) -> Any:
        return backend.scan(_prepare(backend, inputs), None)

    def check() -> None:
        small = tuple(x[:CHECK_TOKENS] for x in inputs)
        expected = reference.scan(_prepare(reference, tuple(x.double() for x in small)), None)
        found = cpu.scan(_prepare(cpu, small), None)
        assert_close(found.out_TGV, expected.out_TGV, TOLERANCE)
        assert_close(found.state_NGKV, expected.state_NGKV, TOLERANCE)

    yield Case(
        shape=f"T={T} H={H} K={K} V={V}",
        dtype="fp32",
        run=lambda: run(cpu),
        check=check,
        flops=T * H * (6 * K * V + 2 * C * (K + V)),
        bytes=T * H * 4 * (3 * K + 2 * V + 1),
        bound="compute",
        peers={"plain": lambda: run(plain), **_fla_chunk(inputs)},
    )


def summary(seed: int) -> Iterator[Case]:
    """[E | M] of one middle fragment with slow gates: M never underflows. The peer `kda_prefill` is our own local pass
    over the same tokens; `plain` has its tiles prepared beforehand."""
    inputs = _inputs(seed, T)
    prepared, plain_prepared = _prepare(cpu, inputs), _prepare(plain, inputs)

    def check() -> None:
        small = tuple(x[:CHECK_TOKENS] for x in inputs)
        expected = reference.summarize(_prepare(reference, tuple(x.double() for x in small)), 0)
        found = cpu.summarize(_prepare(cpu, small), 0)
        assert found.transition_GKK is not None
        assert expected.transition_GKK is not None
        assert_close(found.state_GKV, expected.state_GKV, TOLERANCE)
        assert_close(found.transition_GKK, expected.transition_GKK, TOLERANCE)

    yield Case(
        shape=f"T={T} H={H} K={K} V={V}",
        dtype="fp32",
        run=lambda: cpu.summarize(prepared, 0),
        check=check,
        flops=T * H * 8 * K * V,
        bytes=T * H * 4 * (2 * K + V + 1),
        bound="compute",
        peers={
            "kda_prefill": lambda: cpu.scan(prepared, None),
            "plain": lambda: plain.summarize(plain_prepared, 0),
        },
    )


def decode(seed: int) -> Iterator[Case]:
    """One token of 64 requests of H = 32 heads each: 128 MiB of states, as decode meets them (not in cache), written in
    place. The peer `new states` writes them elsewhere."""
    requests, heads = 64, 32
    generator = torch.Generator().manual_seed(seed)
    q, k = (reference.l2_normalize(torch.randn(requests, heads, K, generator=generator)) for _ in range(2))
    v = torch.randn(requests, heads, V, generator=generator)
    g = -1e-3 * torch.rand(requests, heads, K, generator=generator)
    inputs = (q, k, v, g, torch.rand(requests, heads, generator=generator))
    states = list(torch.randn(requests, heads, K, V, generator=generator).unbind())

    def run(backend: Any, *, in_place: bool = True) -> None:
        backend.step(*inputs, states, scale=K**-0.5, in_place=in_place)

    def check() -> None:
        some, few = tuple(x[:2] for x in inputs), states[:2]
        expected = reference.step(*(x.double() for x in some), [x.double() for x in few], scale=K**-0.5)
        found = cpu.step(*some, few, scale=K**-0.5)
        assert_close(found.out_NGV, expected.out_NGV, TOLERANCE)
        assert_close(torch.stack(found.states_GKV), torch.stack(expected.states_GKV), TOLERANCE)

    yield Case(
        shape=f"N={requests} H={heads} K={K} V={V}",
        dtype="fp32",
        run=lambda: run(cpu),
        check=check,
        flops=requests * heads * 7 * K * V,
        bytes=requests * heads * 4 * (2 * K * V + 3 * K + 2 * V + 1),
        bound="memory",
        peers={"new states": lambda: run(cpu, in_place=False), "plain": lambda: run(plain)},
    )


def _inputs(seed: int, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta with slow gates, U(-1e-3, 0): what published models have in most layers."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (reference.l2_normalize(torch.randn(num_tokens, H, K, generator=generator)) for _ in range(2))
    v, g = torch.randn(num_tokens, H, V, generator=generator), torch.rand(num_tokens, H, K, generator=generator)
    return q, k, v, -1e-3 * g, torch.rand(num_tokens, H, generator=generator)


def _prepare(backend: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
    return backend.prepare(*inputs, offsets=[0, inputs[0].shape[0]], scale=K**-0.5)


def _fla_chunk(inputs: tuple[torch.Tensor, ...]) -> dict[str, Callable[[], Any]]:
    """fla-core's reference from its file (its package needs a GPU compiler), where it and einops are installed."""
    package, einops = importlib.util.find_spec("fla"), importlib.util.find_spec("einops")
    if package is None or einops is None or not package.submodule_search_locations:
        return {}
    file = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    batched = tuple(x.unsqueeze(0) for x in inputs)
    return {"fla naive_chunk": lambda: module.naive_chunk_kda(*batched, scale=K**-0.5, output_final_state=True)}
