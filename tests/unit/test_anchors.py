"""Published figures, predicted by the cost model from published inputs."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from longprefill.orchestrator.anchors import checks
from longprefill.orchestrator.anchors.checks import RATE_POINT, RING_POINTS, bound_of, kda_anchors, meta_anchors

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ring_point", RING_POINTS)
def test_context_parallelism_of_meta_after_one_calibration_point(ring_point: tuple[int, int]) -> None:
    predicted = [anchor for anchor in meta_anchors(ring_point) if not anchor.is_fitted]
    assert len(predicted) == 9
    for anchor in predicted:
        assert abs(anchor.error) <= 0.09 <= bound_of(anchor), (anchor.what, anchor.error)


@pytest.mark.parametrize("ring_point", RING_POINTS)
def test_context_parallelism_of_meta_after_two(ring_point: tuple[int, int]) -> None:
    anchors = meta_anchors(ring_point, RATE_POINT)
    predicted = {anchor.what: anchor for anchor in anchors if not anchor.is_fitted}
    assert len(predicted) == 8
    assert {"128K tokens, 2 machines", "128K tokens, 4 machines", "128K tokens, 8 machines"} <= set(predicted)
    for anchor in predicted.values():
        assert abs(anchor.error) <= 0.05 <= bound_of(anchor), (anchor.what, anchor.error)
    fitted = [anchor for anchor in anchors if anchor.is_fitted]
    assert [anchor.error for anchor in fitted] == pytest.approx([0, 0], abs=1e-6)


def test_without_the_rings_cost_many_machines_are_wrong() -> None:
    """The check can fail: one number for all is not enough."""
    errors = {anchor.what: anchor.error for anchor in meta_anchors(None, RATE_POINT)}
    assert errors["128K tokens, 2 machines"] == pytest.approx(0, abs=0.02)
    assert errors["128K tokens, 16 machines"] < -0.2


def test_flash_kda_by_heads() -> None:
    anchors = kda_anchors()
    assert [anchor.what for anchor in anchors if anchor.is_fitted] == ["12 heads"]
    assert all(abs(anchor.error) <= 0.05 for anchor in anchors)


@pytest.mark.parametrize("efficiency", [0.7, 0.9])
def test_flash_kda_does_not_hang_on_the_assumed_bandwidth(efficiency: float, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = checks.published()
    facts["flash_kda"]["memory_efficiency"] = efficiency
    monkeypatch.setattr(checks, "published", lambda: facts)
    assert all(abs(anchor.error) <= 0.06 for anchor in kda_anchors())


def test_the_table_is_up_to_date() -> None:
    path = REPOSITORY / "scripts" / "verify_anchors"
    loader = importlib.machinery.SourceFileLoader("verify_anchors", str(path))
    spec = importlib.util.spec_from_loader("verify_anchors", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    assert (REPOSITORY / "docs/benchmarks/anchors.md").read_text(encoding="utf-8") == module.report()
