"""Rates, links, steps and prompts of the cost model; profiles as files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.orchestrator.costs import prompt as prompts
from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.profile import DeviceProfile, Link, Overheads, ProfileError, Rate, Table
from longprefill.orchestrator.costs.profile_file import (
    find_profile,
    profile_from,
    read_profile,
    shipped_profiles,
    write_profile,
)
from longprefill.orchestrator.costs.prompt import prompt_time
from longprefill.orchestrator.costs.rates import LinkRates, Rates
from longprefill.orchestrator.costs.step import StepCosts, StepOptions
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.outputs import writing
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.planner.models import find_model, shipped_models
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.layout import Slice
from longprefill.partition.operations import Operation
from longprefill.partition.shapes import ModelShape
from longprefill.workers.model.config import MoeConfig
from longprefill.workers.model.sharding import MeshPlace

SHAPE = (("hidden", 64), ("num_heads", 4))


def profile(*tables: Table, **fields: object) -> DeviceProfile:
    return DeviceProfile(name="p", source="test", tables=tables, **fields)  # pyright: ignore[reportArgumentType]


def table(*points: tuple[float, ...], axes: tuple[str, ...] = ("rows",), **fields: object) -> Table:
    return Table(op="kda.scan", shape={"hidden": 64}, axes=axes, points=points, **fields)  # pyright: ignore[reportArgumentType]


def scan(rows: int, flops: int, keys: int = 0, parts: int = 1) -> Operation:
    return Operation("kda.scan", rows, keys, parts, flops, 0)


def test_measured_points_are_kept_exactly() -> None:
    rates = Rates(profile(table((100, 1000.0, 0.123456789), (200, 2000.0, 0.2))))
    assert rates.seconds(scan(100, 1000), SHAPE) == 0.123456789
    assert rates.seconds(scan(200, 2000), SHAPE) == 0.2
    assert rates.coverage == {"exact": 0.323456789}


def test_between_points_utilisation_is_interpolated() -> None:
    """Half-way in the logarithm of the rows: the mean of the two rates, not of the two times."""
    rates = Rates(profile(table((100, 1000.0, 1.0), (400, 4000.0, 1.0))))
    assert rates.seconds(scan(200, 2000), SHAPE) == pytest.approx(2000 / 2500)
    assert set(rates.coverage) == {"between"}


def test_beyond_the_points() -> None:
    rates = Rates(profile(table((100, 1000.0, 1.0), (200, 2000.0, 1.0))))
    assert rates.seconds(scan(800, 8000), SHAPE) == pytest.approx(4.0)  # the last rate stays
    assert rates.seconds(scan(50, 500), SHAPE) == pytest.approx(1.0)  # a time that did not fall does not fall
    flat = Rates(profile(table((100, 1000.0, 1.0), (200, 2000.0, 2.0))))
    assert flat.seconds(scan(50, 500), SHAPE) == pytest.approx(0.5)
    assert set(rates.coverage) == set(flat.coverage) == {"beyond"}


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_two_axes_stay_within_the_measured_rates(rows: int, keys: int) -> None:
    points = [(r, k, float(r * k), r * k / rate) for r, k, rate in
              ((64, 64, 10.0), (64, 1024, 30.0), (512, 64, 20.0), (512, 1024, 40.0), (512, 4096, 50.0))]  # fmt: skip
    rates = Rates(profile(table(*points, axes=("rows", "keys"))))
    seconds = rates.seconds(scan(rows, rows * keys, keys), SHAPE)
    assert seconds >= rows * keys / 50.0 * (1 - 1e-9)
    if rows >= 64 and keys >= 64:
        assert seconds <= rows * keys / 10.0 * (1 + 1e-9)


def test_the_table_that_says_most_counts_then_the_copies_below() -> None:
    wide = Table(op="scan", shape={}, axes=("rows",), points=((100, 1000.0, 9.0),))
    one, two = table((100, 1000.0, 1.0)), table((100, 1000.0, 2.0), copies=2)
    four = table((100, 1000.0, 4.0), copies=4)
    assert Rates(profile(wide, one, two, four)).seconds(scan(100, 1000), SHAPE) == 1.0
    assert Rates(profile(wide, one, two, four), copies=3).seconds(scan(100, 1000), SHAPE) == 2.0
    assert Rates(profile(four), copies=1).seconds(scan(100, 1000), SHAPE) == 4.0
    assert Rates(profile(wide, one)).seconds(scan(100, 1000), (("hidden", 32),)) == 9.0


def test_a_missing_rate_says_what_is_missing() -> None:
    with pytest.raises(ProfileError, match=r"does not say how fast kda.scan is \(hidden=32\).*rates.scan.*--calibrate"):
        Rates(profile(table((1, 1.0, 1.0)))).seconds(scan(1, 1), (("hidden", 32),))
    with pytest.raises(ProfileError, match=r"no link of pattern send and scope network.*gb_per_s"):
        LinkRates((), "p").seconds("send", "network", ranks=2, num_bytes=5)


def test_a_rate_is_a_roofline_with_a_chain() -> None:
    rate = Rate(flops_per_s=1e12, efficiency=0.5, memory_efficiency=0.5, call_s=1.0, chain_s=0.25)
    rates = Rates(profile(rates={"scan": rate}, memory_bytes_per_s=1e9))
    by_flops = Operation("kda.scan", 8, 0, 2, 10**12, 10)
    by_bytes = Operation("kda.scan", 8, 0, 2, 10, 10**9)
    assert rates.seconds(by_flops, ()) == pytest.approx(1.0 + 4 * 0.25 + 2.0)
    assert rates.seconds(by_bytes, ()) == pytest.approx(1.0 + 4 * 0.25 + 2.0)
    assert rates.seconds(Operation("kda.scan", 0, 0, 0, 0, 0), ()) == 0.0


def test_links() -> None:
    formula = Link(pattern="any", scope="node", latency_s=1.0, message_s=0.5, bytes_per_s=10.0)
    measured = Link(pattern="all_gather", scope="node", ranks=4, points=((10, 1.0), (1000, 10.0)))
    other = replace(measured, ranks=16, points=((10, 7.0),))
    links = LinkRates((formula, measured, other), "p")
    assert links.seconds("send", "node", ranks=5, num_bytes=20, messages=4) == 3.0 + 2.0 + 2.0
    assert links.seconds("all_gather", "node", ranks=4, num_bytes=10) == 1.0
    assert links.seconds("all_gather", "node", ranks=3, num_bytes=1) == 1.0  # nothing is faster than the smallest
    assert links.seconds("all_gather", "node", ranks=4, num_bytes=5000) == 50.0
    assert links.seconds("all_gather", "node", ranks=4, num_bytes=100) == pytest.approx(100 / 55)
    assert links.seconds("all_gather", "node", ranks=12, num_bytes=10) == 7.0
    assert links.seconds("all_gather", "node", ranks=1, num_bytes=10) == 0.0


def shape_of(model: str, *, cp: int = 1, tp: int = 1, expert_parallel: bool = False) -> ModelShape:
    place = MeshPlace.of(0, num_cp=cp, num_tp=tp, expert_parallel=expert_parallel)
    return model_shape(find_model(model), ClusterSettings(model_dir=model), place)


def costs(model: str, cp: int, *, per_node: int = 8, **options: object) -> StepCosts:
    placement = Placement(cp=cp, tp=1, cp_per_node=min(cp, per_node), profiles=(find_profile("example"),))
    return StepCosts(shape_of(model), placement, StepOptions(**options))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("model", shipped_models())
@pytest.mark.parametrize("exchange", ["all_gather", "head_transposed", "relay"])
@pytest.mark.parametrize("cp", [1, 2, 5, 24])
def test_parts_sum_to_the_step(model: str, exchange: str, cp: int) -> None:
    time = costs(model, cp, exchange=exchange).step([Slice(job=0, start=4096, end=70_000)], "zigzag", num_ending=1)
    assert sum(time.parts.values()) == pytest.approx(time.seconds, rel=1e-9)
    assert time.max_work_s + time.waiting_s + time.exposed_s + time.host_s == pytest.approx(time.seconds, rel=1e-9)
    assert 0 < time.mean_work_s <= time.max_work_s * (1 + 1e-12)
    assert time.waiting_s >= -1e-12
    assert min(time.parts.values()) > 0


def test_more_ranks_than_pages_and_several_jobs() -> None:
    slices = [Slice(job=job, start=0, end=100 * (job + 1)) for job in range(3)]
    alone = costs("glm_flash", 1).step(slices, "zigzag", num_ending=3)
    many = costs("glm_flash", 16).step(slices, "zigzag", num_ending=3)
    assert many.waiting_s > alone.waiting_s == pytest.approx(0, abs=1e-12)
    assert many.max_work_s < alone.max_work_s
    relayed = costs("glm_flash", 2, exchange="relay").step(
        [Slice(job=job, start=0, end=4000) for job in range(32)], "zigzag", num_ending=32
    )
    assert min(relayed.parts.values()) > 0


def test_the_gather_is_hidden_behind_the_query_side() -> None:
    slow = replace(
        find_profile("example"), links=(Link(pattern="any", scope="node", bytes_per_s=2e9),), overheads=Overheads()
    )
    shape = shape_of("deepseek_v32")
    piece = [Slice(job=0, start=0, end=32768)]
    exposed: list[float] = []
    for overlap in (0.0, 0.5, 1.0):
        device = replace(slow, overheads=Overheads(overlap=overlap))
        placement = Placement(cp=4, tp=1, cp_per_node=4, profiles=(device,))
        exposed.append(StepCosts(shape, placement).step(piece, "zigzag").parts["cache rows"])
    assert exposed[0] > exposed[1] > exposed[2] > 0
    assert exposed[0] - exposed[1] == pytest.approx(exposed[1] - exposed[2])


def test_slow_machines_hold_up_the_others() -> None:
    fast = find_profile("example")
    slow = replace(fast, name="slow", rates={name: replace(rate, efficiency=rate.efficiency / 2) if rate.flops_per_s
                                             else rate for name, rate in fast.rates.items()})  # fmt: skip
    piece = [Slice(job=0, start=0, end=65536)]
    shape = shape_of("kimi_linear")

    def seconds(*profiles: DeviceProfile) -> float:
        return StepCosts(shape, Placement(cp=4, tp=1, cp_per_node=2, profiles=profiles)).step(piece, "zigzag").seconds

    assert seconds(fast) < seconds(fast, fast, fast, slow)
    assert seconds(fast, fast, fast, slow) == pytest.approx(seconds(slow), rel=0.05)


def test_states_cost_what_their_exchange_says() -> None:
    piece = [Slice(job=0, start=0, end=1 << 18)]
    seconds = {name: costs("glm_flash", 64, exchange=name).step(piece, "zigzag")
               for name in ("all_gather", "head_transposed", "relay")}  # fmt: skip
    assert seconds["all_gather"].parts["kda states"] > 10 * seconds["head_transposed"].parts["kda states"]
    assert "kda states" not in seconds["relay"].parts
    assert "kda summaries" not in seconds["relay"].parts
    assert seconds["relay"].waiting_s > seconds["head_transposed"].waiting_s


def test_many_steps_are_summed_by_few(monkeypatch: pytest.MonkeyPatch) -> None:
    model = costs("kimi_linear", 4)
    few = prompt_time(model, 300_001, 4096, "zigzag", start=777)
    monkeypatch.setattr(prompts, "MOST_STEPS", 10**6)
    every = prompt_time(model, 300_001, 4096, "zigzag", start=777)
    assert few.num_steps == every.num_steps == 74
    assert few.seconds == pytest.approx(every.seconds, rel=1e-4)
    assert sum(few.parts.values()) == pytest.approx(few.seconds)


def test_shapes_at_a_place() -> None:
    whole, part = shape_of("glm_flash"), shape_of("glm_flash", cp=4, tp=8, expert_parallel=True)
    assert whole.hyper_streams == part.hyper_streams == 4
    assert part.vocab_size * 8 >= whole.vocab_size > part.vocab_size * 7
    config = find_model("glm_flash").layers[10].ffn
    assert isinstance(config, MoeConfig)
    moe = part.layers[10].ffn
    assert (moe.held_experts, moe.num_experts) == (-(-config.num_experts // 32), config.num_experts)  # type: ignore[union-attr]
    assert part.layers[0].mixer.num_heads * 8 == whole.layers[0].mixer.num_heads


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_plan_every_shipped_model(name: str) -> None:
    for model in shipped_models():
        placement = Placement(cp=16, tp=1, cp_per_node=8, profiles=(find_profile(name),))
        time = StepCosts(shape_of(model), placement).step([Slice(job=0, start=0, end=32768)], "zigzag", num_ending=1)
        assert time.seconds > 0


@pytest.mark.parametrize("name", shipped_profiles())
def test_profiles_survive_a_file(name: str, tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", find_profile(name))
    assert read_profile(tmp_path / "p.json") == find_profile(name)
    with pytest.raises(RunFailed, match=r"--calibrate .* could not be written"), writing("--calibrate", tmp_path):
        write_profile(tmp_path, find_profile(name))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "need a table of fields"),
        ('{"name": "p"}', "missing 1 required keyword-only argument: 'source'"),
        ('{"name": 3, "source": "s"}', "name=3: need a word"),
        ('{"name": "", "source": "s"}', "name is empty"),
        ('{BASE, "colour": 1}', "colour is unknown: use .*memory_bytes"),
        ('{BASE, "memory_gib": -1}', "memory_bytes=-1073741824: use a positive"),
        ('{BASE, "memory_gib": "x"}', "need a whole number"),
        ('{BASE, "memory_gib": 1, "memory_bytes": 1}', "given twice"),
        ('{BASE, "rates": {"gem": {}}}', r"rates.gem\] is unknown: use gemm"),
        ('{BASE, "rates": {"gemm": {}}}', "flops_per_s"),
        ('{BASE, "rates": {"gemm": {"flops_per_s": 1, "efficiency": 2}}}', "efficiency=2"),
        ('{BASE, "rates": {"gemm": {"flops_per_s": NaN}}}', "flops_per_s=nan"),
        ('{BASE, "tables": [{"op": "x"}]}', "op='x' is unknown: use embed"),
        ('{BASE, "tables": [{"op": "head", "axes": ["tokens"]}]}', "use a list of rows, keys"),
        ('{BASE, "tables": [{"op": "head", "shape": {}, "points": []}]}', "needs points"),
        ('{BASE, "tables": [{"op": "head", "shape": {}, "points": [[1, 2]]}]}', "rows, work"),
        ('{BASE, "tables": [{"op": "head", "shape": {}, "points": [[1, 2, 0]]}]}', "seconds above"),
        ('{BASE, "tables": [{"op": "head", "shape": {}, "points": [[1, "2", 3]]}]}', "of numbers"),
        ('{BASE, "links": [{"pattern": "all", "scope": "node"}]}', "pattern='all': use all_gather"),
        ('{BASE, "links": [{"pattern": "any", "scope": "rack"}]}', "scope='rack': use node"),
        ('{BASE, "links": [{"pattern": "any", "scope": "node"}]}', "either bytes_per_s"),
        ('{BASE, "links": [{"pattern": "any", "scope": "node", "points": [[2, 1], [1, 1]]}]}', "ascend"),
        ('{BASE, "overheads": {"overlap": 1.5}}', "overlap=1.5"),
        ("{", "not valid JSON"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_named(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(content.replace("BASE", '"name": "p", "source": "s"'))
    with pytest.raises(ProfileError, match=words) as raised:
        read_profile(path)
    assert str(path) in str(raised.value)


def test_an_unknown_device_lists_those_that_are_known() -> None:
    with pytest.raises(ProfileError, match=r"'h900' is not known: use b200, example, h100, h200, or a profile's FILE"):
        find_profile("h900")
    assert profile_from({"name": "p", "source": "s", "memory_gb_per_s": 3}).memory_bytes_per_s == 3e9
