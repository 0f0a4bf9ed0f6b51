"""`bench needle` and scripts/ask_needles from end to end with the trained model, two ranks, hand-off and decode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .support.command import run

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "needle"


def test_bench_needle_writes_figures_and_pictures(tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("needle.json", "needle.svg", "needle.png")]
    finished = run(
        "bench", "needle", "--model", MODEL, "--lengths", "4096", "--needles", "1", "--absent", "6", "--cp", "2",
        "--step-tokens", "1024", "--latent-format", "fp8", "--index-format", "mxfp8",
        "--json", outputs[0], "--svg", outputs[1], "--png", outputs[2],
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert "4096 tokens in" in finished.err
    report = json.loads(outputs[0].read_text())
    assert report["settings"]["latent_format"] == "fp8"
    assert len(report["cells"]) == 20
    totals = {total["task"]: total for total in report["totals"] if "gap" not in total}
    assert {task: total["asked"] for task, total in totals.items()} == {"plain": 10, "section": 10, "absent": 6}
    num_right = sum(total["right"] for total in totals.values())
    assert num_right == 26 - len(report["wrong"])
    assert num_right >= 18
    assert outputs[1].read_text().startswith("<svg")
    assert outputs[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.extended
def test_a_document_with_facts_over_every_cut_is_asked(tmp_path: Path) -> None:
    command = [
        sys.executable, ROOT / "scripts" / "ask_needles", "--tokens", "8192", "--step-tokens", "4096", "--cp", "2",
        "--json", tmp_path / "report.json",
    ]  # fmt: skip
    finished = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=200, check=False)
    assert finished.returncode == 0, finished.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["mesh"]["cp"] == 2
    assert report["ttft_s"] > report["prefill_s"] > 0
    assert report["handoff"]["bytes"] > 0
    assert sorted({one["cut"] for one in report["answers"] if one["cut"] > 0}) == list(range(1024, 8192, 1024))
    assert report["text"] == report["answers"][0]["answer"]
    assert sum(one["right"] for one in report["answers"]) >= 0.6 * len(report["answers"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "100"), "--lengths 100: 10 depths with gaps up to 128 need at least"),
        (("--lengths", "4096,no"), "--lengths '4096,no': 'no' is no number"),
        (("--model", "/nowhere"), "model directory /nowhere does not exist"),
        (("--cp", "0"), "--cp 0: use 1 to 1024 context-parallel ranks"),
        (("--json", "/nowhere/file"), "--json /nowhere/file cannot be written"),
    ],
)
def test_wrong_calls_end_with_one_line(arguments: tuple[str, ...], message: str) -> None:
    options = () if "--model" in arguments else ("--model", str(MODEL))
    finished = run("bench", "needle", *options, *arguments)
    assert finished.code == 2
    assert message in finished.line
