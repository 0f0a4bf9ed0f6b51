"""The service as its operator sees it: refused starts, kills, two prefill groups over two Ray nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from longprefill.orchestrator.config_file import read_service_config
from longprefill.orchestrator.service_checks import check_service
from longprefill.partition.errors import UserError

from .support.command import running
from .support.models import make_model

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = """
[model]
dir = "{model}"
[service]
state_dir = "{state}"
port = 0
[[prefill]]
dtype = "fp32"
{prefill}
[[decode]]
max_tokens = 2048
"""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_controller_loses_nothing(tmp_path: Path) -> None:
    """The small form of scripts/chaos_service."""
    report = tmp_path / "report.json"
    wanted = ["--jobs", "20", "--max-prompt", "512", "--kills", "1", "--no-cluster-kill", "--limit", "240"]
    result = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "chaos_service", *wanted, "--json", report, "--keep", tmp_path / "x"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    assert found["findings"] == []
    assert [kill["what"] for kill in found["kills"]] == ["controller"]
    assert sum(found["states"].values()) == 20
    assert found["states"]["done"] >= 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", "longprefill_hybrid")


@pytest.mark.parametrize(
    ("prefill", "said"),
    [
        ("resources = {NPU = 1}", "resources NPU: a service with a Ray of its own has none of that"),
        ("count = 4096", "all pools together need an estimated"),
        ("max_tokens = 4000000000", "needs an estimated"),
        ("tp = 3", "--tp 3 does not divide"),
        ("[scheduler]\nprofile = 'x9'", "profile='x9': device 'x9' is not known"),
        ("[scheduler]\nprofile = 'x9.toml'", "x9.toml"),
    ],
)
def test_what_can_never_work_is_refused_before_anything_starts(
    tmp_path: Path, model: Path, prefill: str, said: str
) -> None:
    file = tmp_path / "service.toml"
    file.write_text(CONFIG.format(model=model, state=tmp_path / "state", prefill=prefill))
    with pytest.raises(UserError) as refused:
        check_service(read_service_config(file))
    assert said in str(refused.value)


def test_a_refused_start_is_one_line_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    (tmp_path / "service.toml").write_text(CONFIG.format(model=model, state="/proc/nothing", prefill=""))
    with running(["serve", "--config", tmp_path / "service.toml"]) as command:
        finished = command.finish()
        assert finished.code == 2
        assert finished.line == "[service] state_dir='/proc/nothing' cannot be used: No such file or directory"
        command.assert_nothing_left()
