"""scripts/venv.sh: refuses what cannot work in one sentence, and leaves a current environment alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that holds only what venv.sh reads."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "venv.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


def write_program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def run_venv(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(checkout / "scripts" / "venv.sh")]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=os.environ | environment
    )


def fake_python(checkout: Path, log: Path, *, pip_status: int = 0) -> Path:
    """An interpreter that makes `.venv` by copying itself into it, and writes down what pip is asked for."""
    body = f"""case "$*" in
        --version) echo "Python 3.11.9" ;;
        "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
        "-m pip"*) echo "$*" >>{log}; echo "no such package"; exit {pip_status} ;;
    esac"""
    return write_program(checkout / "fake" / "python", body)


def test_too_old_python_is_refused(checkout: Path) -> None:
    old = write_program(checkout / "old", 'case "$1" in --version) echo "Python 3.9.2" ;; *) exit 1 ;; esac')
    result = run_venv(checkout, PYTHON=str(old))
    assert result.returncode == 1
    assert "Python 3.9.2 is too old: longprefill needs Python 3.11 or later" in result.stderr
    assert not (checkout / ".venv").exists()


def test_absent_python_is_refused(checkout: Path) -> None:
    result = run_venv(checkout, PYTHON="python-that-is-not-there")
    assert result.returncode == 1
    assert "python-that-is-not-there is not on the path" in result.stderr


def test_absent_compiler_is_a_warning(checkout: Path, tmp_path: Path) -> None:
    python = fake_python(checkout, tmp_path / "pip.log")
    result = run_venv(checkout, PYTHON=str(python), CXX="compiler-that-is-not-there")
    assert result.returncode == 0
    assert "warning: no C++ compiler (compiler-that-is-not-there)" in result.stderr


def test_every_install_is_constrained_and_only_changes_cause_one(checkout: Path, tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    environment = {"PYTHON": str(fake_python(checkout, log)), "CXX": "sh"}
    assert run_venv(checkout, **environment).returncode == 0
    calls = log.read_text().splitlines()
    assert len(calls) == 2
    assert all(f"--constraint {checkout}/constraints.txt" in call for call in calls)
    assert f"--no-build-isolation --editable {checkout}[serve,dev]" in calls[1]

    second = run_venv(checkout, **environment)
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert len(log.read_text().splitlines()) == 2

    (checkout / "constraints.txt").write_text("torch==2.13.0\n")
    assert run_venv(checkout, **environment).returncode == 0
    assert len(log.read_text().splitlines()) == 4


def test_failed_install_is_reported_and_tried_again(checkout: Path, tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    environment = {"PYTHON": str(fake_python(checkout, log, pip_status=1)), "CXX": "sh"}
    for tries in (1, 2):
        result = run_venv(checkout, **environment)
        assert result.returncode == 1
        assert "no such package" in result.stderr
        assert "the installation failed" in result.stderr
        assert len(log.read_text().splitlines()) == tries
