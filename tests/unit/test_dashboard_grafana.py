"""What collects and shows the metrics asks for metrics that there are, by labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from longprefill.orchestrator.controller.metrics import Metrics

REPOSITORY = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((REPOSITORY / "deploy" / "grafana" / "longprefill.json").read_text(encoding="utf-8"))
GUIDE = (REPOSITORY / "docs" / "guide" / "operate.md").read_text(encoding="utf-8")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
ADDED = {"job", "instance", "le"}
"""Labels that Prometheus and its histograms add."""
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]


def exported() -> dict[str, set[str]]:
    """Labels by name of every time series that the service can export."""
    registry = Metrics(1, "model").registry
    labels = {name: set(metric._labelnames) for metric, names in registry._collector_to_names.items() for name in names}  # type: ignore[attr-defined]
    found = {}
    for family in registry.collect():
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = labels[family.name]
    return found


def queries() -> list[str]:
    asked = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
    asked += [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    return asked + [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]


def unknown(query: str) -> set[str]:
    """Names and labels of a query that no metric has."""
    known = exported()
    names = set(re.findall(r"\blongprefill_\w+", query))
    labels = set(re.findall(r'(\w+)\s*(?:=~|!=|=)\s*"', query))
    labels |= {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
    allowed = ADDED.union(*(known.get(name, set()) for name in names))
    return (names - known.keys()) | (labels - allowed)


@pytest.mark.parametrize("query", queries())
def test_every_query_can_be_answered(query: str) -> None:
    assert unknown(query) == set()


def test_wrong_queries_are_noticed() -> None:
    assert unknown("rate(longprefill_tokens[1m])") == {"longprefill_tokens"}
    assert unknown('longprefill_stage_jobs{tenant="a"}') == {"tenant"}
    assert unknown("sum by (group) (longprefill_ttft_seconds_bucket)") == {"group"}


def test_every_metric_is_shown_and_explained() -> None:
    """The dashboard leaves nothing out, and the guide's table names what there is and nothing else."""
    shown = {name for query in queries() for name in re.findall(r"\blongprefill_\w+", query)}
    families = {family.name for family in Metrics(1, "model").registry.collect()}
    assert {name for name in families if not any(found.startswith(name) for found in shown)} == set()
    bases = {name.removesuffix("_total") for name in re.findall(r"^\| `(longprefill_\w+)`", GUIDE, re.MULTILINE)}
    assert bases == families


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], int] = {}
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["id"]) == panel["id"]


def test_the_collector_asks_the_right_address() -> None:
    sample = yaml.safe_load((REPOSITORY / "examples" / "serve" / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = sample["scrape_configs"]
    assert (job["metrics_path"], job["authorization"]["type"]) == ("/metrics", "Bearer")
