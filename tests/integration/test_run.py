"""`longprefill run` from end to end: what it prints and writes, on both families, for any number of ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.generators import generate
from longprefill.partition.layout import Slice
from longprefill.partition.traffic import step_traffic
from longprefill.partition.work import imbalance
from longprefill.workers.model.config import KdaConfig, MlaConfig
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.tokenizer import Tokenizer

from .support.command import Finished, run
from .support.models import make_model, random_tokens, relative_error, single_process_tensors

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NUM_TOKENS = 1102  # the last pool of index keys is incomplete
STEP_TOKENS = 512
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Run:
    finished: Finished
    report: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    events: list[dict[str, Any]]


def run_with_outputs(
    directory: Path, *arguments: object, stdin: bytes | None = None, environment: Mapping[str, str] | None = None
) -> Run:
    outputs = [directory / name for name in ("report.json", "dump.safetensors", "trace.json")]
    options = ["--json", outputs[0], "--dump", outputs[1], "--trace", outputs[2]]
    finished = run("run", *arguments, *options, stdin=stdin, environment=environment)
    assert finished.code == 0, finished.err
    return Run(
        finished=finished,
        report=json.loads(outputs[0].read_text()),
        tensors=load_file(outputs[1]),
        events=json.loads(outputs[2].read_text())["traceEvents"],
    )


# ---- the target architecture with pooled index keys, two ranks, three steps -----------------------------------------


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "hybrid", "longprefill_hybrid", index_kpool=4, eos=[2])


@pytest.fixture(scope="module")
def hybrid_run(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("hybrid")
    np.save(directory / "prompt.npy", random_tokens(NUM_TOKENS))
    return run_with_outputs(
        directory, "--model", hybrid, "--prompt", directory / "prompt.npy", "--cp", 2, "--dtype", "fp32",
        "--step-tokens", STEP_TOKENS, "--max-new-tokens", 6,
    )  # fmt: skip


def test_report_of_the_run(hybrid_run: Run, hybrid: Path) -> None:
    report = hybrid_run.report
    assert report["model"]["family"] == "longprefill_hybrid"
    assert len(report["model"]["fingerprint"]) == 16
    assert report["mesh"] == {"cp": 2, "tp": 1, "device": "cpu", "backend": report["mesh"]["backend"]}
    assert report["mesh"]["backend"]
    assert report["prompt_tokens"] == NUM_TOKENS
    assert [(step["start"], step["tokens"]) for step in report["steps"]] == [(0, 512), (512, 512), (1024, 78)]
    assert report["prefill_s"] == pytest.approx(sum(step["seconds"] for step in report["steps"]), rel=0.05)
    assert report["ttft_s"] >= report["prefill_s"] > 0
    assert report["startup_s"] > 0
    assert len(report["peak_rss_bytes"]) == 2
    assert all(1 << 26 < size < 1 << 32 for size in report["peak_rss_bytes"])
    assert 1 <= len(report["output_tokens"]) <= 6
    assert report["text"] == Tokenizer(hybrid).decode(report["output_tokens"])
    assert hybrid_run.finished.out == report["text"] + "\n"


def test_hand_off_in_the_report(hybrid_run: Run, hybrid: Path) -> None:
    handoff = hybrid_run.report["handoff"]
    expected = sum(
        tensor.nbytes for name, tensor in hybrid_run.tensors.items() if name.endswith(("state", "conv", "logits"))
    )
    assert handoff["bytes"] > expected  # and the pages
    assert handoff["seconds"] >= handoff["exposed_s"] >= 0
    assert handoff["seconds"] >= hybrid_run.report["prefill_s"] * 0.9


def layouts() -> list[Any]:
    borders = [*range(0, NUM_TOKENS, STEP_TOKENS), NUM_TOKENS]
    return [generate("zigzag", (Slice(job=0, start=start, end=end),), 2) for start, end in pairwise(borders)]


def test_bytes_are_those_of_the_model(hybrid_run: Run, hybrid: Path) -> None:
    shape = model_shape(read_config(hybrid), ClusterSettings(model_dir=str(hybrid), cp=2, dtype="fp32"))
    counted: dict[str, int] = {}
    for layout in layouts():
        for operation, ranks in step_traffic(layout, shape, "all_gather").items():
            counted[operation] = counted.get(operation, 0) + sum(traffic.sent_bytes for traffic in ranks)
    names = {
        "kda_halo": "halo",
        "kda_summaries": "kda_states",
        "cache_rows": "cache_rows",
        "boundary_state": "boundary",
    }
    sent = {names[op]: count["bytes"] for op, count in hybrid_run.report["comm"].items()}
    # the work model gives every token its part of a pooled key, a step sends whole keys: less than one key a step apart
    surplus = counted.pop("cache_rows") - sent.pop("cache_rows")
    assert 0 <= surplus < 16 * 4 * len(layouts())
    assert sent == counted
    assert all(count["calls"] >= 1 for count in hybrid_run.report["comm"].values())


def test_imbalance_is_that_of_the_model(hybrid_run: Run, hybrid: Path) -> None:
    shape = model_shape(read_config(hybrid), ClusterSettings(model_dir=str(hybrid), cp=2, dtype="fp32"))
    assert hybrid_run.report["imbalance"] == pytest.approx(imbalance(layouts(), shape, "all_gather")._asdict())
    assert all(value >= 1 for value in hybrid_run.report["imbalance"].values())


def test_dump_has_the_named_tensors(hybrid_run: Run, hybrid: Path) -> None:
    config = read_config(hybrid)
    shapes: dict[str, tuple[int, ...]] = {"logits": (config.vocab_size,)}
    for layer, spec in enumerate(config.layers):
        mixer = spec.mixer
        if isinstance(mixer, KdaConfig):
            shapes[f"layers.{layer}.state"] = (mixer.num_value_heads, mixer.key_dim, mixer.value_dim)
            shapes[f"layers.{layer}.conv"] = (mixer.conv_width - 1, mixer.conv_channels)
        elif isinstance(mixer, MlaConfig):
            shapes[f"layers.{layer}.latent"] = (NUM_TOKENS, mixer.kv_lora_rank + mixer.rope_dim)
            assert mixer.indexer is not None
            assert mixer.indexer.pool == 4
            shapes[f"layers.{layer}.index_key"] = (NUM_TOKENS, mixer.indexer.head_dim)
    assert {name: tuple(tensor.shape) for name, tensor in hybrid_run.tensors.items()} == shapes
    assert all(tensor.dtype == torch.float32 for tensor in hybrid_run.tensors.values())


def test_dump_equals_one_process(hybrid_run: Run, hybrid: Path) -> None:
    reference = single_process_tensors(hybrid, random_tokens(NUM_TOKENS))
    errors = {name: relative_error(tensor, reference[name]) for name, tensor in hybrid_run.tensors.items()}
    assert max(errors.values()) < TOLERANCE, errors


def test_trace_shows_every_rank(hybrid_run: Run) -> None:
    names = {event["pid"]: event["args"]["name"] for event in hybrid_run.events if event["name"] == "process_name"}
    spans = [event for event in hybrid_run.events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    for pid, name in names.items():
        categories = {event["cat"] for event in spans if event["pid"] == pid}
        expected = {"layer", "kernel"} if name == "decode worker" else {"layer", "kernel", "collective", "wait"}
        assert expected <= categories, name
    assert sorted(names.values()) == ["decode worker", "prefill rank 0", "prefill rank 1"]
    layers = {event["args"]["layer"] for event in spans if event["cat"] == "layer"}
    assert layers == {0, 1, 2, 3}


def test_progress_and_table_go_to_standard_error(hybrid_run: Run) -> None:
    err = hybrid_run.finished.err
    assert "1,102/1,102 tokens" in err
    assert "time to first token" in err
    assert "ray" not in err.lower()
    assert "Warning" not in err


# ---- a published family against its published code, on one, two and three ranks -------------------------------------


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # every other token ends the text, so that a sampled run ends by one of them
    return make_model(tmp_path_factory.mktemp("models") / "kimi", "kimi_linear", eos=list(range(1, 512, 2)))


PROMPT = random_tokens(500, seed=5)


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.extended)])
def kimi_run(request: pytest.FixtureRequest, kimi: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The prompt comes another way each time: standard input, .json, .ids."""
    directory = tmp_path_factory.mktemp("kimi")
    lines = "\n".join(map(str, PROMPT))
    (directory / "prompt.json").write_text(json.dumps(PROMPT.tolist()))
    (directory / "prompt.ids").write_text(lines)
    source = {1: "-", 2: directory / "prompt.json", 3: directory / "prompt.ids"}[request.param]
    return run_with_outputs(
        directory, "--model", kimi, "--prompt", source, "--cp", request.param, "--dtype", "fp32", "--step-tokens", 192,
        "--max-new-tokens", 40, "--temperature", 0.9, "--top-p", 0.95, "--seed", 11,
        stdin=lines.encode() if source == "-" else None,
        environment={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def sampled() -> dict[str, list[int]]:
    """Tokens of the first run, that the others must repeat."""
    return {}


def test_logits_are_those_of_transformers(kimi_run: Run, kimi: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(kimi, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(PROMPT)[None]).logits[0, -1]
    assert relative_error(kimi_run.tensors["logits"], logits) < TOLERANCE


def test_a_seed_samples_the_same_tokens_on_any_mesh(kimi_run: Run, sampled: dict[str, list[int]]) -> None:
    tokens = kimi_run.report["output_tokens"]
    assert tokens == sampled.setdefault("tokens", tokens)


def test_generation_ends_with_the_end_of_text(kimi_run: Run) -> None:
    tokens = kimi_run.report["output_tokens"]
    assert tokens[-1] % 2 == 1
    assert all(token % 2 == 0 for token in tokens[:-1])
    assert len(tokens) < 40


# ---- quantized caches, stop text, no tokenizer ----------------------------------------------------------------------


def test_quantized_caches_and_a_stop_text(hybrid: Path, tmp_path: Path) -> None:
    """In surroundings that Ray minds: no home to write to, the address of a Ray that is none of ours."""
    model = shutil.copytree(hybrid, tmp_path / "model")
    (model / "tokenizer.json").unlink()
    (tmp_path / "prompt.txt").write_text("\n".join(map(str, random_tokens(300))) + "\n")
    finished = run(
        "run", "--model", model, "--prompt", tmp_path / "prompt.txt", "--cp", 2, "--latent-format", "fp8",
        "--index-format", "mxfp8", "--layout", "contiguous", "--max-new-tokens", 40, "--stop", "\n",
        "--json", tmp_path / "report.json",
        environment={"HOME": "/proc/none", "RAY_ADDRESS": "192.0.2.1:6379"},
    )  # fmt: skip
    assert finished.code == 0, finished.err
    report = json.loads((tmp_path / "report.json").read_text())
    # without a tokenizer every token is a line of its own, so the first one ends it
    assert len(report["output_tokens"]) == 1
    assert report["text"] == str(report["output_tokens"][0])
    assert finished.out == report["text"] + "\n"
