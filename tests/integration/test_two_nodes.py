"""Two prefill groups and a decode worker over two Ray nodes of this machine: one node is removed, its jobs go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from longprefill.orchestrator.config import DecodePool, ModelSection, PrefillPool, ServiceConfig, ServiceSection
from longprefill.orchestrator.controller.actor import create_controller
from longprefill.orchestrator.job import JobRequest, JobState
from longprefill.orchestrator.ray_runtime import set_ray_environment, worker_environment

from .support.models import make_model, random_tokens

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(280)]

DEADLINE_S = 200.0


@dataclass(frozen=True, kw_only=True)
class Nodes:
    cluster: Cluster
    far: Any


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    for name, value in worker_environment(1).items():
        monkeypatch.setenv(name, value)
    set_ray_environment()
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "resources": {"near": 3}, **small})
    try:
        far = cluster.add_node(num_cpus=2, resources={"far": 2}, object_store_memory=80 << 20)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        yield Nodes(cluster=cluster, far=far)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_a_removed_nodes_jobs_finish_elsewhere(tmp_path: Path, nodes: Nodes) -> None:
    model = make_model(tmp_path / "model", "longprefill_hybrid", eos=[])
    pool: dict[str, Any] = {"dtype": "fp32", "max_tokens": 8192, "step_tokens": 64}
    config = ServiceConfig(
        model=ModelSection(dir=str(model)),
        service=ServiceSection(state_dir=str(tmp_path / "state")),
        prefill=(
            PrefillPool(name="near", resources={"near": 1}, **pool),
            PrefillPool(name="far", resources={"far": 1}, **pool),
        ),
        decode=(DecodePool(max_tokens=16384, resources={"near": 1}),),
    )
    controller = create_controller(config, node_id=ray.get_runtime_context().get_node_id())

    def ask(method: str, *arguments: Any, **named: Any) -> Any:
        return ray.get(getattr(controller, method).remote(*arguments, **named), timeout=60)

    deadline = time.monotonic() + DEADLINE_S

    def wait_for(condition: Any) -> None:
        while not condition():
            assert time.monotonic() < deadline, ask("readiness")
            time.sleep(0.05)

    wait_for(lambda: ask("readiness").is_ready)
    wait_for(lambda: [group.state for group in ask("cluster").groups] == ["ready"] * 3)
    request = JobRequest(tenant="a", max_new_tokens=4)
    jobs = [ask("submit", request, random_tokens(2000, seed)).job for seed in range(4)]
    wait_for(lambda: any(view.group == "far-0" and view.num_steps for view in ask("list_jobs", None)))
    nodes.cluster.remove_node(nodes.far)

    wait_for(lambda: all(view.state.is_final for view in ask("list_jobs", None)))
    views = {view.id: view for view in ask("list_jobs", None)}
    assert {view.state for view in views.values()} == {JobState.DONE}, [view.reason for view in views.values()]
    assert views.keys() == set(jobs)
    assert any(view.num_attempts > 1 and view.group == "near-0" for view in views.values())
    assert [view.samples[0].num_tokens for view in views.values()] == [4] * 4
    far = next(group for group in ask("cluster").groups if group.name == "far-0")
    assert far.state != "ready"
    assert far.reason
    ask("end", end_hosts=True)
