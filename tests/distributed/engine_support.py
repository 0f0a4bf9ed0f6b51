"""Runs of the whole engine over ranks in threads, and the one comparison that every engine test uses.

A run is compared with the reference, one rank and one step a job, given equal discrete choices: the reference's choices
are recorded and replayed, every difference must be a near tie, and then all that a job leaves must agree: logits, KDA
states, conv tails, pool tails and every cache row. Caches start as 0xFF bytes (NaN), page tables are permuted.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longprefill.comms.group import Group
from longprefill.comms.solo import SoloGroup
from longprefill.comms.thread_group import run_ranks
from longprefill.kernels.backends import resolve
from longprefill.partition.generators import LayoutKind
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.steps import pack_jobs
from longprefill.workers.cache.pages import CacheFormats, CachePool, cache_kinds, pool_bytes
from longprefill.workers.choices import Record, Recorder, Replayer
from longprefill.workers.decode import DecodeRank, Sampling
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.initial import initial_parameter
from longprefill.workers.model.model import Model
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.weights import load_weights, parameter_dtype
from longprefill.workers.prefill import PrefillRank, StepPlan
from longprefill.workers.snapshot import SnapshotIdentity, restore, write_snapshot
from longprefill.workers.trace import Tracer

TOLERANCE = 1e-5
"""Relative RMS of fp32 results, and the largest relative distance of a near tie."""
WHOLE = 1 << 20
"""A step size that no prompt of these tests reaches."""
SPARE_PAGES = 3
"""Pages of a pool that no job owns."""

Outcome = dict[str, torch.Tensor]
"""What one job leaves: "logits", "layers.N.state", ".conv", ".pool_key", ".pool_gate", ".latent", ".index_key"."""
Steps = Sequence[Sequence[Slice]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine:
    """A model with seeded weights; nothing in it changes, so all ranks and runs share it. Equal to itself only."""

    config: ModelConfig
    model: Model
    dtype: torch.dtype
    formats: CacheFormats

    @property
    def identity(self) -> SnapshotIdentity:
        return SnapshotIdentity(fingerprint="test", dtype=str(self.dtype), formats=self.formats)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt in a run. `snapshot` is the file that it resumes from."""

    number: int
    tokens: torch.Tensor
    snapshot: Path | None = None


@dataclass(kw_only=True)
class Run:
    """What all ranks left; replicated values were bitwise equal on all ranks."""

    outcomes: dict[int, Outcome]
    record: Record = field(default_factory=dict)
    """With recorded choices."""
    rows: int = 0
    swaps: int = 0
    worst: float = 0.0
    """With replayed choices: see Replayer."""


def make_engine(
    raw: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, latent: str = "fp32", index_key: str = "fp32",
    seed: int = 0,
) -> Engine:  # fmt: skip
    """An engine for a raw config, weights as make_checkpoint draws them."""
    config = config_from(raw)
    weights = {
        name: initial_parameter(name, shape, config, seed).to(parameter_dtype(name, dtype))
        for name, shape in parameter_shapes(config).items()
    }
    formats = CacheFormats(latent=latent, index_key=index_key)
    return Engine(config=config, model=Model(config, weights), dtype=dtype, formats=formats)


def load_engine(directory: Path) -> Engine:
    """An fp32 engine of a published model directory."""
    config = read_config(directory)
    weights = load_weights(directory, config, dtype=torch.float32)
    formats = CacheFormats(latent="fp32", index_key="fp32")
    return Engine(config=config, model=Model(config, weights), dtype=torch.float32, formats=formats)


def hybrid(*layer_types: str, linear: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The tiny hybrid's raw config with these layers and changed fields; `linear` changes `linear_attn_config`."""
    raw = RAW_CONFIGS["longprefill_hybrid", "tiny"] | fields
    if layer_types:
        raw |= {"layer_types": list(layer_types), "num_hidden_layers": len(layer_types)}
    raw["linear_attn_config"] = raw["linear_attn_config"] | (linear or {})
    return raw


def prompt(num_tokens: int, seed: int = 0, vocab_size: int = 512) -> torch.Tensor:
    """Random token ids, int64 [T]."""
    generator = torch.Generator().manual_seed(1000 * num_tokens + seed)
    return torch.randint(0, vocab_size, (num_tokens,), generator=generator)


def steps_of(jobs: Iterable[Job], step_tokens: int, starts: Mapping[int, int] | None = None) -> list[list[Slice]]:
    """The steps that take the jobs to their ends, several in one step where they fit."""
    starts = starts or {}
    slices = [Slice(job=job.number, start=starts.get(job.number, 0), end=job.tokens.numel()) for job in jobs]
    return list(pack_jobs(slices, step_tokens))


def make_rank(
    engine: Engine, group: Group, num_pages: int, choices: Recorder | Replayer | None = None, *, fill: int = 0xFF
) -> PrefillRank:
    """A rank whose pool holds the byte `fill` everywhere: 0xFF is NaN in every format."""
    kinds = cache_kinds(engine.config, engine.formats)
    buffer = torch.full((pool_bytes(kinds, num_pages),), fill, dtype=torch.uint8)
    pool = CachePool(buffer, kinds, num_pages)
    rank = PrefillRank(engine.model, group, pool, resolve("cpu"), dtype=engine.dtype, tracer=Tracer(False))
    rank.choices = choices
    return rank


def deal_tables(jobs: Sequence[Job], *, permuted: bool) -> tuple[dict[int, tuple[int, ...]], int]:
    """Page tables of all jobs in one pool, and the pool's pages; permuted ones interleave the jobs."""
    needed = {job.number: -(-job.tokens.numel() // PAGE_TOKENS) for job in jobs}
    num_pages = sum(needed.values()) + SPARE_PAGES
    free = list(range(num_pages))
    if permuted:
        random.Random(num_pages).shuffle(free)
    tables: dict[int, tuple[int, ...]] = {}
    for number, count in needed.items():
        tables[number], free = tuple(free[:count]), free[count:]
    return tables, num_pages


def open_job(rank: PrefillRank, engine: Engine, job: Job, table: tuple[int, ...]) -> None:
    """Opens a job, from its snapshot if it has one."""
    rank.open_job(job.number, job.tokens, table)
    if job.snapshot is None:
        return
    state = restore(str(job.snapshot), engine.config, engine.dtype, rank.cache(job.number))
    rank.close_job(job.number)
    rank.open_job(job.number, job.tokens, table, state)


def drive(
    rank: PrefillRank, steps: Steps, *, layout: LayoutKind = "zigzag", exchange: str = "all_gather"
) -> dict[int, torch.Tensor]:
    """Runs the steps; fp32 logits [V] of the jobs whose last token this rank computed."""
    logits: dict[int, torch.Tensor] = {}
    for slices in steps:
        ending = tuple(part.job for part in slices if part.end == rank.num_tokens(part.job))
        plan = StepPlan(slices=tuple(slices), layout=layout, exchange=exchange, logits_of=ending)
        logits |= rank.run_step(plan).logits
    return logits


def leavings(rank: PrefillRank, job: int) -> Outcome:
    """States and cache rows of a job on this rank, fp32 or the compute dtype."""
    state = rank.state(job)
    found = dict(state.named_tensors())
    for kind in rank.pool.kinds:
        rows = rank.cache(job).rows(kind.layer, kind.kind, state.position)
        found[f"layers.{kind.layer}.{kind.kind}"] = rows.read(0, rows.num_rows, torch.float32).clone()
    return found


def run(
    engine: Engine, jobs: Sequence[Job], steps: Steps, *, cp: int = 1, layout: LayoutKind = "zigzag",
    exchange: str = "all_gather", record: Record | None = None, export_to: Path | None = None, permuted: bool = True,
    fill: int = 0xFF, read: Callable[[PrefillRank, int], Outcome] | None = None,
) -> Run:  # fmt: skip
    """Runs jobs on `cp` ranks. Records choices, or replays `record`. `export_to` is a folder for a snapshot of every
    job (its number, ".safetensors"), written by the last rank. `read` says what a job leaves on a rank (`leavings`).

    Raises:
        AssertionError: the ranks do not agree bit for bit, or a job's logits are not on exactly one rank.
    """
    tables, num_pages = deal_tables(jobs, permuted=permuted)

    def on_rank(group: Group) -> tuple[dict[int, torch.Tensor], dict[int, Outcome], Recorder | Replayer]:
        choices = Recorder() if record is None else Replayer(record)
        rank = make_rank(engine, group, num_pages, choices, fill=fill)
        for job in jobs:
            open_job(rank, engine, job, tables[job.number])
        logits = drive(rank, steps, layout=layout, exchange=exchange)
        if export_to is not None and group.rank == group.size - 1:
            for job in jobs:
                path = str(export_to / f"{job.number}.safetensors")
                write_snapshot(path, engine.identity, job.tokens, rank.state(job.number), rank.cache(job.number), None)
        return logits, {job.number: (read or leavings)(rank, job.number) for job in jobs}, choices

    ranks = run_ranks(cp, on_rank, timeout_s=60.0)
    result = Run(outcomes={job.number: dict(ranks[0][1][job.number]) for job in jobs})
    for logits, outcomes, choices in ranks:
        for number, outcome in outcomes.items():
            assert_bitwise_equal(outcome, ranks[0][1][number])
        for number, logits_V in logits.items():
            assert "logits" not in result.outcomes[number], f"two ranks have the logits of job {number}"
            result.outcomes[number]["logits"] = logits_V
        if isinstance(choices, Recorder):
            result.record |= choices.record
        else:
            result.rows, result.swaps = result.rows + choices.rows, result.swaps + choices.swaps
            result.worst = max(result.worst, choices.worst)
    return result


def generate(
    engine: Engine, job: Job, step_tokens: int, cp: int, num_new: int, folder: Path, choices: Recorder | None = None
) -> tuple[list[int], PrefillRank]:
    """Greedy tokens from decode steps after a prefill on `cp` ranks, and the rank that decoded."""
    prefilled = run(engine, [job], steps_of([job], step_tokens), cp=cp, export_to=folder)
    num_pages = -(-(job.tokens.numel() + num_new) // PAGE_TOKENS)
    table = tuple(range(num_pages, 0, -1))
    rank = make_rank(engine, SoloGroup(), num_pages + 1, choices)
    open_job(
        rank, engine, Job(number=job.number, tokens=job.tokens, snapshot=folder / f"{job.number}.safetensors"), table
    )
    state = rank.state(job.number)
    rank.close_job(job.number)
    decode = DecodeRank(rank)
    decode.take(job.number, table, state, prefilled.outcomes[job.number]["logits"], job.tokens.numel() + num_new)
    return [token.id for token in decode.generate(job.number, Sampling(max_new_tokens=num_new))], rank


def assert_bitwise_equal(actual: Outcome, expected: Outcome) -> None:
    """Same names, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        bits = [x.contiguous().view(-1).view(torch.uint8) for x in (actual[name], tensor)]
        assert actual[name].shape == tensor.shape, name
        assert torch.equal(bits[0], bits[1]), f"{name}: ranks differ"


def rms_ratio(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS(actual - expected) / RMS(expected) in fp64; infinite where shapes differ or a value is not finite."""
    if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt().clamp_min(1e-30))


def differences(actual: Outcome, expected: Outcome) -> dict[str, float]:
    """Relative RMS difference by name; of states the worst head's, so that no large head hides a wrong small one."""
    found: dict[str, float] = {}
    for name in expected.keys() | actual.keys():
        if name not in expected or name not in actual:
            found[name] = float("inf")
        elif name.endswith(".state"):
            found[name] = max(rms_ratio(a, e) for a, e in zip(actual[name], expected[name], strict=True))
        else:
            found[name] = rms_ratio(actual[name], expected[name])
    return found


def assert_equal_outcomes(actual: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    """The comparison: everything a job leaves within the tolerance."""
    wrong = {name: ratio for name, ratio in differences(actual, expected).items() if not ratio <= tolerance}
    listed = ", ".join(f"{name} {ratio:.2e}" for name, ratio in sorted(wrong.items()))
    assert not wrong, f"relative RMS difference beyond {tolerance:.0e}: {listed}"


@functools.cache
def reference(engine: Engine, num_tokens: int, seed: int = 0) -> Run:
    """The one-rank one-step run of `prompt(num_tokens, seed)` as job 0; computed once a session."""
    job = Job(number=0, tokens=prompt(num_tokens, seed, engine.config.vocab_size))
    return run(engine, [job], steps_of([job], WHOLE), permuted=False)


def renumbered(record: Record, job: int) -> Record:
    """A record of one job under another job number."""
    return {(kind, layer, job, start): rows for (kind, layer, _, start), rows in record.items()}


def check_against_reference(
    engine: Engine, lengths: Sequence[int], step_tokens: int | Steps, *, cp: int, layout: LayoutKind = "zigzag",
    exchange: str = "all_gather", snapshots: Sequence[Path] = (), starts: Mapping[int, int] | None = None,
    tolerance: float = TOLERANCE, fill: int = 0xFF,
) -> Run:  # fmt: skip
    """Runs the prompts of these lengths (job numbers 0, 1, ...; seeds are the numbers) and compares each with its own
    reference.

    Raises:
        AssertionError: a result differs, or a choice differs that was not a near tie.
    """
    jobs = [
        Job(number=n, tokens=prompt(length, n, engine.config.vocab_size), snapshot=snapshots[n] if snapshots else None)
        for n, length in enumerate(lengths)
    ]
    steps = steps_of(jobs, step_tokens, starts) if isinstance(step_tokens, int) else step_tokens
    record: Record = {}
    for n, length in enumerate(lengths):
        record |= renumbered(reference(engine, length, n).record, n)
    result = run(engine, jobs, steps, cp=cp, layout=layout, record=record, exchange=exchange, fill=fill)
    assert result.worst <= tolerance, f"{result.swaps} swapped choices, the worst {result.worst:.1e} from its tie"
    for n, length in enumerate(lengths):
        assert_equal_outcomes(result.outcomes[n], reference(engine, length, n).outcomes[0], tolerance)
    return result
