"""The service's log: every line one object, with job, group and rank as fields; a full file moves aside."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longprefill.orchestrator import logs
from longprefill.orchestrator.config import ConfigError, ServiceSection

JOB = "job-0123456789abcdef01234567"
HOSTS = ("prefill-1", "prefill-10", "decode-0")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    found = logging.getLogger()
    handlers, level = found.handlers[:], found.level
    found.handlers = []
    yield found
    for handler in found.handlers:
        handler.close()
    found.handlers, found.level = handlers, level


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_object_a_line(root: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logs" / "controller.log"
    logs.log_to_file(path, "json", HOSTS)
    logger = logging.getLogger("longprefill.orchestrator.controller.core")
    logger.info("job %s: failed: prefill-10 rank 3 ended: two\nlines é", JOB)
    logger.debug("not this")
    try:
        raise ValueError("a bug")
    except ValueError:
        logger.exception("it went wrong on decode-01")
    first, second = lines(path)
    assert first["message"] == f"job {JOB}: failed: prefill-10 rank 3 ended: two\nlines é"
    assert (first["job"], first["group"], first["rank"], first["level"]) == (JOB, "prefill-10", 3, "info")
    assert first["time"].endswith("+00:00")
    assert first["logger"] == logger.name
    assert "ValueError: a bug" in second["exception"]
    assert {"job", "group", "rank"} & second.keys() == set(), "decode-01 is not a host"
    shown = capfd.readouterr().err
    assert "it went wrong" in shown
    assert JOB not in shown, "standard error has warnings only"


def test_text_and_full_files(root: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 2000)
    logs.log_to_file(tmp_path / "controller.log", "text", HOSTS)
    for number in range(200):
        root.info("job %s: state %d", JOB, number)
    files = sorted(tmp_path.iterdir())
    assert len(files) == logs.NUM_OLD + 1
    assert all(file.stat().st_size <= 2000 for file in files)
    assert (tmp_path / "controller.log").read_text().splitlines()[-1].endswith(f"INFO root job {JOB}: state 199")


def test_a_log_without_a_place(root: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    logs.log_to_file(tmp_path / "file" / "controller.log", "json", ())
    root.info("it goes on")
    warning, line = (json.loads(found) for found in capfd.readouterr().err.splitlines())
    assert "cannot be written" in warning["message"]
    assert line["message"] == "it goes on"


def test_formats() -> None:
    assert ServiceSection(state_dir="state", log_format="json").log_format == "json"
    with pytest.raises(ConfigError, match="log_format='xml': use text or json"):
        ServiceSection(state_dir="state", log_format="xml")
