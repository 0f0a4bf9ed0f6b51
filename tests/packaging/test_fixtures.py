"""The fixtures of tests/conftest.py do what they are for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
FLOATS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fresh_floats_are_nan(dtype: torch.dtype) -> None:
    fresh = [torch.empty(3, 2, dtype=dtype), torch.empty((), dtype=dtype), torch.zeros(5).new_empty(4, dtype=dtype)]
    fresh += [torch.empty_like(fresh[0]), torch.empty_strided((2, 2), (4, 1), dtype=dtype)]
    assert all(tensor.float().isnan().all() for tensor in fresh)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_fresh_integers_are_all_ones(dtype: torch.dtype) -> None:
    fresh = torch.empty(7, dtype=dtype)
    assert (fresh.view(torch.uint8) == 0xFF).all()


def test_poison_leaves_given_memory_and_empty_shapes_alone() -> None:
    given = torch.zeros(4)
    torch.empty(2, out=given[:2])
    assert torch.equal(given, torch.zeros(4))
    assert torch.empty(0, 3).shape == (0, 3)
    assert torch.empty(2, device="meta").is_meta


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1


def run_session(folder: Path, test: str) -> subprocess.CompletedProcess[str]:
    """A pytest session of its own over one test file, in a folder that looks like a checkout of ours."""
    (folder / "tests").mkdir()
    (folder / "kernels").mkdir()
    (folder / "kernels" / "op.py").touch()
    shutil.copy(CONFTEST, folder / "tests")
    (folder / "tests" / "test_it.py").write_text(test)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "tests"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_bare_root_fails_the_session(tmp_path: Path) -> None:
    test = f"import sys\ndef test_it():\n    sys.path.insert(0, {str(tmp_path)!r})\n    import kernels.op\n"
    result = run_session(tmp_path, test)
    assert result.returncode == 1
    assert "a second copy exists: kernels, kernels.op" in result.stdout


def test_tests_that_need_no_torch_load_none(tmp_path: Path) -> None:
    result = run_session(tmp_path, "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    assert result.returncode == 0, result.stdout
