"""What every test runs under: poisoned memory, one torch thread, repeatable examples, no module imported twice."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parent.parent
ROOTS = ("partition", "kernels", "comms", "workers", "orchestrator")

# Shared cores make any time limit a coin toss. In CI every run draws the same examples, so that red means a change.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """`allocate` with every byte of its result set to 0xFF: NaN in all float formats, -1 or the maximum in integers."""
    import torch

    def allocate_poisoned(*args: Any, **kwargs: Any) -> Any:
        tensor = allocate(*args, **kwargs)
        if tensor.is_meta or kwargs.get("out") is not None:
            return tensor
        if tensor.dtype == torch.bool:  # a bool byte other than 0 and 1 is undefined behaviour in torch itself
            return tensor.fill_(True)
        tensor.untyped_storage().fill_(0xFF)
        return tensor

    return allocate_poisoned


@pytest.fixture(autouse=True)
def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote reads as NaN, not as the zeros that a fresh process happens to get.

    Tests that don't need torch never import it here; a module that needs it has imported it when it was collected.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Test workers share the cores, and results must not depend on how many threads a reduction was split over."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def floats_stay_floats() -> Iterator[None]:
    """A test that leaves its thread flushing denormals to zero would turn others red, far away from it."""
    yield
    if sys.float_info.min / 2 == 0.0:
        sys.modules["torch"].set_flush_denormal(False)
        pytest.fail("the test left denormals flushed: workers/prefill.py flushes them for the length of a step")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Ray go first, all to one of two processes, while the other has the rest: last they would run
    alone, and side by side they would take each other's cores."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)


def bare_modules() -> list[str]:
    """Modules of this checkout that were imported without `longprefill.` in front: second copies with own globals."""
    found = []
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] not in ROOTS:
            continue
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
        if any(place and Path(place).resolve().is_relative_to(REPOSITORY) for place in places):
            found.append(name)
    return found


@pytest.fixture(autouse=True, scope="session")
def no_bare_modules() -> Iterator[None]:
    """Fails the session when anything was imported under a bare root name."""
    yield
    found = bare_modules()
    if found:
        pytest.fail(f"imported without `longprefill.` in front, so a second copy exists: {', '.join(found)}")
