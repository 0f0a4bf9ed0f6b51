"""The simulator: the clock, replays that add up, files that repeat byte for byte, costs, clusters and charts."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from longprefill.orchestrator.costs.profile import ProfileError
from longprefill.orchestrator.costs.step import StepCosts
from longprefill.orchestrator.scheduler.jobs import Mesh
from longprefill.orchestrator.scheduler.settings import FleetSettings, SchedulerSettings
from longprefill.orchestrator.simulate_command import SimulateRequest, simulate
from longprefill.orchestrator.simulator.cluster import (
    Cluster,
    ClusterError,
    CostSettings,
    DecodeSettings,
    FailureSettings,
    PrefixSettings,
    read_cluster,
)
from longprefill.orchestrator.simulator.costs import QuadraticCosts
from longprefill.orchestrator.simulator.engine import Event, Timed, run
from longprefill.orchestrator.simulator.generate import TraceRecipe, generate_trace
from longprefill.orchestrator.simulator.load import offered_load, prepare
from longprefill.orchestrator.simulator.metrics import decision_p99_s, metrics
from longprefill.orchestrator.simulator.pipeline import even_stages, pipeline_time
from longprefill.orchestrator.simulator.plots.chart import Chart, Line
from longprefill.orchestrator.simulator.plots.font import GLYPHS
from longprefill.orchestrator.simulator.plots.png import png
from longprefill.orchestrator.simulator.plots.svg import svg
from longprefill.orchestrator.simulator.replay import replay
from longprefill.orchestrator.simulator.subject import Subject, counted_costs, subject_of
from longprefill.orchestrator.simulator.sweep import sensitivity, strong_scaling, weak_scaling
from longprefill.orchestrator.simulator.trace import Request, TraceError, write_trace
from longprefill.partition.layout import Slice

RATE = CostSettings(work_per_s=1e6)
BUSY = Cluster(
    seed=4,
    fleet=FleetSettings(
        num_units=3, cache_bytes=1 << 30, token_bytes=1000, state_bytes=10**6, step_bytes=100, move_bytes_per_s=1e10
    ),
    scheduler=SchedulerSettings(step_target_s=0.05, max_degree=2, pack_tokens=3000),
    costs=RATE,
    decode=DecodeSettings(num_workers=2, slots_per_worker=3, token_s=0.001, handoff_bytes_per_s=1e9),
    prefix=PrefixSettings(capacity_bytes=10**9, state_share=0.3),
    failures=FailureSettings(unit_mtbf_s=0.3, repair_s=0.1, straggler_share=0.2, straggler_factor=3.0),
)
"""Everything at once: caches, decode workers, failures, stragglers, wide and packed steps."""


def requests(num: int = 60, seed: int = 1) -> tuple[Request, ...]:
    recipe = TraceRecipe(num_requests=num, seed=seed, requests_per_s=20, most_tokens=200_000, short_share=0.8)
    recipe = replace(recipe, burstiness=6.0, short_tokens=2000)
    return generate_trace(recipe)


class Note(Event[list]):
    def __init__(self, name: str, following: tuple[tuple[float, str], ...] = (), order: int = 0) -> None:
        self.name, self.following, self.order = name, following, order

    def happen(self, world: list, now: float):
        world.append((now, self.name))
        return [Timed(at_s, Note(name)) for at_s, name in self.following]


def test_events_happen_in_order_of_time_then_rank_then_announcement() -> None:
    seen: list = []
    first = [Timed(2.0, Note("d")), Timed(1.0, Note("b", order=1)), Timed(1.0, Note("a", ((1.0, "c"), (3.0, "e"))))]
    assert run(seen, first) == 3.0
    assert seen == [(1.0, "a"), (1.0, "c"), (1.0, "b"), (2.0, "d"), (3.0, "e")]


def test_an_event_before_its_cause_is_a_bug() -> None:
    with pytest.raises(ValueError, match="follows from an event at 2"):
        run([], [Timed(2.0, Note("late", ((1.0, "early"),)))])


def test_a_replay_by_hand() -> None:
    """Two jobs of 1 s and 0.1 s on one unit: first come, first served makes the short one wait."""
    trace = (Request(0.0, 1_000_000, 1, ()), Request(0.5, 100_000, 1, ()))
    costs = QuadraticCosts(work_per_s=1e6, scale_tokens=10**15)
    cluster = Cluster(scheduler=SchedulerSettings(policy="fcfs", step_tokens=65536), costs=RATE)
    first_come = metrics(replay(trace, cluster, lambda: costs), cluster)
    assert first_come.mean_ttft_s == pytest.approx((1.0 + 0.6) / 2)
    assert first_come.max_slowdown == pytest.approx(6.0)
    assert first_come.preemptions == 0
    assert first_come.utilisation == pytest.approx(1.0)
    assert first_come.mean_queue_wait_s == pytest.approx(0.25)
    short = replace(cluster, scheduler=replace(cluster.scheduler, policy="srpt"))
    other = metrics(replay(trace, short, lambda: costs), short)
    # the border of the eighth step, 8 x 65,536 tokens, is when the short job gets the unit
    assert other.mean_ttft_s == pytest.approx((1.1 + 0.524288 - 0.5 + 0.1) / 2)
    assert other.preemptions == 1


def test_everything_at_once_adds_up() -> None:
    trace = requests()
    result = replay(trace, BUSY, lambda: QuadraticCosts(work_per_s=4e5))
    assert result.failures
    assert result.lost_s > 0
    assert any(step.is_lost for step in result.steps)
    assert any(len(step.jobs) > 1 for step in result.steps)
    assert any(step.num_units > 1 for step in result.steps)
    assert sum(job.hit_tokens for job in result.jobs) > 0
    for job, request in zip(result.jobs, trace, strict=True):
        covered = job.hit_tokens
        for step in result.steps:
            if job.id in step.jobs and not step.is_lost:
                start, end = step.spans[step.jobs.index(job.id)]
                assert start == covered
                covered = end
        assert covered == request.input_tokens
        assert request.arrival_s <= job.first_step_s < job.prefilled_s < job.first_token_s
    row = metrics(result, BUSY)
    assert row.jobs == len(trace)
    assert row.estimate_error > 0
    assert 0 < row.hit_share <= row.page_hit_share


def test_without_a_second_failure_domain_work_is_lost() -> None:
    fragile = replace(BUSY, fleet=replace(BUSY.fleet, is_recoverable=False))
    lost = [replay(requests(), each, lambda: QuadraticCosts(work_per_s=4e5)).lost_s for each in (BUSY, fragile)]
    assert lost[1] > lost[0]


def test_a_full_decode_side_delays_first_tokens() -> None:
    trace = requests(20)
    slow = replace(BUSY, decode=DecodeSettings(num_workers=1, slots_per_worker=1, token_s=0.01))
    waits = [metrics(replay(trace, each, lambda: QuadraticCosts(work_per_s=1e6)), each) for each in (BUSY, slow)]
    assert waits[1].mean_ttft_s > 2 * waits[0].mean_ttft_s


def test_equal_seeds_give_equal_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)  # the one thing that differs from run to run
    write_trace(tmp_path / "t.jsonl", requests())
    (tmp_path / "c.toml").write_text(
        "seed = 3\n[fleet]\nnum_units = 2\n[costs]\nwork_per_s = 1e6\n"
        "[failures]\nunit_mtbf_s = 2.0\nstraggler_share = 0.1\n"
    )
    for folder, seed in (("a", None), ("b", None), ("c", 8)):
        (tmp_path / folder).mkdir()
        simulate(request(tmp_path, folder, seed))
    names = ["o.json", "o.csv", "o.trace", "o.jsonl", "plots/ttft.svg", "plots/ttft.png"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    assert (tmp_path / "a/o.csv").read_bytes() != (tmp_path / "c/o.csv").read_bytes()
    content = json.loads((tmp_path / "a/o.json").read_text())
    assert set(content["policies"]) == {"guarded", "fcfs", "edf", "srpt"}
    wanted = {"mean_ttft_s", "p50", "p90", "p99", "p99_slowdown", "p99_slowdown_64k", "preemptions", "decisions"}
    assert wanted | {"decision_p99_s"} <= content["policies"]["guarded"].keys()
    events = json.loads((tmp_path / "a/o.trace").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "t"}
    printed = capsys.readouterr().out
    assert "time to first token by length" in printed
    assert re.search(r"│ 4,096 +│ +\d+ │ [\d.]+ / [\d.]+ / [\d.]+ │", printed)
    decided = [json.loads(line) for line in (tmp_path / "a/o.jsonl").read_text().splitlines()]
    for policy in content["policies"]:
        mine = [line for line in decided if line["policy"] == policy]
        kinds = Counter(line["kind"] for line in mine)
        assert kinds["admitted"] == 60
        assert kinds["step"] == content["policies"][policy]["decisions"]
        assert all(line["reason"] and line["correction"] > 0 for line in mine if line["kind"] == "step")
        assert [line["at_s"] for line in mine] == sorted(line["at_s"] for line in mine)


def request(folder: Path, output: str, seed: int | None) -> SimulateRequest:
    return SimulateRequest(
        trace=folder / "t.jsonl",
        cluster=folder / "c.toml",
        load=0.8,
        policy="all",
        most=None,
        json_file=folder / output / "o.json",
        csv_file=folder / output / "o.csv",
        chrome_trace=folder / output / "o.trace",
        decisions=folder / output / "o.jsonl",
        plots=folder / output / "plots",
        sweep=False,
        prefix_study=False,
        seed=seed,
    )


def test_the_guard_holds_its_bar_on_a_busy_unit() -> None:
    """Mean and documents' tail against first come, first served, on a trace with few documents."""
    recipe = TraceRecipe(num_requests=1500, seed=5, short_share=0.95, most_tokens=131_072, tail=2.5, short_tokens=7000)
    trace, make_costs = prepare(generate_trace(recipe), Cluster(), 0.9)
    rows = {}
    for policy in ("guarded", "fcfs", "srpt"):
        cluster = replace(Cluster(), scheduler=replace(Cluster().scheduler, policy=policy))
        rows[policy] = metrics(replay(trace, cluster, make_costs), cluster)
    assert rows["guarded"].mean_ttft_s <= 0.41 * rows["fcfs"].mean_ttft_s
    assert rows["guarded"].p99_slowdown_64k <= 2.0 * rows["fcfs"].p99_slowdown_64k
    assert rows["guarded"].p99_slowdown_64k < rows["srpt"].p99_slowdown_64k


@pytest.mark.parametrize("costs", [CostSettings(), RATE, CostSettings(kind="work")])
def test_load_is_what_was_asked_for(costs: CostSettings) -> None:
    cluster = Cluster(fleet=FleetSettings(num_units=4, devices_per_unit=2), costs=costs)
    trace, make_costs = prepare(requests(), cluster, 0.7)
    assert offered_load(trace, cluster, make_costs()) == pytest.approx(0.7, rel=1e-6)


def test_a_load_needs_time() -> None:
    with pytest.raises(TraceError, match="arrive at once"):
        prepare((Request(0.0, 10, 1, ()), Request(0.0, 10, 1, ())), Cluster(), 0.9)
    with pytest.raises(ClusterError, match="--load 0"):
        prepare(requests(), Cluster(), 0.0)


def subject(model: str = "kimi_linear") -> Subject:
    return subject_of(Cluster(costs=CostSettings(kind="work", model=model)))


@pytest.mark.parametrize("model", ["kimi_linear", "glm_flash"])
def test_quick_costs_follow_the_full_count(model: str) -> None:
    costs = counted_costs(Cluster(costs=CostSettings(kind="work", model=model)))()
    for start, end in ((0, 8192), (100_000, 116_000), (0, 131_072), (777_777, 800_001), (0, 1_234_567)):
        piece = (Slice(job=0, start=start, end=end),)
        alone_s = costs.step_seconds(piece, "zigzag", Mesh(cp=1))
        assert alone_s == pytest.approx(costs.step_time(piece, "contiguous", Mesh(cp=1)).seconds, rel=1e-3)
        four_s = costs.step_seconds(piece, "zigzag", Mesh(cp=4))
        assert alone_s / 4 < four_s < alone_s
    piece = (Slice(job=0, start=65536, end=65536 + 32768),)
    exact_s = costs.step_time(piece, "zigzag", Mesh(cp=8)).seconds
    assert costs.step_seconds(piece, "zigzag", Mesh(cp=8)) == pytest.approx(exact_s, rel=1e-2)


def test_nothing_is_counted_once_costs_are_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = counted_costs(Cluster(costs=CostSettings(kind="work")))()
    costs.warm([Mesh(cp=1), Mesh(cp=4)], 300_000, pack_tokens=4096)
    monkeypatch.delattr(StepCosts, "step")
    for mesh in (Mesh(cp=1), Mesh(cp=4)):
        for start, end in ((0, 1), (0, 300_000), (123_457, 299_999), (65_535, 65_536)):
            assert costs.step_seconds((Slice(job=0, start=start, end=end),), "zigzag", mesh) > 0
        assert costs.step_seconds([Slice(job=job, start=0, end=4000) for job in range(32)], "zigzag", mesh) > 0


NODES = "[[nodes]]\ncount = 4\ndevices = 2\ndevice = 'h200'\n"


def test_the_clusters_network_is_what_machines_exchange_over(tmp_path: Path) -> None:
    """In replays and sweeps alike; the devices of [[nodes]] are the replay's."""
    step, prompts = [], []
    for gb_per_s in (0.001, 45):
        (tmp_path / "c.toml").write_text(f"{NODES}[network]\ngb_per_s = {gb_per_s}\n[costs]\nkind = 'work'\n")
        cluster = read_cluster(tmp_path / "c.toml")
        costs, piece = counted_costs(cluster)(), (Slice(job=0, start=0, end=65536),)
        step.append([costs.step_seconds(piece, "zigzag", Mesh(cp=size)) for size in (2, 4)])
        prompts += [row.seconds for row in strong_scaling(subject_of(cluster), 65536, (2, 16))[:2]]
        assert subject_of(cluster).profile.name == "h200"
    assert step[0][0] == step[1][0]  # one machine
    assert step[0][1] > 2 * step[1][1]
    assert prompts[0] == prompts[2]
    assert prompts[1] > 2 * prompts[3]
    slow, fast = (sensitivity(subject_of(read_cluster(tmp_path / "c.toml")), 65536, 16)[n].seconds for n in (0, 4))
    assert slow > fast


def test_units_fill_the_machines(tmp_path: Path) -> None:
    def fleet(text: str) -> FleetSettings:
        (tmp_path / "c.toml").write_text(NODES + text)
        return read_cluster(tmp_path / "c.toml").fleet

    assert fleet("").num_units == 8
    assert fleet("[fleet]\ndevices_per_unit = 2\n").num_units == 4
    assert fleet("[fleet]\ndevices_per_unit = 4\n").num_units == 2
    assert fleet("[fleet]\nnum_units = 4\ndevices_per_unit = 2\n").num_units == 4
    for text, words in (
        ("[fleet]\nnum_units = 4\n", r"num_units=4 of 1 device\(s\), \[\[nodes\]\] hold 8"),
        ("[fleet]\ndevices_per_unit = 3\n", "do not fill machines of 2"),
        ("[fleet]\ndevices_per_unit = 4\ntp = 4\n", "tp=4 do not fill machines of 2"),
        ("[fleet]\ndevices_per_unit = 16\n", r"\[\[nodes\]\] hold 0"),
    ):
        with pytest.raises(ClusterError, match=words):
            fleet(text)


def test_several_kinds_of_devices_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(NODES + "[[nodes]]\ndevice = 'h100'\n[costs]\nkind = 'work'\n")
    with pytest.raises(ClusterError, match=r"several kinds of devices \(h100, h200\): simulate takes one"):
        counted_costs(read_cluster(tmp_path / "c.toml"))


def test_efficiency_is_the_product_of_its_parts() -> None:
    rows = strong_scaling(subject(), 131_072, (1, 2, 16))
    rows += weak_scaling(subject(), 8192, (1, 4))
    for row in rows:
        assert row.work * row.load_balance * row.serialisation * row.transfer == pytest.approx(row.efficiency)
        assert row.devices > 1 or row.efficiency == pytest.approx(1.0)
        assert row.load_balance <= 1 + 1e-12
        assert row.speed_up == pytest.approx(row.devices * row.efficiency)
    assert {row.exchange for row in rows} == {"all_gather", "head_transposed", "relay"}


def test_what_hurts_hurts() -> None:
    rows = {(row.what, row.value): row.over_base for row in sensitivity(subject(), 131_072, 16)}
    assert rows["bandwidth", 0.1] > rows["bandwidth", 0.5] > 1 > rows["bandwidth", 4.0]
    assert rows["latency", 100.0] > rows["latency", 10.0] > 1
    assert rows["slow device", 2.0] > rows["slow device", 1.1] > 1
    assert rows["device MTBF, h", 24.0] > rows["device MTBF, h", 2400.0] > 1


def test_pipelines_have_even_stages_and_bubbles() -> None:
    assert even_stages([1, 1, 1, 5, 1, 1], 3) == [0, 3, 4, 6]
    assert even_stages([1.0] * 4, 1) == [0, 4]
    assert even_stages([3.0, 1.0, 1.0], 3) == [0, 1, 2, 3]
    one, four = (pipeline_time(subject(), 65536, stages) for stages in (1, 4))
    assert one is not None
    assert four is not None
    assert one.bubble == pytest.approx(0.0, abs=1e-9)
    assert one.seconds / 4 < four.seconds < one.seconds
    assert pipeline_time(subject(), 65536, 28) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[fleets]\n", "unknown fleets: use seed, fleet"),
        ("[fleet]\nunits = 3\n", r"\[fleet\]: units is unknown: use .*num_units"),
        ("[fleet]\nnum_units = 'x'\n", "num_units='x': need int"),
        ("[fleet]\nnum_units = true\n", "num_units=True: need int"),
        ("[fleet]\nnum_units = 0\n", "num_units=0: need 1 or more"),
        ("[costs]\nkind = 'magic'\n", "use quadratic or work"),
        ("[decode]\nslots_per_worker = 0\n", "1 or more slots"),
        ("[prefix]\nstate_share = 1.0\n", "state_share=1.0"),
        ("[failures]\nstraggler_factor = 0.5\n", "straggler_factor=0.5"),
        ("[scheduler.tenant_weights]\na = 'x'\n", "need numbers"),
        ("seed = 'x'\n", "seed='x'"),
        ("fleet = 3\n", "need a table"),
        ("[[nodes]]\ndevices = 0\n", "devices=0: need 1 or more"),
        ("[nodes]\ndevices = 1\n", r"write \[\[nodes\]\]"),
        ("[network]\nlatency_s = 1\n", "needs gb_per_s"),
        ("[network]\ngb_per_s = -1\n", "use a positive number"),
        ("[fleet\n", "cannot be read"),
    ],
)
def test_a_wrong_cluster_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(Exception, match=words):
        read_cluster(tmp_path / "c.toml")


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        "seed = 2\n[fleet]\nnum_units = 4\ncache_gib = 0.5\nmove_gb_per_s = 3\n"
        "[costs]\nkind = 'work'\ndevice = 'd.toml'\n[scheduler.tenant_weights]\na = 2\n"
    )
    cluster = read_cluster(tmp_path / "c.toml")
    assert (cluster.seed, cluster.fleet.cache_bytes, cluster.fleet.move_bytes_per_s) == (2, 1 << 29, 3e9)
    assert cluster.costs.device == str(tmp_path / "d.toml")
    with pytest.raises(ProfileError, match=r"d\.toml cannot be read"):
        counted_costs(cluster)
    (tmp_path / "d.toml").write_text("name = 'd'\nsource = 'test'\n[rates.gemm]\ntflops = 1\n")
    with pytest.raises(ProfileError, match=r"\[rates.gemm\]: tflops is unknown: use .*flops_per_s"):
        counted_costs(cluster)
    assert read_cluster(None).scheduler.step_tokens == 8192


def test_decision_times_are_told_to_half_a_millisecond() -> None:
    assert decision_p99_s([0.0001] * 2000 + [0.5] * 10) == 0.0005
    assert decision_p99_s([0.0012] * 10) == pytest.approx(0.0015)
    assert decision_p99_s([]) == 0.0


def test_charts_are_well_formed_and_drawn() -> None:
    lines = (Line(name="a & b", x=(1, 10, 1000), y=(0.5, 0.1, 0.9)), Line(name="none", x=(0.0,), y=(1.0,)))
    chart = Chart(title="Efficiency <1>", x_title="devices", y_title="share", lines=lines, is_x_log=True)
    root = ElementTree.fromstring(svg(chart))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"a & b", "Efficiency <1>", "1k", "0.2"} <= set(texts)
    drawn = png(chart)
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", drawn[16:24])
    start = drawn.index(b"IDAT") + 4
    rows = zlib.decompress(drawn[start : drawn.index(b"IEND") - 8])
    assert len(rows) == height * (1 + 3 * width)
    assert bytes((0x1F, 0x6F, 0xB4)) in rows  # the first line's colour
    assert all(len(glyph) == 7 and max(glyph) < 32 for glyph in GLYPHS.values())


def test_simulating_needs_neither_torch_nor_ray() -> None:
    """Every module of the scheduler, the simulator and the command."""
    code = (
        "import pkgutil, sys, importlib\n"
        "import longprefill.orchestrator.scheduler as a, longprefill.orchestrator.simulator as b\n"
        "names = [m.name for p in (a, b) for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.')]\n"
        "[importlib.import_module(name) for name in [*names, 'longprefill.orchestrator.simulate_command']]\n"
        "print(len(names), *sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=100)
    number, *heavy = done.stdout.split()
    assert heavy == []
    assert int(number) > 30
