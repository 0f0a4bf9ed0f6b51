"""`longprefill bench --calibrate` as a command: a small budget gives a profile with which the cost model works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longprefill.orchestrator.costs.placement import Placement
from longprefill.orchestrator.costs.profile_file import read_profile
from longprefill.orchestrator.costs.step import StepCosts
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.shapes import model_shape
from longprefill.partition.layout import Slice
from longprefill.workers.model.families.registry import config_from
from longprefill.workers.model.sizes import RAW_CONFIGS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from longprefill.orchestrator.cli import main; main()"
    command = [sys.executable, "-P", "-c", code, "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_small_budget_gives_a_profile_that_the_cost_model_takes(tmp_path: Path) -> None:
    family = ("longprefill_hybrid", "tiny")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(RAW_CONFIGS[family]))
    file = tmp_path / "here.json"
    found = bench("--calibrate", str(file), "--model", str(tmp_path / "model"), "--seconds", "1", "--longest", "2048")
    assert found.returncode == 0, found.stderr
    profile = read_profile(file)
    assert {table.copies for table in profile.tables} == {1, 2}
    assert {link.pattern for link in profile.links} == {"all_gather", "exchange", "send", "transport"}
    assert profile.overheads.step_s > 0
    shape = model_shape(config_from(RAW_CONFIGS[family]), ClusterSettings(model_dir=""))
    for cp in (1, 2):
        costs = StepCosts(shape, Placement(cp=cp, tp=1, cp_per_node=cp, profiles=(profile,)))
        short, long = (costs.step([Slice(job=0, start=0, end=n)], "zigzag", num_ending=1) for n in (256, 4096))
        assert 0 < short.seconds < long.seconds
        assert sum(long.parts.values()) == pytest.approx(long.seconds)
        assert "rate" not in costs.coverage()


def test_calibration_takes_no_command() -> None:
    found = bench("--calibrate", "x.json", "needle")
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
