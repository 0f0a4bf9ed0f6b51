"""Planning runs where neither torch nor ray is installed."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import longprefill.partition

MODULES = sorted(module.name for module in pkgutil.iter_modules(longprefill.partition.__path__))


def test_every_module_is_covered() -> None:
    assert {"generators", "halo", "layout", "restore", "shapes", "steps", "traffic", "work"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_importing_partition_brings_in_no_heavy_package(module: str) -> None:
    script = (
        f"import sys, longprefill.partition.{module}\n"
        "heavy = sorted({'torch', 'ray', 'numpy'} & set(sys.modules))\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
