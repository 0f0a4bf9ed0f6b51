"""The rules of lint, import arrows and file layout: they hold, and breaking one is noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("partition", "kernels", "comms", "workers", "orchestrator")
TOOLS = Path(sys.executable).parent


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """The command's exit code and output, without raising."""
    options = {"capture_output": True, "text": True, "timeout": 100, "check": False} | options
    return subprocess.run([str(part) for part in command], **options)  # type: ignore[call-overload]


def lint(code: str, path: str) -> str:
    """What ruff says about `code` if it stood at `path`, without the rules that a one-line example breaks anyhow."""
    ruff = [TOOLS / "ruff", "check", "--output-format=concise", "--ignore=F401,I001", f"--stdin-filename={path}", "-"]
    return run(*ruff, input=code, cwd=REPOSITORY).stdout


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("form", ["import {root}\n", "from {root}.sub import name\n"])
def test_bare_imports_are_banned(root: str, form: str) -> None:
    assert "TID251" in lint(form.format(root=root), "workers/example.py")


@pytest.mark.parametrize("code", ["from .layout import Layout\n", "from longprefill.partition.layout import Layout\n"])
def test_proper_imports_are_allowed(code: str) -> None:
    assert "All checks passed" in lint(code, "partition/example.py")


def test_relative_imports_across_folders_are_banned() -> None:
    assert "TID252" in lint("from ..partition import layout\n", "workers/example.py")


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("partition", "kernels"),
        ("kernels", "comms"),
        ("comms", "kernels"),
        ("kernels", "workers"),
        ("comms", "workers"),
        ("workers", "orchestrator"),
    ],
)
def test_import_arrows_are_kept(importer: str, imported: str, tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for root in ROOTS:
        folder = tmp_path / "longprefill" / root
        folder.mkdir(parents=True)
        if root != "kernels":
            (folder / "__init__.py").touch()
        (folder / "op").mkdir()
        (folder / "op" / "__init__.py").touch()
        (folder / "op" / "part.py").touch()
    lint_imports = [TOOLS / "lint-imports", "--no-cache", "--no-logo"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    clean = run(*lint_imports, cwd=tmp_path, env=environment)
    assert clean.returncode == 0, clean.stdout + clean.stderr

    (tmp_path / "longprefill" / importer / "op" / "part.py").write_text(f"from longprefill.{imported}.op import part\n")
    broken = run(*lint_imports, cwd=tmp_path, env=environment)
    assert broken.returncode == 1
    assert f"longprefill.{importer} is not allowed to import longprefill.{imported}" in broken.stdout


def test_types_are_checked_in_every_root(tmp_path: Path) -> None:
    """pyright passes when it finds no file at all, so a wrong `include` would go unnoticed."""
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / ".venv").symlink_to(TOOLS.parent)
    (tmp_path / "build" / "typing" / "longprefill").mkdir(parents=True)
    for root in ROOTS:
        (tmp_path / root).mkdir()
        (tmp_path / root / "part.py").write_text('number: int = "text"\n')
        (tmp_path / "build" / "typing" / "longprefill" / root).symlink_to(tmp_path / root)
    result = run(TOOLS / "pyright", cwd=tmp_path, env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"})
    assert result.returncode == 1
    assert f"{len(ROOTS)} errors" in result.stdout


def test_no_init_where_it_would_shadow() -> None:
    assert not (REPOSITORY / "kernels" / "__init__.py").exists(), "it would shadow Hugging Face's `kernels`"
    assert not list((REPOSITORY / "tests").rglob("__init__.py")), "tests would be importable under a second name"


def test_every_other_package_folder_has_an_init() -> None:
    folders = {path.parent for root in ROOTS for path in (REPOSITORY / root).rglob("*.py")} - {REPOSITORY / "kernels"}
    missing = sorted(str(folder.relative_to(REPOSITORY)) for folder in folders if not (folder / "__init__.py").exists())
    assert missing == []


PYTHON_LINE = """#!/usr/bin/env -S bash -c 'source "$(dirname "$0")/venv.sh" && exec "$VENV/bin/python" "$0" "$@"'"""
"""Runs the script in the checkout's own environment, which is made if need be: there is nothing to activate."""


def scripts() -> list[Path]:
    return sorted(
        path for path in (REPOSITORY / "scripts").iterdir() if path.is_file() and not path.name.startswith(".")
    )


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.name)
def test_script_is_executable_and_explains_itself(script: Path) -> None:
    first_line = script.read_text(encoding="utf-8").partition("\n")[0]
    assert first_line in ("#!/usr/bin/env bash", PYTHON_LINE)
    assert os.access(script, os.X_OK)
    result = run(script, "--help", cwd=REPOSITORY.parent)
    assert result.returncode == 0, result.stderr
    assert script.name in result.stdout


@pytest.mark.slow
def test_wheel_holds_the_checkout_and_works_without_it() -> None:
    result = run(REPOSITORY / "scripts" / "check_wheel")
    assert result.returncode == 0, result.stdout + result.stderr
