"""bf16 and quantized caches: what ranks and steps may change is bounded, given the fp32 run's discrete choices.

Legend: T rows, X numbers of an index key, R latent rank.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch

from longprefill.partition.generators import LayoutKind
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.prefill import PrefillRank

from .engine_support import WHOLE, Engine, Job, Outcome, hybrid, make_engine, prompt, reference, run, steps_of

LENGTHS = (300, 511, 200, 450)
ALLOWED_GROWTH = 1.25
"""Of the RMS error against the fp32 one-rank run, over that of the one-rank run of the same dtype and formats."""
ALLOWED_CODES = 1e-4
"""Share of quantized elements whose code may differ, by one step at most."""
CONFIGS: dict[str, dict[str, Any]] = {
    "hybrid": hybrid("kda", "dsa", "kda", "dsa"),
    "pooled, plain residual, softplus": hybrid(
        "kda", "dsa", "kda", "dsa", index_kpool=4, attn_res_block_size=None, linear={"gate_lower_bound": None}
    ),
    "kimi_linear": dict(RAW_CONFIGS["kimi_linear", "tiny"]),
}
FORMATS = {"bf16": ("bf16", "bf16"), "quantized": ("fp8", "mxfp8")}


class Mesh(NamedTuple):
    cp: int
    step_tokens: int
    layout: LayoutKind


MESHES = [Mesh(1, 64, "zigzag"), Mesh(2, WHOLE, "zigzag"), Mesh(3, 192, "contiguous"), Mesh(8, WHOLE, "zigzag")]
ONE_RANK = Mesh(1, WHOLE, "zigzag")


@functools.cache
def engine_of(name: str, dtype: torch.dtype, latent: str, index_key: str) -> Engine:
    return make_engine(CONFIGS[name], dtype=dtype, latent=latent, index_key=index_key)


@functools.cache
def errors(name: str, formats: str, mesh: Mesh) -> dict[str, float]:
    """Relative RMS error of a bf16 run against the fp32 one-rank run, over all prompts, by name."""
    exact = engine_of(name, torch.float32, "fp32", "fp32")
    engine = engine_of(name, torch.bfloat16, *FORMATS[formats])
    squares: dict[str, tuple[float, float]] = {}
    for length in LENGTHS:
        expected = reference(exact, length)
        job = Job(number=0, tokens=prompt(length, vocab_size=engine.config.vocab_size))
        steps = steps_of([job], mesh.step_tokens)
        found = run(engine, [job], steps, cp=mesh.cp, layout=mesh.layout, record=expected.record).outcomes[0]
        assert found.keys() == expected.outcomes[0].keys()
        for key, tensor in expected.outcomes[0].items():
            error, size = squares.get(key, (0.0, 0.0))
            difference = found[key].double() - tensor.double()
            squares[key] = (error + float(difference.square().sum()), size + float(tensor.double().square().sum()))
    return {key: (error / size) ** 0.5 for key, (error, size) in squares.items() if size}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"cp{mesh.cp}")
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_errs_no_more_on_many_ranks(name: str, formats: str, mesh: Mesh) -> None:
    allowed = errors(name, formats, ONE_RANK)
    found = errors(name, formats, mesh)
    worse = {key: (error, allowed[key]) for key, error in found.items() if not error <= ALLOWED_GROWTH * allowed[key]}
    assert not worse
    assert 1e-3 < allowed["logits"] < 0.5, "bf16 shows and does not drown the result"


def stored_bytes(rank: PrefillRank, job: int) -> Outcome:
    """Every cache row as it is stored."""
    rows = {
        f"layers.{kind.layer}.{kind.kind}": rank.cache(job).rows(kind.layer, kind.kind, rank.state(job).position)
        for kind in rank.pool.kinds
    }
    return {name: paged.read_bytes(0, paged.num_rows).clone() for name, paged in rows.items()}


def code_numbers(bytes_TX: torch.Tensor) -> torch.Tensor:
    """E4M3 codes as integers whose differences count steps."""
    magnitude = (bytes_TX & 0x7F).to(torch.int64)
    return torch.where(bytes_TX >= 0x80, -magnitude, magnitude)


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"cp{mesh.cp}")
@pytest.mark.parametrize("pool", [1, 4], ids=["every key", "k-pool"])
def test_codes_do_not_depend_on_the_ranks(pool: int, mesh: Mesh) -> None:
    """fp32 compute. One sparse layer: behind it, one step of one code is a difference like any other."""
    engine = make_engine(
        hybrid("kda", "kda", "dsa", kv_lora_rank=160, index_kpool=pool), latent="fp8", index_key="mxfp8"
    )
    latent_rank, key_dim = 160, 16
    differing = num_codes = 0
    for seed in range(4):
        job = Job(number=0, tokens=prompt(777, seed))
        one = run(engine, [job], steps_of([job], WHOLE), read=stored_bytes)
        many = run(
            engine, [job], steps_of([job], mesh.step_tokens), cp=mesh.cp, layout=mesh.layout, record=one.record,
            read=stored_bytes,
        )  # fmt: skip
        for name, width in (("latent", latent_rank), ("index_key", key_dim)):
            expected, found = (result.outcomes[0][f"layers.2.{name}"] for result in (one, many))
            assert found.shape == expected.shape
            steps_TX = code_numbers(found[:, :width]) - code_numbers(expected[:, :width])
            assert int(steps_TX.abs().max()) <= 1
            differing += int(steps_TX.count_nonzero())
            num_codes += steps_TX.numel()
            if name == "index_key":
                assert torch.equal(found[:, width:], expected[:, width:]), "exponents"
    assert differing <= ALLOWED_CODES * num_codes, f"{differing} of {num_codes} codes"
