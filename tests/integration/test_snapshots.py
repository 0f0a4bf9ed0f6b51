"""Jobs that go from one mesh to another by a snapshot file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longprefill.orchestrator import LocalCluster
from longprefill.partition.errors import UserError

from .support.clusters import LONG, start, tokens_of
from .support.models import make_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "hybrid", "longprefill_hybrid", index_kpool=4)


@pytest.fixture(scope="module")
def snapshots(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Written by three ranks: half done, done, and what was generated from the done one."""
    directory = tmp_path_factory.mktemp("snapshots")
    with start(model, cp=3) as cluster:
        half = cluster.run_until(LONG, 512)
        cluster.export_job(half.job, directory / "half")
        cluster.close_job(half.job)
        done = cluster.prefill(LONG, max_new_tokens=6)
        cluster.export_job(done.job, directory / "done")
        return {"half": directory / "half", "done": directory / "done", "tokens": tokens_of(cluster, done.job)}


@pytest.fixture(scope="module")
def cluster(snapshots: dict[str, Any], model: Path) -> Iterator[LocalCluster]:
    with start(model, cp=2) as cluster:
        yield cluster


@pytest.mark.parametrize("name", ["half", "done"])
def test_resume_on_another_mesh(cluster: LocalCluster, snapshots: dict[str, Any], name: str) -> None:
    result = cluster.resume(snapshots[name], max_new_tokens=6, handoff=True)
    assert tokens_of(cluster, result.job) == snapshots["tokens"]
    cluster.close_job(result.job)


def test_snapshots_that_cannot_be_used(cluster: LocalCluster, snapshots: dict[str, Any], tmp_path: Path) -> None:
    whole = snapshots["half"].read_bytes()
    (tmp_path / "truncated").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "garbage").write_bytes(b"not a snapshot")
    for name in ("truncated", "garbage", "absent", "."):
        with pytest.raises(UserError, match="snapshot"):
            cluster.resume(tmp_path / name)
    result = cluster.resume(snapshots["half"], max_new_tokens=6, handoff=True)
    assert tokens_of(cluster, result.job) == snapshots["tokens"]
    cluster.close_job(result.job)


def test_snapshots_of_other_clusters(
    cluster: LocalCluster, snapshots: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    workers = cluster.workers
    for field, value in (("fingerprint", "0" * 16), ("dtype", "bf16"), ("latent_format", "fp8")):
        path = rewritten(snapshots["half"], tmp_path / field, field, value)
        with pytest.raises(UserError, match=field):
            cluster.resume(path)
    assert cluster.workers is workers


def rewritten(snapshot: Path, target: Path, field: str, value: str) -> Path:
    """The snapshot with one word of its identity changed."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(snapshot, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(snapshot), target, metadata=metadata | {field: value})
    return target
