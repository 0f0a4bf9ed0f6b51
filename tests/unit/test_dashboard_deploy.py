"""What operators are given fits the service: the guide names its keys, the manifest has its nodes, files exist."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from longprefill.orchestrator import config
from longprefill.orchestrator.config_file import read_service_config
from longprefill.orchestrator.placement import demands, unsatisfiable

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDE = REPOSITORY / "docs" / "guide" / "operate.md"
SECTIONS = {
    "`[model]`": config.ModelSection,
    "`[service]`": config.ServiceSection,
    "`[tls]`": config.TlsSection,
    "`[auth]`": config.ApiKey,
    "`[[prefill]]`": config.PrefillPool,
    "`[[decode]]`": config.DecodePool,
    "`[scheduler]`": config.SchedulerSection,
}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_guide_names_every_key(title: str) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    parts = re.split(r"^(`\[+\w+\]+`)", text.partition("## Configuration")[2].partition("## Dashboard")[0], flags=re.M)
    part = dict(zip(parts[1::2], parts[2::2], strict=True))[title]
    named = set(re.findall(r"`(\w+)`", part))
    assert {field.name for field in fields(SECTIONS[title])} - named == set()
    keys = {name for row in re.findall(r"^\|([^|]+)\|", part, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert keys - {field.name for field in fields(SECTIONS[title])} == set(), "a key that there is not"


@pytest.mark.parametrize(("document", "least"), [(GUIDE, 10), (GUIDE.with_name("service.md"), 2)])
def test_the_guides_link_to_what_there_is(document: Path, least: int) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert len(links) >= least
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_files_that_are_named_exist() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (GUIDE, REPOSITORY / "SECURITY.md"))
    named = re.findall(r"`((?:deploy|docs|examples|orchestrator|scripts|tests)/[\w./-]+)`", text)
    assert len(named) >= 3
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def nodes(manifest: dict[str, Any]) -> list[dict[str, float]]:
    """What Ray will know of the worker groups' nodes."""
    found = []
    for group in manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        given = group["rayStartParams"]
        own = {"CPU": float(given["num-cpus"]), **json.loads(json.loads(given["resources"].strip()))}
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
        found += [own] * group["replicas"]
    return found


def test_the_manifest_holds_the_sample() -> None:
    documents = list(yaml.safe_load_all((REPOSITORY / "deploy" / "kuberay.yaml").read_text(encoding="utf-8")))
    (manifest,) = [document for document in documents if document["kind"] == "RayJob"]
    sample = read_service_config(REPOSITORY / "examples" / "serve" / "cluster.toml")
    have = nodes(manifest)
    assert unsatisfiable(have, demands(sample)) is None
    assert unsatisfiable(have[1:], demands(sample)) is not None, "not one node too many"
    head = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    (container,) = head["spec"]["containers"]
    assert {port["containerPort"] for port in container["ports"]} == {sample.service.port}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert sample.tls is not None
    assert {sample.service.state_dir, sample.model.dir, sample.tls.certificate, sample.tls.key} <= mounts
    (service,) = [document for document in documents if document["kind"] == "Service"]
    assert service["spec"]["selector"] == head["metadata"]["labels"]
