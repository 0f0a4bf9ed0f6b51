"""scripts/verify_costs without its runs: calibrations put together, cases predicted, the page that it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from longprefill.orchestrator.costs.profile import DeviceProfile, Link, Overheads, Rate, Table
from longprefill.workers.model.sizes import RAW_CONFIGS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "verify_costs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = SourceFileLoader("verify_costs", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def profile(seconds: float, extra: tuple[tuple[float, ...], ...] = ()) -> DeviceProfile:
    return DeviceProfile(
        name="here",
        source="test",
        memory_bytes_per_s=1e10,
        rates={kind: Rate(flops_per_s=1e12) for kind in ("gemm", "attention", "indexer", "scan", "moe", "memory")},
        tables=(Table(op="ffn.dense", shape={"hidden": 8}, axes=("rows",), points=((64.0, 10.0, seconds), *extra)),),
        links=(Link(pattern="any", scope="node", ranks=2, points=((1024.0, seconds), (4096.0, 2 * seconds))),),
        overheads=Overheads(step_s=seconds, layer_s=0.0, overlap=0.5),
    )


def test_calibrations_are_put_together_point_by_point(script: ModuleType) -> None:
    merged = script.merged([profile(1.0), profile(3.0, ((128.0, 20.0, 5.0),))])
    assert merged.tables[0].points == ((64.0, 10.0, 2.0), (128.0, 20.0, 5.0))
    assert merged.links[0].points == ((1024.0, 2.0), (4096.0, 4.0))
    assert merged.overheads == Overheads(step_s=2.0, layer_s=0.0, overlap=0.5)


def test_a_case_is_compared_and_shown(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW_CONFIGS["longprefill_hybrid", "small"]))
    case = script.Case(model=str(tmp_path), cp=2, tokens=1000, step_tokens=256, seconds=[1.0, 4.0, 2.0])
    case.cpu_seconds = [1.5]
    script.predict(case, profile(1e-6))
    assert case.measured_s == 2.0
    assert case.error == pytest.approx(case.predicted["seconds"] / 2.0 - 1.0)
    assert sum(case.predicted["parts"].values()) == pytest.approx(case.predicted["seconds"])
    assert not case.are_bytes_exact
    case.sent_bytes = dict(case.counted_bytes)
    assert case.are_bytes_exact
    assert set(case.counted_bytes) == {"kda_halo", "kda_summaries", "cache_rows", "boundary_state"}
    load = {"before": (0.5, 0, 0), "after_runs": (1.5, 0, 0)}
    page = script.markdown(script.summary([case], profile(1e-6), load))
    assert f"| `{tmp_path.name}` | 2 | 1,000 | 256 | 2.00 (1.00 to 4.00) | 1.50 |" in page
    assert "| exact |" in page
    case.sent_bytes["kda_halo"] += 1
    assert "| DIFFER |" in script.markdown(script.summary([case], profile(1e-6), load))
