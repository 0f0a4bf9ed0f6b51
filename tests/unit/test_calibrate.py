"""A calibration's samples against the work model, its profile, and the bytes that ranks send against the model's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from longprefill.comms.group import Group
from longprefill.comms.thread_group import run_ranks
from longprefill.kernels.backends import resolve
from longprefill.orchestrator.calibrate.command import CalibrateRequest, calibrate
from longprefill.orchestrator.calibrate.engine import EngineBench
from longprefill.orchestrator.calibrate.lone_group import LoneGroup
from longprefill.orchestrator.calibrate.reduced import rank_share, reduced
from longprefill.orchestrator.calibrate.samples import BenchSpec, TimedStep
from longprefill.orchestrator.calibrate.schedule import timed_steps
from longprefill.orchestrator.calibrate.stopwatch import Stopwatch
from longprefill.orchestrator.calibrate.tables import Point, step_points, tables
from longprefill.orchestrator.costs.profile import DeviceProfile, ProfileError
from longprefill.orchestrator.costs.profile_file import read_profile, write_profile
from longprefill.orchestrator.costs.rates import Rates
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.errors import UserError
from longprefill.partition.generators import generate
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.partition.operations import Operation
from longprefill.partition.steps import plan_steps
from longprefill.partition.traffic import step_traffic
from longprefill.workers.cache.pages import CacheFormats, CachePool, cache_kinds, pool_bytes
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import config_from
from longprefill.workers.model.initial import initial_parameter
from longprefill.workers.model.model import Model
from longprefill.workers.model.parameters import parameter_shapes
from longprefill.workers.model.sharding import MeshPlace
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.weights import parameter_dtype
from longprefill.workers.prefill import PrefillRank, StepPlan
from longprefill.workers.trace import Tracer

FAMILIES = ("longprefill_hybrid", "kimi_linear", "deepseek_v32", "glm_moe_dsa", "glm5_next")
SETTINGS = ClusterSettings(model_dir="", dtype="bf16")
STEPS = (
    TimedStep(start=0, tokens=128),
    TimedStep(start=512, tokens=256),
    TimedStep(start=512, tokens=256, rank=0, num_ranks=2),
    TimedStep(start=512, tokens=256, rank=1, num_ranks=2),
    TimedStep(start=512, tokens=256, rank=2, num_ranks=3, layout="contiguous"),
)
OPS = {"kda_halo": "halo", "kda_summaries": "kda_states", "cache_rows": "cache_rows", "boundary_state": "boundary"}


def tiny(family: str) -> ModelConfig:
    return config_from(RAW_CONFIGS[family, "tiny"])


def bench_of(config: ModelConfig, longest: int = 1024) -> EngineBench:
    spec = BenchSpec(config=config, dtype="bf16", latent_format="bf16", index_format="bf16", max_tokens=longest)
    return EngineBench(spec)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_runs_what_the_work_model_counts(family: str) -> None:
    """Alone in any mesh: operation by operation, fragment by fragment (`step_points` refuses another number)."""
    bench = bench_of(tiny(family))
    shape = model_shape(bench.config, SETTINGS)
    for step in STEPS:
        sample = bench.step(step)
        names = {point.operation.name for point in step_points(step, sample, shape, 1)}
        assert names >= {"norms", "embed"}
        if step.rank == 1 and family in ("longprefill_hybrid", "kimi_linear", "glm5_next"):
            assert "kda.summary" in names
        assert sample.outside_s > 0
        assert sample.boundary_s > 0
        for layer in sample.layers:
            assert all(seconds >= 0 for laps in layer.values() for seconds in laps)


def test_rows_that_see_few_keys_are_not_indexed() -> None:
    """A fragment before top-k, one in which it begins, one behind it."""
    config = config_from(RAW_CONFIGS["longprefill_hybrid", "tiny"] | {"index_topk": 192})
    bench = bench_of(config)
    shape = model_shape(bench.config, SETTINGS)
    for tokens, num_indexed in ((256, 0), (512, 1), (1024, 1)):
        step = TimedStep(start=0, tokens=tokens)
        sample = bench.step(step)
        assert len(sample.layers[-1].get("indexer", ())) == 1 + (tokens > 256)
        points = [point for point in step_points(step, sample, shape, 1) if point.operation.name == "indexer"]
        assert len(points) == num_indexed


def test_measured_points_come_back_exactly_from_the_file(tmp_path: Path) -> None:
    bench = bench_of(tiny("longprefill_hybrid"))
    shape = model_shape(bench.config, SETTINGS)
    step = STEPS[1]
    points = step_points(step, bench.step(step), shape, 2)
    write_profile(tmp_path / "here.json", DeviceProfile(name="here", source="test", tables=tables(points)))
    rates = Rates(read_profile(tmp_path / "here.json"), 2)
    once = {(point.operation, point.shape) for point in points}
    for operation, key in once:
        same = sorted(point.seconds for point in points if (point.operation, point.shape) == (operation, key))
        assert same[0] <= rates.seconds(operation, key) <= same[-1]
    assert set(rates.coverage) == {"exact"}


def test_a_shape_that_was_not_measured_is_an_error(tmp_path: Path) -> None:
    bench = bench_of(tiny("longprefill_hybrid"))
    shape = model_shape(bench.config, SETTINGS)
    points = step_points(STEPS[1], bench.step(STEPS[1]), shape, 1)
    rates = Rates(DeviceProfile(name="here", source="test", tables=tables(points)), 1)
    point = next(point for point in points if point.operation.name == "kda.project")
    other = tuple(sorted({**dict(point.shape), "hidden": 4711}.items()))
    with pytest.raises(ProfileError, match=r"kda.project.*4711.*bench --calibrate"):
        rates.seconds(point.operation, other)


def test_a_table_is_the_median_of_its_samples_and_tells_the_spread() -> None:
    operation = Operation("ffn.dense", 64, 0, 1, 1000, 10)
    points = [Point(operation, (("hidden", 8),), 1, seconds) for seconds in (3.0, 1.0, 2.0)]
    points.append(Point(operation, (("hidden", 8),), 2, 5.0))
    alone, beside = tables(points)
    assert alone.points == ((64.0, 1000.0, 2.0),)
    assert (alone.copies, alone.spread) == (1, 1.0)
    assert (beside.copies, beside.points) == (2, ((64.0, 1000.0, 5.0),))


def test_every_moment_is_counted_once() -> None:
    times = iter(range(100))
    watch = Stopwatch(lambda: float(next(times)))
    with watch.span("layer", layer=3):
        with watch.span("a"):
            pass
        with watch.span("b"), watch.span("c"):
            pass
    laps = watch.take_laps()
    assert [(lap.name, lap.layer, lap.seconds) for lap in laps] == [
        ("a", 3, 1),
        ("c", 3, 1),
        ("b", 3, 2),
        ("layer", 3, 3),
    ]
    assert sum(lap.seconds for lap in laps) == 7  # from the first reading of the clock to the last
    assert watch.take_laps() == []


def test_a_lone_rank_gets_whole_tensors() -> None:
    group = LoneGroup(1, 3)
    rows_B = torch.tensor([7, 9], dtype=torch.uint8)
    assert group.all_gather_rows(rows_B, [3, 2, 1], op="rows").tolist() == [7, 9, 7, 7, 9, 7]
    states = group.all_gather_rows(torch.ones(2), [1, 2, 0], op="states")
    assert states.tolist() == [0, 1, 1]
    received = group.exchange({0: torch.ones(1, 2)}, {2: (2, 2)}, dtype=torch.float32, op="halo")
    assert received[2].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_share_has_the_shapes_of_a_rank(family: str) -> None:
    config = tiny(family)
    place = MeshPlace(num_cp=1, num_tp=2, cp_rank=0, tp_rank=0, expert_parallel=False)
    assert model_shape(rank_share(config, 2), SETTINGS) == model_shape(config, SETTINGS, place)
    assert rank_share(config, 1) == config


@pytest.mark.parametrize("longest", [1024, 8192, 69_632, 1 << 20])
def test_steps_stay_inside_and_meet_both_kinds_of_rank(longest: int) -> None:
    steps = timed_steps(tiny("longprefill_hybrid"), longest)
    assert all(step.start >= 0 and step.start + step.tokens <= longest for step in steps)
    assert all(step.start % PAGE_TOKENS == 0 for step in steps)
    assert {step.num_ranks for step in steps} == {1, 2}
    assert {step.is_on_grid for step in steps if step.start} == {True, False}


def test_reduced_keeps_one_layer_of_a_kind() -> None:
    config = tiny("longprefill_hybrid")
    kinds = reduced(config).layers
    assert len(set(kinds)) == len(kinds) < len(config.layers)
    assert set(kinds) == set(config.layers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"file": Path("x.toml")}, "name the file .json"),
        ({"longest_tokens": 100}, "--longest 100: use 1088 tokens or more"),
        ({"models": (Path("wide"),), "longest_tokens": 2048}, "--longest 2048: use 2624 tokens or more"),
        ({"budget_s": 0.0}, "--seconds 0: use 1 to 86400"),
        ({"dtype": "int8"}, "--dtype 'int8'"),
        ({"tp": 3}, "does not divide"),
        ({"models": (Path("/nowhere"),)}, "/nowhere"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], words: str
) -> None:
    (tmp_path / "wide").mkdir()
    raw = RAW_CONFIGS["deepseek_v32", "tiny"] | {"index_topk": 2048}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(raw))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        calibrate(CalibrateRequest(**{"file": Path("x.json")} | change))  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize(
    ("family", "cp", "tokens", "step_tokens", "layout"),
    [
        ("longprefill_hybrid", 2, 700, 256, "zigzag"),
        ("longprefill_hybrid", 3, 321, 192, "contiguous"),
        ("glm5_next", 2, 333, 64, "zigzag"),
        ("glm5_next", 4, 513, 512, "zigzag"),
        ("kimi_linear", 2, 1, 64, "zigzag"),
        ("deepseek_v32", 3, 450, 128, "zigzag"),
    ],
)
def test_counted_bytes_are_what_ranks_send(family: str, cp: int, tokens: int, step_tokens: int, layout: str) -> None:
    config = tiny(family)
    weights = {
        name: initial_parameter(name, shape, config, 0).to(parameter_dtype(name, torch.bfloat16))
        for name, shape in parameter_shapes(config).items()
    }
    model = Model(config, weights)
    num_pages = -(-tokens // PAGE_TOKENS)
    kinds = cache_kinds(config, CacheFormats(latent="bf16", index_key="bf16"))
    prompt_T = torch.arange(tokens) % config.vocab_size
    slices = [(Slice(job=0, start=step.start, end=step.end),) for step in plan_steps(tokens, step_tokens)]

    def on_rank(group: Group) -> Counter[str]:
        pool = CachePool(torch.zeros(pool_bytes(kinds, num_pages), dtype=torch.uint8), kinds, num_pages)
        rank = PrefillRank(model, group, pool, resolve("cpu"), dtype=torch.bfloat16, tracer=Tracer(False))
        rank.open_job(0, prompt_T, tuple(range(num_pages)))
        for part in slices:
            rank.run_step(StepPlan(slices=part, layout=layout, exchange="all_gather", logits_of=()))  # pyright: ignore[reportArgumentType]
        return Counter({OPS[op]: count.bytes for op, count in group.ledger.ops.items() if op in OPS})

    sent = sum(run_ranks(cp, on_rank, timeout_s=60.0), Counter())
    shape = model_shape(config, SETTINGS)
    counted: Counter[str] = Counter()
    for part in slices:
        for op, ranks in step_traffic(generate(layout, part, cp), shape).items():  # pyright: ignore[reportArgumentType]
            counted[op] += sum(rank.sent_bytes for rank in ranks)
    assert sent == +counted
