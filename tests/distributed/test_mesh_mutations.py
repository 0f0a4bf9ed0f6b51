"""Faults of tensor and expert parallelism, and of any one layer: each turns the comparison red, and the comparison
names the layer and the sub-block where it is.

Every case runs without its fault first, so that red means the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longprefill.comms.group import Group
from longprefill.orchestrator.align.compare import compare, first_deviation
from longprefill.partition.layout import Fragment, Slice
from longprefill.partition.shards import RowShards
from longprefill.workers.cache import states
from longprefill.workers.model.layers import feed_forward
from longprefill.workers.model.layers.context import StepContext
from longprefill.workers.model.layers.feed_forward import DenseLayer, MoeLayer
from longprefill.workers.prefill import PrefillRank
from longprefill.workers.probe import ProbeEntry, assemble

from .engine_support import WHOLE, Job, prompt, steps_of
from .mesh_faults import FAULTS, LENGTH, MESH, WHOLE_MODEL, Fault, OnlyIn, shifted_start, wrap
from .mesh_support import Mesh, assert_agrees, mesh_config, one_rank, rows_of, run_mesh, whole_model
from .quantized_faults import QUANTIZED, QUANTIZED_FAULTS


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_is_found_in_its_layer(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault.deviation() is None
    fault.apply(OnlyIn(monkeypatch, fault.layer))
    deviation = fault.deviation()
    assert deviation is not None, "the fault changes nothing"
    assert deviation.startswith(f"{fault.place}: "), deviation


@pytest.fixture(scope="module")
def sound_rows() -> None:
    """The quantized model without a fault."""
    assert_agrees(rows_of(QUANTIZED, [LENGTH], WHOLE, Mesh(cp=2)))


@pytest.mark.usefixtures("sound_rows")
@pytest.mark.parametrize("fault", QUANTIZED_FAULTS.values(), ids=list(QUANTIZED_FAULTS))
def test_a_fault_of_quantized_rows_is_found_in_its_layer(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.apply(OnlyIn(monkeypatch, fault.layer))
    deviation = fault.deviation()
    assert deviation is not None, "the fault changes nothing"
    assert deviation.startswith(f"{fault.place}: "), deviation


@pytest.mark.parametrize("fault", ["floor scale", "keys read with other scales", "latents rounded toward zero"])
def test_one_rank_with_the_same_fault_hides_nothing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of one rank with the same fault grow by the same, so growth alone would accept both."""
    case = QUANTIZED_FAULTS[fault]
    job = Job(number=0, tokens=prompt(LENGTH, 0, QUANTIZED.config.vocab_size))
    expected = one_rank(QUANTIZED.exact, LENGTH)
    case.apply(OnlyIn(monkeypatch, case.layer))
    base, found = (
        run_mesh(QUANTIZED, [job], steps_of([job], WHOLE), mesh, record=expected.record)[0]
        for mesh in (Mesh(), case.mesh)
    )
    deviation = first_deviation(compare(QUANTIZED.config, expected, found, base=base))
    assert deviation is not None
    assert deviation.startswith(f"{case.place}: "), deviation


@pytest.mark.parametrize("is_sound", [True, False], ids=["sound", "floor scale"])
@pytest.mark.parametrize("pool", [1, 4])
def test_quantized_rows_of_a_job_that_resumed(
    pool: int, is_sound: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the rows behind the snapshot are encoded again; it ends inside a page and inside a pool."""
    whole = whole_model(mesh_config(index_kpool=pool), latent="fp8", index_key="mxfp8", seed=3)
    job = Job(number=0, tokens=prompt(LENGTH, 0, whole.config.vocab_size))
    steps = [[Slice(job=0, start=0, end=134)]]
    record = one_rank(whole.exact, LENGTH).record
    run_mesh(whole, [job], steps, Mesh(tp=2), record=record, export_to=tmp_path)
    if not is_sound:
        QUANTIZED_FAULTS["floor scale in the last layer"].apply(OnlyIn(monkeypatch, 3))
    resumed: dict[str, Any] = {"snapshots": [tmp_path / "0.safetensors"], "starts": {0: 134}}
    rows = rows_of(whole, [LENGTH], 128, Mesh(cp=3), **resumed)
    (codes,) = [row for row in rows if row.place == "layer 3 (dsa) index key codes"]
    assert codes.compared == LENGTH // pool - 134 // pool
    deviation = first_deviation(rows)
    if is_sound:
        assert deviation is None
    else:
        assert deviation is not None
        assert deviation.startswith("layer 3 (dsa) index key codes: "), deviation


def test_partial_sums_of_a_dense_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(layer: DenseLayer, x_SD: torch.Tensor, ctx: StepContext) -> torch.Tensor:
            return 2 * forward(layer, x_SD, ctx) if ctx.mesh.tp.rank else forward(layer, x_SD, ctx)

        return broken

    wrap(monkeypatch, DenseLayer, "forward", make)
    deviation = first_deviation(rows_of(WHOLE_MODEL, [LENGTH], WHOLE, MESH))
    assert deviation is not None
    assert deviation.startswith("layer 0 (kda) feed-forward output: ")


@pytest.mark.parametrize("shared", [True, False], ids=["shared expert", "routed experts"])
def test_experts_left_out(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if shared:
        columns = (15, 16)  # of a rank's shared expert; no dense layer has as few

        def without(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            return lambda x, gate_up, *args, **options: (
                run(x, gate_up, *args, **options) * (0 if len(gate_up) // 2 in columns else 1)
            )

        wrap(monkeypatch, feed_forward, "gated_mlp", without)
    else:
        wrap(monkeypatch, MoeLayer, "_experts", lambda run: lambda *args: torch.zeros_like(run(*args)))
    deviation = first_deviation(rows_of(WHOLE_MODEL, [LENGTH], WHOLE, MESH))
    assert deviation is not None
    assert deviation.startswith("layer 1 (dsa) feed-forward output: ")


def test_a_doubled_prefix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no keys behind a query, so the kernel itself refuses."""
    shifted_start(lambda start: 2 * start)(OnlyIn(monkeypatch, 1))
    with pytest.raises(ValueError, match="write the keys first"):
        rows_of(WHOLE_MODEL, [LENGTH], WHOLE, MESH)


def test_a_row_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is one row too long, as padding to a multiple of the ranks would make it."""

    def make(cut: Callable[..., list[Fragment]]) -> Callable[..., list[Fragment]]:
        def broken(shards: RowShards, cp_rank: int, tp_rank: int) -> list[Fragment]:
            runs = cut(shards, cp_rank, tp_rank)
            return [replace(run, length=run.length + 1) for run in runs[:1]] + runs[1:]

        return broken

    wrap(monkeypatch, RowShards, "_cut", make)
    with pytest.raises(ValueError, match="rows"):
        rows_of(WHOLE_MODEL, [LENGTH], WHOLE, Mesh(cp=2, tp=2))


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((0, 3, 6), None),
        ((6, 0, 3), None),
        ((0, 3, 5), r"layer 4 mixer input: position 5 is computed twice \(rows of 3 end at 6, the next begin at 5\)"),
        ((0, 0, 3), r"position 0 is computed twice"),
        ((0, 4, 7), r"position 3 is missing \(rows of 0 end at 3, the next begin at 4\)"),
    ],
)
def test_every_position_once(starts: tuple[int, ...], message: str | None) -> None:
    entries = [
        ProbeEntry(4, "mixer input", 0, start, np.arange(start, start + 3, dtype=np.float32)[:, None])
        for start in starts
    ]
    if message is None:
        assert assemble(entries)[4, "mixer input"][:, 0].tolist() == list(range(9))
        return
    with pytest.raises(ValueError, match=message):
        assemble(entries)


def test_state_heads_swapped_between_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A resumed job's heads go to the wrong rank of the TP group."""
    job = Job(number=0, tokens=prompt(LENGTH, 0, WHOLE_MODEL.config.vocab_size))
    steps = [[Slice(job=0, start=0, end=128)]]
    run_mesh(WHOLE_MODEL, [job], steps, Mesh(tp=2), record=one_rank(WHOLE_MODEL, LENGTH).record, export_to=tmp_path)
    resume: dict[str, Any] = {"snapshots": [tmp_path / "0.safetensors"], "starts": {0: 128}}
    assert_agrees(rows_of(WHOLE_MODEL, [LENGTH], WHOLE, Mesh(tp=2), **resume))

    def swapped(rank: PrefillRank, whole: states.BoundaryState) -> states.BoundaryState:
        return states.shard_state(whole, rank.full_config, 1 - rank.mesh.tp.rank, 2)

    monkeypatch.setattr(PrefillRank, "share_of", swapped)
    deviation = first_deviation(rows_of(WHOLE_MODEL, [LENGTH], WHOLE, Mesh(tp=2), **resume))
    assert deviation is not None
    assert deviation.startswith("layer 0 (kda) state: ")


def test_merged_heads_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(merge: Callable[..., Any]) -> Callable[..., Any]:
        return lambda parts, config: merge(parts[::-1], config)

    from longprefill.workers import prefill

    wrap(monkeypatch, prefill, "merge_states", make)
    deviation = first_deviation(rows_of(WHOLE_MODEL, [LENGTH], WHOLE, Mesh(tp=2)))
    assert deviation is not None
    assert deviation.startswith("layer 0 (kda) conv: ")


def test_logits_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabulary parts of the TP ranks change places."""

    def make(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(group: Group, local: torch.Tensor, counts: Any, *, op: str) -> torch.Tensor:
            gathered = gather(group, local, counts, op=op)
            return torch.cat(gathered.split(list(counts))[::-1]) if op == "logits" else gathered

        return broken

    wrap(monkeypatch, Group, "all_gather_rows", make)
    deviation = first_deviation(rows_of(WHOLE_MODEL, [LENGTH], WHOLE, Mesh(tp=2)))
    assert deviation is not None
    assert deviation.startswith("logits: ")
