"""`longprefill plan` on odd questions against golden answers, and what its parts promise.

A golden file is what the command prints: JSON for a plan, one line for a refusal. After a change that is meant:
`python tests/unit/test_plan.py` writes them again; read the difference.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from longprefill.orchestrator import cli
from longprefill.orchestrator.costs.profile import DeviceProfile, Link, Table
from longprefill.orchestrator.costs.profile_file import find_profile, write_profile
from longprefill.orchestrator.costs.rates import Rates
from longprefill.orchestrator.costs.step import StepCosts, StepOptions
from longprefill.orchestrator.memory import weight_bytes
from longprefill.orchestrator.plan_command import device_numbers, evaluator_of, scaling
from longprefill.orchestrator.planner.candidate import Candidate, PlanError, PlanRequest
from longprefill.orchestrator.planner.crossovers import _contiguous_from, _speed_up, _with_room, crossovers
from longprefill.orchestrator.planner.evaluate import Evaluator, mean_wait_rounds
from longprefill.orchestrator.planner.models import find_model
from longprefill.orchestrator.planner.report import RUNNABLE_EXCHANGES
from longprefill.orchestrator.planner.search import choose
from longprefill.orchestrator.planner.tables import show_scaling
from longprefill.orchestrator.simulator.cluster import NetworkSettings, read_cluster
from longprefill.partition.errors import ModelError, UserError
from longprefill.partition.generators import generate
from longprefill.partition.layout import Slice
from longprefill.partition.operations import OPERATIONS, LayerPlace, edge_operations, layer_operations, operation_shape
from longprefill.workers.model.sharding import MeshPlace

GOLDEN = Path(__file__).parent / "plan_golden"
QUESTIONS: dict[str, str] = {
    "one_token": "--model glm_flash --tokens 1 --cluster node.toml",
    "million_tokens": "--model kimi_linear --tokens 1048576 --cluster large.toml",
    "ten_million_tokens": "--model deep --tokens 10000000 --cluster large.toml",
    "ten_million_tokens_too_many": "--model kimi_linear --tokens 10000000 --cluster large.toml",
    "little_memory": "--model kimi_linear --tokens 131072 --cluster small.toml",
    "weights_too_large": "--model deepseek_v32 --tokens 100000 --cluster h100.toml",
    "unequal_nodes": "--model kimi_linear --tokens 262144 --cluster unequal.toml",
    "slow_network": "--model kimi_linear --tokens 262144 --cluster slow.toml",
    "tp_beyond_heads": "--model kimi_linear --tokens 1000 --tp 64 --cluster wide.toml",
    "tp_beyond_machine": "--model kimi_linear --tokens 1000 --tp 16 --cluster node.toml",
    "cp_beyond_cluster": "--model kimi_linear --tokens 1000 --cp 9 --cluster node.toml",
    "unknown_device": "--model kimi_linear --tokens 1000 --cluster unknown.toml",
    "no_device": "--model kimi_linear --tokens 1000 --cluster unnamed.toml",
    "unknown_model": "--model kimi --tokens 1000 --cluster node.toml",
    "no_cluster": "--model kimi_linear --tokens 1000 --cluster nowhere.toml",
    "no_tokens": "--model kimi_linear --tokens 0 --cluster node.toml",
    "many_short": "--model kimi_linear --tokens 300 --concurrent 2000 --cluster node.toml",
    "deadline_met": "--model kimi_linear --tokens 100000 --deadline-s 2 --cluster large.toml",
    "deadline_missed": "--model kimi_linear --tokens 100000 --deadline-s 0.01 --cluster node.toml",
    "nearly_cached": "--model glm_flash --tokens 500000 --cached 499000 --cluster node.toml",
    "all_cached": "--model glm_flash --tokens 500000 --cached 500000 --cluster node.toml",
    "odd_step": "--model kimi_linear --tokens 5000 --step-tokens 100 --cluster node.toml",
    "pinned": "--model glm_flash --tokens 65536 --cp 2 --tp 4 --step-tokens 8192 --exchange relay --layout contiguous "
    "--latent-format fp8 --index-format mxfp8 --cluster node.toml",
    "wrong_exchange": "--model glm_flash --tokens 65536 --exchange magic --cluster node.toml",
    "too_many_devices": "--model kimi_linear --tokens 65536 --devices 9 --cluster node.toml",
}


def arguments(question: str) -> list[str]:
    """The command line, files found in the golden directory."""
    words = question.split()
    for option, value in zip(words, [*words[1:], ""], strict=True):
        if option == "--cluster" or (option == "--model" and value == "deep"):
            words[words.index(value)] = str(GOLDEN / value)
    return ["longprefill", "plan", *words, "--json", "-"]


def answer(question: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit code and what was printed, with paths as in the question."""
    monkeypatch.setattr(sys, "argv", arguments(question))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), (printed.out or printed.err).replace(f"{GOLDEN}/", "")


@pytest.mark.parametrize("name", QUESTIONS)
def test_odd_questions(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = answer(QUESTIONS[name], capsys, monkeypatch)
    assert text == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    if code:
        assert code == 2
        assert text.count("\n") == 1
        assert text.startswith("longprefill: ")
    else:
        check_plan(json.loads(text))


def check_plan(content: dict) -> None:
    """What holds of every plan."""
    plan, estimate, memory = content["plan"], content["estimate"], content["memory"]
    assert content["kind"] == "modelled"
    assert plan["cp"] * plan["tp"] == plan["devices"] <= content["devices"]
    assert memory["total"] == sum(memory[name] for name in ("process", "weights", "cache", "step"))
    assert memory["total"] <= memory["device_bytes"]
    kinds = content["memory_by_rank"]
    assert sum(kind["ranks"] for kind in kinds) == plan["devices"]
    assert max(kind["total"] for kind in kinds) == memory["total"]
    assert all(kind["total"] <= kind["device_bytes"] for kind in kinds)
    assert ("tensor_parallel" in content["received_bytes"]) == (plan["tp"] > 1)
    assert sum(estimate["parts"].values()) == pytest.approx(estimate["prefill_s"], rel=1e-4)
    whole = estimate["prefill_s"] + estimate["handoff_exposed_s"] + estimate["queue_s"]
    assert estimate["ttft_s"] == pytest.approx(whole, rel=1e-4)
    assert sum(content["rates"].values()) == pytest.approx(1)
    for other in content["alternatives"]:
        assert other["reason"]


def test_answers_are_what_they_should_be() -> None:
    """The meaning of some golden answers, so that a wrong one cannot be written over unseen."""

    def golden(name: str) -> dict:
        return json.loads((GOLDEN / f"{name}.txt").read_text(encoding="utf-8"))

    assert golden("slow_network")["plan"]["machines"] == 1  # 100 Mb/s are never worth crossing
    assert golden("unequal_nodes")["plan"]["devices"] == 8  # four devices over a network would hold up eight
    assert golden("million_tokens")["plan"]["devices"] == 128
    assert golden("many_short")["plan"]["groups"] == 8
    assert golden("many_short")["plan"]["prompts_per_step"] > 1
    assert golden("deadline_met")["estimate"]["ttft_s"] <= 2
    assert golden("deadline_met")["plan"]["devices"] < 8
    assert golden("nearly_cached")["plan"]["steps"] == 1
    pinned = golden("pinned")["plan"]
    assert [pinned[name] for name in ("cp", "tp", "step_tokens", "exchange", "layout", "latent_format", "index_format")
            ] == [2, 4, 8192, "relay", "contiguous", "fp8", "mxfp8"]  # fmt: skip


def test_planning_needs_neither_torch_nor_ray() -> None:
    """For whatever is asked: a heavy import may hide behind one kind of answer."""
    code = (
        "import json, sys\n"
        "from longprefill.orchestrator import cli\n"
        "codes = []\n"
        "for words in json.load(sys.stdin):\n"
        "    sys.argv = words\n"
        "    try:\n        cli.main()\n"
        "    except SystemExit as ended:\n        codes.append(ended.code)\n"
        "print(len(codes), *sorted({'torch', 'ray', 'numpy', 'rich'} & set(sys.modules)), file=sys.stderr)\n"
    )
    questions = json.dumps([arguments(question) for question in QUESTIONS.values()])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=questions, capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stderr.splitlines()[-1].split() == [str(len(QUESTIONS))]


def test_a_tensor_parallel_group_receives_rows() -> None:
    """One gather and one sum of rows a layer at least, over the whole prompt, with one context-parallel rank too."""
    estimator = evaluator(tokens=4096, cp=1, tp=4)
    candidate = Candidate(cp=1, tp=4, step_tokens=1024, latent_format="bf16", index_format="bf16")
    received = estimator.traffic(candidate)
    row_bytes = 2 * estimator.config.hidden
    assert received["tensor_parallel"] >= 4096 // 4 * 3 * 2 * row_bytes * len(estimator.config.layers)


def test_memory_is_told_by_kind_of_rank() -> None:
    estimator = evaluator(tokens=4096, cp=5, tp=2, cluster=GOLDEN / "unequal.toml")
    candidate = Candidate(cp=5, tp=2, step_tokens=1024, latent_format="bf16", index_format="bf16")
    site = estimator.machines.site(5, 2)
    assert site is not None
    kinds = estimator.memory_by_rank(candidate, site)
    assert {kind.device: kind.device_bytes >> 30 for kind in kinds} == {"h200": 131, "h100": 74}
    assert sum(kind.num_ranks for kind in kinds) == 10
    for kind in kinds:
        for rank in kind.tp_ranks:
            place = MeshPlace.of(rank, num_cp=1, num_tp=2, expert_parallel=False)
            assert kind.memory.weights == weight_bytes(estimator.config, 2, place)


def test_equal_layers_are_counted_once_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every layer by itself: the same seconds, parts and waiting."""
    for model, cp in (("kimi_linear", 3), ("glm_flash", 8), (str(GOLDEN / "deep"), 5)):
        estimator = evaluator(model=model, tokens=50_000, cp=cp, cluster=GOLDEN / "wide.toml")
        candidate = Candidate(cp=cp, tp=1, step_tokens=10_048, latent_format="bf16", index_format="bf16")
        whole = estimator.step(candidate, "contiguous", 20_032)
        with monkeypatch.context() as patch:
            patch.setattr(StepCosts, "kinds", property(lambda costs: tuple(range(len(costs.model.layers)))))
            each = estimator.step(candidate, "contiguous", 20_032)
        assert each.parts == pytest.approx(dict(whole.parts), rel=1e-9)
        assert each.seconds == pytest.approx(whole.seconds, rel=1e-12)
        assert each.waiting_s == pytest.approx(whole.waiting_s, rel=1e-9)


def test_people_get_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", arguments(QUESTIONS["unequal_nodes"])[:-2])
    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr().out
    for words in ("Modelled.", "to the first token", "where the prefill's seconds go", "what else there is", "cp 12",
                  "layout contiguous", "GB/s a device of network bandwidth", "the engine does not run"):  # fmt: skip
        assert words in printed
    assert max(map(len, printed.splitlines())) <= 120


def request(**fields: object) -> PlanRequest:
    given = {"model": "kimi_linear", "tokens": 65536, "cluster": GOLDEN / "node.toml", **fields}
    return PlanRequest(**given)  # pyright: ignore[reportArgumentType]


def evaluator(**fields: object) -> Evaluator:
    asked = request(**fields)
    return evaluator_of(find_model(asked.model), asked, read_cluster(asked.cluster), None)


def test_strategies_come_out_of_the_model() -> None:
    """Short and many: a group a device. Long: the machine. Nothing knows a threshold."""
    short = choose(evaluator(tokens=300, concurrent=512)).best
    assert (short.candidate.num_devices, short.num_groups) == (1, 8)
    assert short.candidate.jobs_per_step > 1
    long = choose(evaluator(tokens=500_000)).best
    assert long.candidate.num_devices == 8


def test_a_longer_prompt_never_takes_less_time() -> None:
    seconds = [choose(evaluator(tokens=tokens)).best.ttft_s for tokens in (1, 1000, 30_000, 200_000, 1_000_000)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("model", ["kimi_linear", "glm_flash"])
def test_spread_weights_in_closed_form(model: str) -> None:
    """Against every parameter's share of the rank that holds most."""
    estimator = evaluator(model=model)
    for cp, tp in ((4, 1), (2, 4), (5, 2)):
        candidate = Candidate(
            cp=cp, tp=tp, step_tokens=64, latent_format="bf16", index_format="bf16", is_expert_parallel=True
        )
        ranks = [MeshPlace.of(rank, num_cp=cp, num_tp=tp, expert_parallel=True) for rank in range(cp * tp)]
        most = max(weight_bytes(estimator.config, 2, place) for place in ranks)
        assert estimator.weights(candidate) == pytest.approx(most, rel=2e-3)
        assert estimator.weights(candidate) >= most


def test_the_largest_step_fits_and_the_next_does_not() -> None:
    estimator = evaluator(tokens=1_000_000)
    candidate = Candidate(cp=4, tp=1, step_tokens=64, latent_format="bf16", index_format="bf16")
    memory = 110 << 30
    largest = estimator.largest_step(candidate, memory)
    assert largest % (2 * 4 * 64) == 0
    assert estimator.memory(replace(candidate, step_tokens=largest)).total <= memory
    assert estimator.memory(replace(candidate, step_tokens=largest + 512)).total > memory
    assert estimator.largest_step(candidate, 1 << 30) == 0


def test_caches_are_sharded_only_where_nothing_else_fits(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[[nodes]]\ndevices = 4\ndevice = 'h200'\nmemory_gib = 99.5\n")
    best = choose(evaluator(tokens=1_000_000, cluster=tmp_path / "c.toml", tp=1, expert_parallel=False)).best
    assert best.candidate.is_cache_sharded or best.candidate.latent_format == "fp8"
    roomy = choose(evaluator(tokens=1_000_000, tp=1, expert_parallel=False)).best
    assert not roomy.candidate.is_cache_sharded
    assert roomy.candidate.latent_format == "bf16"


def test_what_is_not_measured_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text("name = 'd'\nsource = 's'\nmemory_gib = 200\n[rates.gemm]\nflops_per_s = 1e15\n")
    (tmp_path / "c.toml").write_text("[[nodes]]\ndevices = 2\ndevice = 'd.toml'\n")
    with pytest.raises(PlanError, match=r"profile d does not say how fast .*rates.memory.*--calibrate"):
        choose(evaluator(cluster=tmp_path / "c.toml"))


def test_a_measured_profile_plans_what_was_measured(tmp_path: Path) -> None:
    """Tables of one rank's shapes, as a calibration writes them: meshes of that shape are planned, others are named."""
    estimator = evaluator(tokens=20_000)
    shape = estimator.shape(Candidate(cp=1, tp=1, step_tokens=64, latent_format="bf16", index_format="bf16"))
    rates = Rates(find_profile("example"))
    points: dict[tuple[str, tuple[tuple[str, int | str], ...]], set[tuple[float, ...]]] = {}
    for tokens in (64, 1024, 20_480):
        for num_ranks in (1, 2):
            layout = generate("zigzag", [Slice(job=0, start=0, end=tokens)], num_ranks)
            for layer in dict.fromkeys(shape.layers):
                for work in layer_operations(layout, layer, shape, LayerPlace()):
                    for each in (*work.all, *edge_operations(layout, shape, 1, 1)):
                        dims = tuple(sorted(operation_shape(each.name, layer, shape).items()))
                        extents = (each.rows, each.keys, each.parts, each.flops or each.num_bytes)
                        if extents[3]:
                            points.setdefault((each.name, dims), set()).add((*extents, rates.seconds(each, dims)))
    tables = tuple(
        Table(op=name, shape=dict(dims), axes=("rows", "keys", "parts"), points=tuple(sorted(found)))
        for (name, dims), found in points.items()
    )
    link = Link(pattern="any", scope="node", latency_s=1e-5, bytes_per_s=1e11)
    write_profile(tmp_path / "p.json", DeviceProfile(name="here", source="test", tables=tables, links=(link,)))
    (tmp_path / "c.toml").write_text("[[nodes]]\ndevices = 2\ndevice = 'p.json'\nmemory_gib = 141\n")
    measured = evaluator(tokens=20_000, cluster=tmp_path / "c.toml")
    choice = choose(measured)
    assert (choice.best.candidate.cp, choice.best.candidate.tp) == (2, 1)
    reasons = [other.reason for other in choice.alternatives if other.estimate is None]
    assert any("profile here does not say how fast" in reason for reason in reasons)
    assert set(measured.costs(choice.best.candidate, choice.best.site).coverage()) <= {"exact", "between", "beyond"}
    borders = crossovers(measured, choice.best)
    assert borders.cp == 2
    again = evaluator(tokens=20_000, cluster=GOLDEN / "example.toml", exchange=choice.best.candidate.exchange)
    expected = again.estimate(choice.best.candidate)
    assert expected is not None
    assert choice.best.prompt.max_work_s == pytest.approx(expected.prompt.max_work_s, rel=0.05)


def test_a_hand_off_to_another_machine_takes_the_clusters_network(tmp_path: Path) -> None:
    """Also that of a mesh on one machine, whose profile knows links inside the machine alone."""
    link = Link(pattern="any", scope="node", latency_s=1e-5, bytes_per_s=1e11)
    write_profile(tmp_path / "p.json", replace(find_profile("example"), links=(link,)))
    cluster = (
        "[[nodes]]\ncount = 2\ndevices = 1\ndevice = 'p.json'\n[network]\ngb_per_s = {}\n[decode]\nnum_workers = 1\n"
    )
    candidate = Candidate(cp=1, tp=1, step_tokens=1024, latent_format="bf16", index_format="bf16")
    seconds: list[float] = []
    for gb_per_s in (1.0, 2.0):
        (tmp_path / "c.toml").write_text(cluster.format(gb_per_s))
        estimate = evaluator(tokens=1024, cluster=tmp_path / "c.toml").estimate(candidate)
        assert estimate is not None
        seconds.append(estimate.handoff_s)
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.01)


def test_crossovers_cross() -> None:
    """Each again, a little on both sides of where it is said to be."""
    estimator = evaluator(tokens=500_000, tp=1, cluster=GOLDEN / "unequal.toml", cp=8)
    best = choose(estimator).best
    borders = crossovers(estimator, best)

    def speed_up(tokens: int) -> float:
        return _speed_up(estimator, best.candidate, tokens)

    assert borders.cp == 8
    assert borders.cp_pays_from_tokens is not None
    assert speed_up(borders.cp_pays_from_tokens) > 1 >= speed_up(borders.cp_pays_from_tokens * 7 // 8 - 1)
    assert borders.cp_efficient_from_tokens is not None
    half = borders.cp_efficient_from_tokens
    assert speed_up(half) >= 4 > speed_up(half * 7 // 8 - 1)
    candidate = replace(best.candidate, step_tokens=8192)
    start, looked_at = _contiguous_from(estimator, candidate)
    assert start is not None
    assert start <= looked_at

    def over_zigzag(position: int) -> float:
        contiguous, zigzag = (estimator.step(candidate, kind, position).seconds for kind in ("contiguous", "zigzag"))
        return contiguous / zigzag

    assert over_zigzag(start) <= 1.05
    assert start == 0 or over_zigzag(start // 2) > 1.05
    assert borders.break_even_gb_per_s is not None
    assert (borders.narrow_cp, borders.wide_cp, borders.link) == (8, 12, "network")
    wide, _ = _with_room(estimator, replace(best.candidate, cp=12, exchange="head_transposed"))
    piece = Slice(job=0, start=249_984, end=min(249_984 + best.candidate.step_tokens, 500_000))
    narrow_s = estimator.costs(best.candidate, best.site).step([piece], best.candidate.layout).seconds
    options = StepOptions(exchange=wide.exchange, is_expert_parallel=wide.is_expert_parallel)
    for factor in (0.9, 1.1):
        network = NetworkSettings(bytes_per_s=factor * borders.break_even_gb_per_s * 1e9)
        site = replace(estimator.machines, network=network).site(12, 1)
        assert site is not None
        costs = StepCosts(estimator.shape(wide), site.placement, options)
        assert (costs.step([piece], wide.layout).seconds < narrow_s) == (factor > 1)


def test_scaling_puts_exchanges_side_by_side() -> None:
    asked = request(model="glm_flash", tokens=1 << 20, cluster=GOLDEN / "large.toml", devices=(16, 32))
    rows = scaling(find_model(asked.model), asked, read_cluster(asked.cluster))
    assert [row["devices"] for row in rows] == [16, 32]
    for row in rows:
        by_exchange = [row[f"{name}_s"] for name in ("all_gather", "head_transposed", "relay")]
        assert row["seconds"] == pytest.approx(min(by_exchange))  # type: ignore[type-var]
        assert 0 < row["efficiency"] <= 1.1  # type: ignore[operator]
    assert rows[1]["seconds"] < rows[0]["seconds"]  # type: ignore[operator]


def test_scaling_without_the_rates_of_one_device(tmp_path: Path) -> None:
    """As after a calibration of one rank's share of two: there is nothing to compare with."""
    estimator = evaluator(tp=2)
    shape = estimator.shape(Candidate(cp=1, tp=2, step_tokens=64, latent_format="bf16", index_format="bf16"))
    example = find_profile("example")
    share = Table(
        op="mla.output",
        shape=operation_shape("mla.output", shape.layers[3], shape),
        axes=("rows",),
        points=((1024.0, 1e9, 1e-3),),
    )
    rates = {kind: rate for kind, rate in example.rates.items() if kind != "gemm"}
    others = {op: example.rates["gemm"] for op, kind in OPERATIONS.items() if kind == "gemm" and op != "mla.output"}
    write_profile(tmp_path / "p.json", replace(example, rates=rates | others, tables=(share,)))
    (tmp_path / "c.toml").write_text("[[nodes]]\ndevices = 4\ndevice = 'p.json'\n")
    asked = request(cluster=tmp_path / "c.toml", devices=(2, 4))
    rows = scaling(find_model(asked.model), asked, read_cluster(asked.cluster))
    assert [row["efficiency"] for row in rows] == [None, None]
    assert all(row["seconds"] for row in rows)
    show_scaling(rows)


@pytest.mark.parametrize(("num_prompts", "at_once"), [(1, 1), (7, 3), (9, 3), (2, 8), (1000, 1)])
def test_prompts_wait_for_the_rounds_before_theirs(num_prompts: int, at_once: int) -> None:
    expected = sum(number // at_once for number in range(num_prompts)) / num_prompts
    assert mean_wait_rounds(num_prompts, at_once) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0", "-1", "1.5", "9999999999"])
def test_wrong_numbers_of_devices(text: str) -> None:
    with pytest.raises(PlanError, match="--devices"):
        device_numbers(text)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": -5}, "--tokens -5"),
        ({"concurrent": 0}, "--concurrent 0"),
        ({"deadline_s": 0.0}, "--deadline-s 0"),
        ({"deadline_s": float("nan")}, "--deadline-s nan"),
        ({"cp": 0}, "--cp 0"),
        ({"latent_format": "fp4"}, "--latent-format 'fp4' is not one of fp32, bf16, fp8"),
        ({"dtype": "fp8"}, "--dtype 'fp8' is not one of bf16, fp32"),
        ({"layout": "spiral"}, "--layout 'spiral' is not one of zigzag, contiguous"),
    ],
)
def test_wrong_requests_are_named(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        request(**fields)


def test_models_are_found(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a directory with a config\.json nor one of deepseek_v32, glm_flash"):
        find_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"config.json is missing"):
        find_model(str(tmp_path))


def test_the_engine_runs_what_is_said_to_run() -> None:
    """Fails when an exchange is added to the engine and the planner still calls it modelled."""
    from longprefill.workers.model.layers.state_exchange import EXCHANGES

    assert tuple(EXCHANGES) == RUNNABLE_EXCHANGES


def write_answers() -> None:
    """Writes all golden files again."""
    for name, question in QUESTIONS.items():
        command = [sys.executable, "-P", "-c", "from longprefill.orchestrator.cli import main; main()"]
        done = subprocess.run([*command, *arguments(question)[1:]], capture_output=True, text=True, check=False)
        text = (done.stdout or done.stderr).replace(f"{GOLDEN}/", "")
        (GOLDEN / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_answers()
