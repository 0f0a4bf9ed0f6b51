"""What must load without torch and ray does, and no root folder can be imported under its bare name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("partition", "kernels", "comms", "workers", "orchestrator")
LIGHT = (
    "partition/**/*.py",
    "workers/model/config*.py",
    "workers/model/parameters.py",
    "orchestrator/config.py",
    "orchestrator/job.py",
    "orchestrator/config_file.py",
    "orchestrator/controller/contract.py",
    "orchestrator/costs/**/*.py",
    "orchestrator/planner/**/*.py",
    "orchestrator/anchors/**/*.py",
    "orchestrator/simulator/**/*.py",
    "orchestrator/scheduler/**/*.py",
    *(f"{root}/**/__init__.py" for root in ROOTS),
)
"""Planning runs where no accelerator library is installed."""


def modules_of(*patterns: str) -> list[str]:
    """Import names of the checkout's modules that match."""
    paths = {path.relative_to(REPOSITORY) for pattern in patterns for path in REPOSITORY.glob(pattern)}
    names = [".".join(("longprefill", *path.with_suffix("").parts)) for path in paths]
    return sorted(name.removesuffix(".__init__") for name in names)


def heavy_imports(modules: list[str]) -> dict[str, list[str]]:
    """Which of torch and ray a fresh interpreter has loaded after each import, one after the other."""
    code = (
        "import importlib, json, sys; found = {}\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    found[name] = sorted({'torch', 'ray'} & sys.modules.keys())\n"
        "print(json.dumps(found))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("pattern", LIGHT)
def test_loads_without_torch_and_ray(pattern: str) -> None:
    modules = modules_of(pattern)
    assert modules, f"{pattern} matches nothing"
    heavy = {module: found for module, found in heavy_imports(modules).items() if found}
    assert not heavy, f"the first of these brings it: {heavy}"


def test_a_heavy_import_is_seen() -> None:
    assert "torch" in heavy_imports(["longprefill.kernels.paged"])["longprefill.kernels.paged"]


@pytest.mark.parametrize("root", ROOTS)
def test_bare_root_cannot_be_imported_in_the_checkout(root: str) -> None:
    code = (
        f"import importlib.util as u; s = u.find_spec({root!r}); print(s and (s.origin, s.submodule_search_locations))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert str(REPOSITORY) not in run.stdout
