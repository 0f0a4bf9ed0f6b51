"""scripts/bench_kernels without its minutes: the ops it knows, a result's fields, scaled peers, memory, refusals."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
OPS = (
    *("kda_prefill", "kda_summary", "kda_decode", "indexer", "indexer_mxfp8", "indexer_pooled", "indexer_decode"),
    *("sparse_mla", "sparse_mla_fp8", "mla_decode", "mxfp8_encode", "mxfp8_decode", "fp8_encode", "fp8_decode"),
    *("moe", "attn_res"),
)
FIELDS = ("op", "shape", "dtype", "isa", "threads", "seconds", "flops", "bytes", "ceiling_gflops", "ratio", "peers")
COPY = torch.zeros(1 << 20)


class Bench:
    """The script and its cases, imported as the script imports them: `bench_cases` from the scripts folder."""

    def __init__(self) -> None:
        loader = SourceFileLoader("bench_kernels", str(SCRIPTS / "bench_kernels"))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        self.script = importlib.util.module_from_spec(spec)
        loader.exec_module(self.script)
        self.cases: ModuleType = importlib.import_module("bench_cases")
        self.measure: ModuleType = importlib.import_module("bench_cases.measure")
        self.memory: ModuleType = importlib.import_module("bench_cases.memory")

    def stub(self, **changes: Any) -> Any:
        """A case that copies 4 MiB; half of it is what its peer copies."""
        fields: dict[str, Any] = {
            "shape": "N=1048576",
            "dtype": "fp32",
            "run": lambda: COPY.clone(),
            "check": lambda: None,
            "flops": 1 << 20,
            "bytes": 8 << 20,
            "bound": "memory",
            "peers": {"torch": lambda: COPY.clone(), "torch, scaled from a half": lambda: COPY[: 1 << 19].clone()},
            "peer_shares": {"torch, scaled from a half": 0.5},
        }
        return self.measure.Case(**fields | changes)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    made = Bench()
    monkeypatch.setattr(made.measure, "GEMM_SIZE", 64)
    monkeypatch.setattr(made.measure, "COPY_BYTES", 1 << 20)
    yield made
    torch.set_flush_denormal(False)  # `measure` flushes, as a worker's step does
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "bench_cases":
            del sys.modules[name]


def test_every_op_that_a_reader_may_ask_for_has_its_cases(bench: Bench) -> None:
    assert set(OPS) <= set(bench.cases.CASES)
    assert all(callable(cases) for cases in bench.cases.CASES.values())


def test_a_result_has_all_fields_and_is_json(bench: Bench) -> None:
    result = bench.measure.measure("stub", bench.stub(), repeats=3, threads=1)
    assert set(FIELDS) <= set(result)
    assert (result["op"], result["shape"], result["dtype"]) == ("stub", "N=1048576", "fp32")
    assert (result["threads"], result["flops"], result["bytes"]) == (1, 1 << 20, 8 << 20)
    low, high = result["spread"]
    assert 0 < low <= result["seconds"] <= high
    assert result["gflops"] == pytest.approx(result["flops"] / result["seconds"] / 1e9)
    assert result["ratio"] == pytest.approx(result["bytes"] / result["seconds"] / 1e9 / result["ceiling_gbytes"])
    assert result["ceiling_gflops"] > 0
    assert result["extra_bytes"] is None
    assert json.loads(json.dumps(result)) == result
    compute = bench.measure.measure("stub", bench.stub(bound="compute"), repeats=1, threads=1)
    assert compute["ratio"] == pytest.approx(compute["gflops"] / compute["ceiling_gflops"])


def test_a_peer_that_runs_a_part_is_scaled_to_the_whole(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks as often as a side is run, seconds are numbers of calls."""
    calls: dict[str, int] = dict.fromkeys(("ours", "whole", "part"), 0)
    cost: dict[str, float] = {"ours": 1.0, "whole": 8.0, "part": 2.0}
    now = [0.0]

    def side(name: str) -> Any:
        def run() -> None:
            calls[name] += 1
            now[0] += cost[name]

        return run

    monkeypatch.setattr(bench.measure.time, "thread_time", lambda: now[0])
    # ceilings take no time on this clock: a tiny one keeps their rates finite
    monkeypatch.setattr(
        bench.measure,
        "_ceilings",
        lambda bound: {name: lambda: now.__setitem__(0, now[0] + 1e-3) for name in ("gemm", "memcpy")},
    )
    case = bench.stub(
        run=side("ours"), peers={"whole": side("whole"), "part": side("part")}, peer_shares={"part": 0.25}
    )
    result = bench.measure.measure("stub", case, repeats=3, threads=1)
    assert result["seconds"] == pytest.approx(1.0)
    assert result["peers"] == pytest.approx({"whole": 8.0, "part": 8.0})
    assert result["peer_shares"] == {"part": 0.25}
    assert set(calls.values()) == {4}, "one turn to warm up, and the repeats"


def test_the_indexers_peers_run_the_share_that_they_say(bench: Bench) -> None:
    indexer = importlib.import_module("bench_cases.indexer")
    pairs = [sum(indexer.L - t for t in range(count)) for count in (indexer.PEER_QUERIES, indexer.T)]
    assert pytest.approx(pairs[0] / pairs[1], rel=1e-12) == indexer.PEER_SHARE
    assert indexer._visible_pools(5, 8) == sum(visible // indexer.POOL for visible in range(6, 14))


@pytest.mark.parametrize("shares", [{"nobody": 0.5}, {"torch": 0.0}, {"torch": 1.5}])
def test_a_share_of_no_peer_or_of_nothing_is_refused(bench: Bench, shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"peer_shares\['(nobody|torch)'\]="):
        bench.stub(peer_shares=shares)


def test_a_wrong_kernel_is_not_timed(bench: Bench) -> None:
    def check() -> None:
        bench.measure.assert_close(torch.ones(3), torch.tensor([1.0, 1.0, 1.1]), 1e-3)

    with pytest.raises(AssertionError, match="not timed"):
        bench.measure.measure("stub", bench.stub(check=check), repeats=1, threads=1)


def test_a_result_is_a_line_for_people(bench: Bench) -> None:
    result = bench.measure.measure("stub", bench.stub(), repeats=1, threads=1)
    said = bench.script.line(result | {"extra_bytes": 3 << 19})
    assert said.startswith("stub N=1048576 fp32, ")
    assert " of memcpy, 1.5 MiB beside the inputs; torch " in said
    assert "scaled from a half" in said
    assert "MiB" not in bench.script.line(result)


def test_the_peak_of_a_call_is_what_it_takes_and_no_more(bench: Bench) -> None:
    """In a process of its own, as extra_bytes does it: memory that was freed before hides nothing of the call's."""
    program = (
        "import torch\nfrom bench_cases.memory import clear_peak, status_bytes\n"
        "torch.zeros(64 << 18)\nbefore = clear_peak()\ntorch.ones(16 << 18)\nprint(status_bytes('VmHWM') - before)\n"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPTS)!r})\n{program}"]
    used = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert 16 << 20 <= used < 32 << 20


def test_an_unknown_op_is_refused_with_the_known_ones(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bench.script.ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["bench_kernels", "--op", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        bench.script.main()
