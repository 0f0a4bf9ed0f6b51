"""Traces are read as written, refused by line, and generated as their recipe says."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.orchestrator.simulator.generate import TraceRecipe, generate_trace
from longprefill.orchestrator.simulator.trace import BLOCK_TOKENS, TraceError, read_trace, write_trace

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_trace"


@settings(max_examples=20)
@given(
    seed=st.integers(0, 100),
    shared=st.sampled_from([0.0, 0.7, 1.0]),
    short=st.sampled_from([0.0, 0.5]),
    num=st.integers(1, 40),
)
def test_generated_traces_are_sound(seed: int, shared: float, short: float, num: int) -> None:
    recipe = TraceRecipe(num_requests=num, seed=seed, shared_share=shared, short_share=short)
    requests = generate_trace(recipe)
    assert requests == generate_trace(recipe)
    assert len(requests) == num
    before = {}
    for request in requests:
        assert len(request.blocks) == -(-request.input_tokens // BLOCK_TOKENS)
        assert request.input_tokens <= recipe.most_tokens
        assert short or request.input_tokens >= recipe.least_tokens
        assert request.output_tokens >= 1
        # an id has one predecessor: equal ids are equal prefixes
        for previous, block in zip((None, *request.blocks), request.blocks, strict=False):
            assert before.setdefault(block, previous) == previous
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)


def test_recipes_differ_where_they_should() -> None:
    heavy = generate_trace(TraceRecipe(num_requests=2000, tail=0.8, shared_share=0.0))
    light = generate_trace(TraceRecipe(num_requests=2000, tail=3.0, shared_share=0.0))
    assert sum(r.input_tokens for r in heavy) > 1.5 * sum(r.input_tokens for r in light)
    assert max(r.input_tokens for r in heavy) > 800_000
    steady, bursty = (gaps(TraceRecipe(num_requests=2000, burstiness=b, requests_per_s=2.0)) for b in (1.0, 9.0))
    assert variation(steady) == pytest.approx(1.0, rel=0.2)
    assert variation(bursty) == pytest.approx(9.0, rel=0.4)
    assert sum(steady) / len(steady) == pytest.approx(0.5, rel=0.1)
    shared = generate_trace(TraceRecipe(num_requests=200, shared_share=1.0))
    assert len({block for r in shared for block in r.blocks}) < 0.8 * sum(len(r.blocks) for r in shared)


def gaps(recipe: TraceRecipe) -> list[float]:
    times = [request.arrival_s for request in generate_trace(recipe)]
    return [later - earlier for earlier, later in pairwise(times)]


def variation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def test_a_trace_is_read_as_written(tmp_path: Path) -> None:
    requests = generate_trace(TraceRecipe(num_requests=30, seed=3))
    write_trace(tmp_path / "t.jsonl", requests)
    assert read_trace(tmp_path / "t.jsonl") == requests
    assert read_trace(tmp_path / "t.jsonl", most=4) == requests[:4]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not an object"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 1}', "timestamp=-1: need milliseconds"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length=0"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "input_length=True"),
        ('{"timestamp": 1, "input_length": 5}', "output_length=None"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": "x"}', "hash_ids"),
    ],
)
def test_a_wrong_line_is_named(line: str, words: str, tmp_path: Path) -> None:
    good = json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1})
    (tmp_path / "t.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(TraceError, match=words):
        read_trace(tmp_path / "t.jsonl")


def test_no_file_and_no_request_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="has no request"):
        read_trace(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    "fields", [{"num_requests": 0}, {"tail": 0.0}, {"short_share": 1.5}, {"least_tokens": 10, "most_tokens": 5}]
)
def test_impossible_recipes_are_refused(fields: dict) -> None:
    with pytest.raises(TraceError, match=next(iter(fields))):
        TraceRecipe(**fields)


def test_the_script_writes_equal_bytes_for_a_seed(tmp_path: Path) -> None:
    written = []
    for name in ("a.jsonl", "b.jsonl"):
        command = [sys.executable, "-P", SCRIPT, tmp_path / name, "--requests", "20", "--seed", "5", "--most", "70000"]
        subprocess.run([str(part) for part in command], check=True, capture_output=True, timeout=60)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1]
    assert max(request.input_tokens for request in read_trace(tmp_path / "a.jsonl")) <= 70_000
