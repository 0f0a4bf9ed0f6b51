"""Spoiled requests, fewer than scripts/fuzz_service sends, and schemathesis against the OpenAPI document."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from . import api_fuzz
from .api_double import ControllerDouble
from .api_running import Running
from .api_support import model_dir

MAX_GROWTH_BYTES = 32 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.getbasetemp())


def test_spoiled_requests_are_refused(directory: Path) -> None:
    report = asyncio.run(api_fuzz.fuzz(directory, 1000, seed=7))
    assert report.failures == []
    assert report.num_tasks_left == 0
    assert report.grown_bytes < MAX_GROWTH_BYTES
    assert {200, 202, 400, 403, 404, 405, 413, 415} <= set(report.statuses)


def test_a_bug_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ControllerDouble, "inspect", broken)
    report = asyncio.run(api_fuzz.fuzz(directory, 200, seed=7))
    assert report.statuses[500] > 0
    assert any("ZeroDivisionError" in failure for failure in report.failures)


def test_schemathesis(directory: Path, tmp_path: Path) -> None:
    running = Running(directory, max_new_tokens=1000)
    program = Path(sys.executable).with_name("st")
    options = ["--phases", "fuzzing", "--max-examples", "4", "--seed", "1", "--request-timeout", "20", "--no-color"]
    try:
        run = subprocess.run(
            [program, "run", f"{running.url}/openapi.json", *options],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    finally:
        running.close()
    assert run.returncode == 0, run.stdout
    assert "Tested: 16" in run.stdout
