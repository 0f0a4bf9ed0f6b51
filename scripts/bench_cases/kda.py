"""KDA: the inputs from projections, prefill (outputs and states), summary [E | M], one token of decode.

Legend: T tokens, H heads, K key dim, V value dim. Flops at a tile of C = 64: 6 K V + 2 C (K + V) a token and head of
prefill, 8 K V of a summary, 7 K V of decode (kernels/kda/README.md).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from longprefill.kernels.contracts import KdaInputs
from longprefill.kernels.conv import cpu as conv
from longprefill.kernels.kda import cpu, plain, reference

from .measure import Case, assert_close

T, H, K, V, C = 8192, 8, 128, 128, 64
TRANSFORMERS_TOKENS, TRANSFORMERS_HEADS = 4096, 4
"""It makes a number for each pair of tokens of a chunk and channel, several times over: 512 MiB at this shape."""
CHECK_HEADS = 2
TOLERANCE = 2e-6
BF16_TOLERANCE = 3e-3
Inputs = tuple[torch.Tensor, ...]


def prefill(seed: int) -> Iterator[Case]:
    """One segment from a zero state. `fla naive_chunk` is flash-linear-attention's plain-torch chunk form,
    `transformers` what its Kimi-Linear runs on a CPU: in chunks of 64 as they come, and in the faster ones of 16."""
    for num_tokens, heads, peers in (
        (T, H, _fla_chunk),
        (TRANSFORMERS_TOKENS, TRANSFORMERS_HEADS, _transformers_chunk),
    ):
        inputs = _inputs(seed, num_tokens, heads)

        def run(backend: Any, inputs: Inputs = inputs) -> Any:
            return backend.scan(_prepare(backend, inputs), None)

        def check(inputs: Inputs = inputs, run: Callable[[Any], Any] = run) -> float:
            expected, found = reference.scan(_prepare(reference, _some_in_fp64(inputs)), None), run(cpu)
            others = run(plain)  # every head, to the errors of both
            assert_close(found.out_TGV, others.out_TGV, 2 * TOLERANCE)
            assert_close(found.state_NGKV, others.state_NGKV, 2 * TOLERANCE)
            return max(
                assert_close(found.out_TGV[:, :CHECK_HEADS], expected.out_TGV, TOLERANCE),
                assert_close(found.state_NGKV[:, :CHECK_HEADS], expected.state_NGKV, TOLERANCE),
            )

        yield Case(
            shape=f"T={num_tokens} H={heads} K={K} V={V}",
            dtype="fp32",
            run=functools.partial(run, cpu),
            check=check,
            flops=num_tokens * heads * (6 * K * V + 2 * C * (K + V)),
            bytes=num_tokens * heads * 4 * (3 * K + 2 * V + 1),
            bound="compute",
            peers={"plain": functools.partial(run, plain), **peers(inputs)},
        )


def summary(seed: int) -> Iterator[Case]:
    """[E | M] of one middle fragment with slow gates: M never underflows. The peer `kda_prefill` is our own local pass
    over the same tokens; `plain` has its tiles prepared beforehand."""
    inputs = _inputs(seed, T, H)
    prepared, plain_prepared = _prepare(cpu, inputs), _prepare(plain, inputs)

    def check() -> float:
        expected, found = reference.summarize(_prepare(reference, _some_in_fp64(inputs)), 0), cpu.summarize(prepared, 0)
        assert found.transition_GKK is not None
        assert expected.transition_GKK is not None
        others = plain.summarize(plain_prepared, 0)
        assert others.transition_GKK is not None
        assert_close(found.state_GKV, others.state_GKV, 2 * TOLERANCE)
        assert_close(found.transition_GKK, others.transition_GKK, 2 * TOLERANCE)
        return max(
            assert_close(found.state_GKV[:CHECK_HEADS], expected.state_GKV, TOLERANCE),
            assert_close(found.transition_GKK[:CHECK_HEADS], expected.transition_GKK, TOLERANCE),
        )

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


def inputs(seed: int) -> Iterator[Case]:
    """What makes the scan's inputs of the projections, fp32 and bf16. The peer `separate` is the same by the kernels of
    convolution, norm and gate, `plain` by torch operators."""
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, generator: torch.Generator = generator, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        channels = H * (2 * K + V)
        rows = (normal(T, channels), normal(channels, 4), normal(T, H, K), normal(T, H))
        options: dict[str, Any] = {
            "offsets": (0, T), "history_NWC": normal(1, 3, channels), "num_heads": H, "a_log_G": normal(H).float(),
            "dt_bias_GK": normal(H, K).float(), "lower_bound": None, "largest_beta": 1.0,
        }  # fmt: skip

        def run(backend: Any, rows: Inputs = rows, options: dict[str, Any] = options) -> KdaInputs:
            return backend.make_inputs(*rows, **options)

        def separate(rows: Inputs = rows, options: dict[str, Any] = options) -> KdaInputs:
            raw, weight, decay, beta = rows
            mixed = conv.causal_conv_silu(raw, weight, offsets=(0, T), history_NWC=options["history_NWC"])
            q, k, v = (x.unflatten(1, (H, -1)) for x in mixed.split((H * K, H * K, H * V), dim=1))
            g = cpu.gate(decay, options["a_log_G"], options["dt_bias_GK"], None)
            return KdaInputs(cpu.l2_normalize(q), cpu.l2_normalize(k), v, g, torch.sigmoid(beta.float()))

        def check(rows: Inputs = rows, run: Callable[..., KdaInputs] = run) -> float:
            exact = run(reference, tuple(x.double() for x in rows))
            names = [name for name in KdaInputs._fields if name != "v_TGV"]  # v may be bf16
            found = run(cpu)
            assert_close(found.v_TGV, exact.v_TGV, TOLERANCE if rows[0].dtype == torch.float32 else BF16_TOLERANCE)
            return max(assert_close(getattr(found, name), getattr(exact, name), TOLERANCE) for name in names)

        item = dtype.itemsize
        yield Case(
            shape=f"T={T} H={H} K={K} V={V} W=4",
            dtype="bf16" if dtype == torch.bfloat16 else "fp32",
            run=functools.partial(run, cpu),
            check=check,
            flops=T * H * (2 * 4 + 4) * (2 * K + V),
            bytes=T * H * (item * (3 * K + 2 * V + 1) + 4 * (3 * K + 1)),
            bound="memory",
            peers={"separate": separate, "plain": functools.partial(run, plain)},
        )


def decode(seed: int) -> Iterator[Case]:
    """One token of 64 requests of H = 32 heads each: 128 MiB of states, as decode meets them (not in cache), written in
    place. The peer `new states` writes them elsewhere."""
    requests, heads = 64, 32
    generator = torch.Generator().manual_seed(seed)
    q, k = (reference.l2_normalize(torch.randn(requests, heads, K, generator=generator)) for _ in range(2))
    v = torch.randn(requests, heads, V, generator=generator)
    g = -1e-3 * torch.rand(requests, heads, K, generator=generator)
    inputs = KdaInputs(q, k, v, g, torch.rand(requests, heads, generator=generator))
    states = list(torch.randn(requests, heads, K, V, generator=generator).unbind())

    def run(backend: Any, *, in_place: bool = True) -> None:
        backend.step(*inputs, states, scale=K**-0.5, in_place=in_place)

    def check() -> float:
        some, few = KdaInputs(*(x[:2] for x in inputs)), states[:2]
        exact = KdaInputs(*(x.double() for x in some))
        expected = reference.step(*exact, [x.double() for x in few], scale=K**-0.5)
        found = cpu.step(*some, few, scale=K**-0.5)
        return max(
            assert_close(found.out_NGV, expected.out_NGV, TOLERANCE),
            assert_close(torch.stack(found.states_GKV), torch.stack(expected.states_GKV), TOLERANCE),
        )

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


def _inputs(seed: int, num_tokens: int, heads: int) -> Inputs:
    """q, k, v, g, beta with slow gates, U(-1e-3, 0): what published models have in most layers."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (reference.l2_normalize(torch.randn(num_tokens, heads, K, generator=generator)) for _ in range(2))
    v, g = torch.randn(num_tokens, heads, V, generator=generator), torch.rand(num_tokens, heads, K, generator=generator)
    return q, k, v, -1e-3 * g, torch.rand(num_tokens, heads, generator=generator)


def _some_in_fp64(inputs: Inputs) -> Inputs:
    return tuple(x[:, :CHECK_HEADS].double() for x in inputs)


def _prepare(backend: Any, inputs: Inputs) -> Any:
    return backend.prepare(*inputs, offsets=[0, inputs[0].shape[0]], scale=K**-0.5)


def _fla_chunk(inputs: Inputs) -> dict[str, Callable[[], Any]]:
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
    run = functools.partial(module.naive_chunk_kda, *batched, scale=K**-0.5, output_final_state=True)
    return {"fla naive_chunk": run, "fla naive_chunk, chunks of 16": functools.partial(run, chunk_size=16)}


def _transformers_chunk(inputs: Inputs) -> dict[str, Callable[[], Any]]:
    if importlib.util.find_spec("transformers") is None:
        return {}
    from transformers.models.kimi_linear import modeling_kimi_linear

    batched = tuple(x.unsqueeze(0) for x in inputs)
    run = functools.partial(modeling_kimi_linear.chunk_kimi_delta_attention, *batched, output_final_state=True)
    return {"transformers": run, "transformers, chunks of 16": functools.partial(run, chunk_size=16)}
