"""Runs over CP x TP x EP meshes of threads, looked at like `longprefill align` looks at them.

Every rank has its share of the weights only. A run is compared with one rank's, given equal choices: activations at
every point of every layer, states, cache rows, logits, and that all ranks hold the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longprefill.comms.group import Group
from longprefill.comms.thread_group import run_ranks
from longprefill.kernels.backends import resolve
from longprefill.orchestrator.align.compare import Row, compare, first_deviation
from longprefill.orchestrator.align.observation import LOGIT_ROWS, Numbers, Observation, from_ranks, renumbered
from longprefill.workers.cache.pages import CacheFormats, CachePool, cache_kinds, pool_bytes
from longprefill.workers.choices import Record, Recorder, Replayer
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.initial import initial_parameter
from longprefill.workers.model.model import Model
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.sharding import MeshPlace, Ranges, local_config, parameter_ranges
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.weights import load_weights, parameter_dtype
from longprefill.workers.prefill import PrefillRank
from longprefill.workers.probe import ActivationProbe, RankObservation, observe
from longprefill.workers.snapshot import SnapshotIdentity, restore, write_snapshot
from longprefill.workers.trace import Tracer

from .engine_support import WHOLE, Job, Steps, deal_tables, drive, prompt, steps_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Whole:
    """A whole model with seeded weights, to be split over meshes. Equal to itself only."""

    config: ModelConfig
    weights: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    formats: CacheFormats

    @property
    def numbers(self) -> Numbers:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return Numbers(dtype=dtype, latent=self.formats.latent, index=self.formats.index_key)

    @property
    def exact(self) -> Whole:
        """The same weights in fp32 throughout; made once."""
        return _exact(self)

    @property
    def identity(self) -> SnapshotIdentity:
        return SnapshotIdentity(fingerprint="test", dtype=str(self.dtype), formats=self.formats)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    cp: int = 1
    tp: int = 1
    ep: bool = False

    @property
    def size(self) -> int:
        return self.cp * self.tp

    def __str__(self) -> str:
        return f"{self.cp}x{self.tp}{' ep' if self.ep else ''}"


def whole_model(
    raw: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, latent: str = "fp32", index_key: str = "fp32",
    seed: int = 0,
) -> Whole:  # fmt: skip
    """A model for a raw config, weights as make_checkpoint draws them."""
    config = config_from(raw)
    weights = {
        name: initial_parameter(name, shape, config, seed).to(parameter_dtype(name, dtype))
        for name, shape in parameter_shapes(config).items()
    }
    return Whole(config=config, weights=weights, dtype=dtype, formats=CacheFormats(latent=latent, index_key=index_key))


@functools.cache
def _exact(whole: Whole) -> Whole:
    weights = {name: weight.float() for name, weight in whole.weights.items()}
    formats = CacheFormats(latent="fp32", index_key="fp32")
    return Whole(config=whole.config, weights=weights, dtype=torch.float32, formats=formats)


def mesh_config(**fields: Any) -> dict[str, Any]:
    """The raw config of the hybrid of size mesh, with changed fields; `linear` changes `linear_attn_config`."""
    linear = fields.pop("linear", {})
    raw = RAW_CONFIGS["longprefill_hybrid", "mesh"] | fields
    return raw | {"linear_attn_config": raw["linear_attn_config"] | linear}


def take_slice(tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """What a rank holds of a tensor."""
    for dim, runs in enumerate(ranges):
        tensor = torch.cat([tensor.narrow(dim, run.start, len(run)) for run in runs], dim=dim)
    return tensor.clone()


def share_of(whole: Whole, place: MeshPlace) -> dict[str, torch.Tensor]:
    """A rank's share of all weights."""
    ranges = parameter_ranges(whole.config, place)
    return {name: take_slice(tensor, ranges[name]) for name, tensor in whole.weights.items()}


def make_rank(whole: Whole, group: Group, num_pages: int, mesh: Mesh) -> PrefillRank:
    """A rank with its share; cache pages hold NaN."""
    place = MeshPlace.of(group.rank, num_cp=mesh.cp, num_tp=mesh.tp, expert_parallel=mesh.ep)
    kinds = cache_kinds(whole.config, whole.formats)
    pool = CachePool(torch.full((pool_bytes(kinds, num_pages),), 0xFF, dtype=torch.uint8), kinds, num_pages)
    return PrefillRank(
        Model(local_config(whole.config, place), share_of(whole, place)), group, pool, resolve("cpu"),
        dtype=whole.dtype, tracer=Tracer(False), num_tp=mesh.tp, expert_parallel=mesh.ep, full_config=whole.config,
    )  # fmt: skip


def open_job(rank: PrefillRank, whole: Whole, job: Job, table: tuple[int, ...]) -> None:
    """Opens a job, from its snapshot if it has one: this rank's heads of it."""
    rank.open_job(job.number, job.tokens, table)
    if job.snapshot is None:
        return
    state = restore(str(job.snapshot), whole.config, whole.dtype, rank.cache(job.number))
    rank.close_job(job.number)
    rank.open_job(job.number, job.tokens, table, rank.share_of(state))


def run_mesh(
    whole: Whole, jobs: Sequence[Job], steps: Steps, mesh: Mesh, *, record: Record | None = None, replay: bool = True,
    export_to: Path | None = None, layout: Any = "zigzag",
) -> dict[int, Observation]:  # fmt: skip
    """What the mesh shows of every job. Records choices, or compares them with `record` and with `replay` takes those.
    The last rank writes snapshots to the folder `export_to`."""
    tables, num_pages = deal_tables(jobs, permuted=True)

    def on_rank(group: Group) -> tuple[dict[int, RankObservation], Recorder | Replayer, dict[int, torch.Tensor]]:
        rank = make_rank(whole, group, num_pages, mesh)
        rank.choices = choices = Recorder() if record is None else Replayer(record, keep_own=not replay)
        rank.probe = probe = ActivationProbe(logit_rows=LOGIT_ROWS)
        for job in jobs:
            open_job(rank, whole, job, tables[job.number])
        logits = drive(rank, steps, layout=layout)
        if export_to is not None:
            for job in jobs:
                state = rank.whole_state(job.number)
                if group.rank == group.size - 1:
                    path = str(export_to / f"{job.number}.safetensors")
                    write_snapshot(path, whole.identity, job.tokens, state, rank.cache(job.number), None)
        return {job.number: observe(rank, probe, job.number) for job in jobs}, choices, logits

    ranks = run_ranks(mesh.size, on_rank, timeout_s=120.0)
    _check_logits(jobs, mesh, [logits for *_, logits in ranks])
    found: dict[int, Observation] = {}
    for job in jobs:
        swapped = [s for _, c, _ in ranks if isinstance(c, Replayer) for s in c.swapped if s.job == job.number]
        own: Record = {}
        for _, choices, _ in ranks:
            if isinstance(choices, Recorder):
                own |= {key: rows for key, rows in choices.record.items() if key[2] == job.number}
        found[job.number] = from_ranks(
            [seen[job.number] for seen, *_ in ranks], job.tokens.numel(), record=renumbered(own, 0),
            num_choices=sum(c.rows for _, c, _ in ranks if isinstance(c, Replayer)), swapped=swapped,
            keeps_own=not replay, numbers=whole.numbers,
        )  # fmt: skip
    return found


def _check_logits(jobs: Sequence[Job], mesh: Mesh, by_rank: list[dict[int, torch.Tensor]]) -> None:
    """A job's logits are on the ranks of one tensor-parallel group, bit for bit the same."""
    for job in jobs:
        owners = [rank for rank, logits in enumerate(by_rank) if job.number in logits]
        assert len(owners) in (0, mesh.tp), f"job {job.number}: logits on ranks {owners}"
        assert len({rank // mesh.tp for rank in owners}) <= 1
        for rank in owners:
            one, other = by_rank[rank][job.number], by_rank[owners[0]][job.number]
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@functools.cache
def one_rank(whole: Whole, num_tokens: int, seed: int = 0) -> Observation:
    """One rank, one step, `prompt(num_tokens, seed)`; computed once a session."""
    job = Job(number=0, tokens=prompt(num_tokens, seed, whole.config.vocab_size))
    return run_mesh(whole, [job], steps_of([job], WHOLE), Mesh())[0]


@functools.cache
def one_inexact_rank(whole: Whole, num_tokens: int, seed: int = 0) -> Observation:
    """`one_rank` in the model's own numbers, with the choices of the exact run; computed once a session."""
    job = Job(number=0, tokens=prompt(num_tokens, seed, whole.config.vocab_size))
    record = one_rank(whole.exact, num_tokens, seed).record
    return run_mesh(whole, [job], steps_of([job], WHOLE), Mesh(), record=record)[0]


def rows_of(
    whole: Whole, lengths: Sequence[int], step_tokens: int | Steps, mesh: Mesh, *, replay: bool = True,
    snapshots: Sequence[Path] = (), starts: Mapping[int, int] | None = None, layout: Any = "zigzag",
) -> list[Row]:  # fmt: skip
    """Prompts of these lengths (job numbers and seeds 0, 1, ...) over the mesh, compared with one rank's exact runs;
    where the model is not exact, by the growth rule."""
    jobs = [
        Job(number=n, tokens=prompt(length, n, whole.config.vocab_size), snapshot=snapshots[n] if snapshots else None)
        for n, length in enumerate(lengths)
    ]
    steps = steps_of(jobs, step_tokens, starts) if isinstance(step_tokens, int) else step_tokens
    is_exact = whole.numbers.is_exact
    expected = [one_rank(whole if is_exact else whole.exact, length, n) for n, length in enumerate(lengths)]
    bases = [None if is_exact else one_inexact_rank(whole, length, n) for n, length in enumerate(lengths)]
    record: Record = {}
    for n, observation in enumerate(expected):
        record |= renumbered(observation.record, n)
    found = run_mesh(whole, jobs, steps, mesh, record=record, replay=replay, layout=layout)
    rows: list[Row] = []
    for n, observation in enumerate(expected):
        rows += compare(whole.config, observation, found[n], base=bases[n])
    return rows


def assert_agrees(rows: Sequence[Row]) -> None:
    """Every comparison within its bound."""
    deviation = first_deviation(list(rows))
    assert deviation is None, f"first deviation: {deviation}"


def whole_from(directory: Path) -> Whole:
    """The model of a directory in fp32."""
    config = read_config(directory)
    weights = load_weights(directory, config, dtype=torch.float32)
    formats = CacheFormats(latent="fp32", index_key="fp32")
    return Whole(config=config, weights=weights, dtype=torch.float32, formats=formats)


def rows_against(
    whole: Whole, tokens: torch.Tensor, expected: Observation, step_tokens: int, mesh: Mesh, *, replay: bool = False
) -> list[Row]:
    """A prompt over the mesh, compared with what someone else saw of it."""
    job = Job(number=0, tokens=tokens)
    found = run_mesh(whole, [job], steps_of([job], step_tokens), mesh, record=expected.record, replay=replay)
    return compare(whole.config, expected, found[0])
