"""`LocalCluster` as a library: jobs one after another and side by side, refusals, failures it survives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longprefill.orchestrator import LocalCluster, groups
from longprefill.orchestrator.errors import RunFailed
from longprefill.partition.errors import PromptError, UserError
from longprefill.workers.sampling import Sampling

from .support.clusters import GREEDY, LONG, SHORT, assert_cluster_left_nothing, generated, start, tokens_of
from .support.models import make_model, random_tokens
from .support.processes import marking, pool_files

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "hybrid", "longprefill_hybrid", index_kpool=4)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    with marking() as mark:
        with start(model, cp=2) as cluster:
            yield cluster
        cluster.close()  # a second time does nothing
        assert_cluster_left_nothing(mark)


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster) -> list[int]:
    """Greedy tokens after LONG."""
    return generated(cluster, LONG)


def test_a_pool_for_one_job_serves_ten(cluster: LocalCluster, expected: list[int]) -> None:
    for _ in range(10):
        assert generated(cluster, LONG) == expected


def test_entering_again_starts_nothing(cluster: LocalCluster) -> None:
    workers = cluster.workers
    assert cluster.start() is cluster
    assert cluster.workers is workers


def test_a_second_cluster_in_this_process(cluster: LocalCluster, model: Path, expected: list[int]) -> None:
    with pytest.raises(UserError, match="already running"):
        start(model).start()
    assert generated(cluster, LONG) == expected


def test_prompts_side_by_side(cluster: LocalCluster) -> None:
    prompts = [random_tokens(size, seed=size) for size in (70, 130, 200)]
    alone = [generated(cluster, prompt) for prompt in prompts]
    results = cluster.prefill_many(prompts, max_new_tokens=6, handoff=True)
    assert [result.num_tokens for result in results] == [70, 130, 200]
    streams = [cluster.generate(result.job, GREEDY) for result in results]
    together = [[next(stream).id for stream in streams] for _ in range(6)]
    assert [list(column) for column in zip(*together, strict=True)] == alone
    for stream, result in zip(streams, results, strict=True):
        assert next(stream, None) is None
        cluster.close_job(result.job)


def test_more_open_jobs_than_slots(cluster: LocalCluster) -> None:
    jobs = [cluster.prefill(random_tokens(40, seed=n), max_new_tokens=2).job for n in range(10)]
    for job in jobs:
        assert len(tokens_of(cluster, job, Sampling(max_new_tokens=2))) == 2
        cluster.close_job(job)


def test_too_many_prompts_at_once(cluster: LocalCluster, expected: list[int]) -> None:
    with pytest.raises(UserError, match="at most 8 in one call"):
        cluster.prefill_many([random_tokens(10)] * 9, handoff=True)
    assert generated(cluster, LONG) == expected


def test_a_prompt_too_long_for_the_cluster(cluster: LocalCluster, expected: list[int]) -> None:
    with pytest.raises(UserError, match="larger max_tokens"):
        cluster.prefill(random_tokens(3000))
    assert generated(cluster, LONG) == expected


def test_one_of_several_prompts_does_not_fit(cluster: LocalCluster, expected: list[int]) -> None:
    with pytest.raises(UserError, match="larger max_tokens"):
        cluster.prefill_many([SHORT, random_tokens(1400)])
    assert generated(cluster, LONG) == expected


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([1, 2, 512], "512 at position 2"),
        ([1.5], "integer"),
        ([[1]], "shape"),
        ([-1], "-1 at position"),
    ],
)
def test_prompts_that_are_none(cluster: LocalCluster, prompt: list[Any], words: str) -> None:
    with pytest.raises(PromptError, match=words):
        cluster.prefill(prompt)


def test_a_listener_that_leaves_stops_the_worker(cluster: LocalCluster) -> None:
    result = cluster.prefill(SHORT, max_new_tokens=700)
    stream = cluster.generate(result.job, Sampling(max_new_tokens=700))
    first = next(stream)
    assert first.finish_reason is None
    stream.close()
    cluster.close_job(result.job)
    assert len(generated(cluster, SHORT)) == 6


def test_stop_tokens(cluster: LocalCluster) -> None:
    tokens = generated(cluster, SHORT)
    stop = Sampling(max_new_tokens=6, stop_token_ids=(tokens[2],))
    assert generated(cluster, SHORT, stop) == tokens[: tokens.index(tokens[2]) + 1]


def test_generate_without_hand_off(cluster: LocalCluster) -> None:
    result = cluster.prefill(SHORT, handoff=False)
    with pytest.raises(UserError, match="not handed over"):
        tokens_of(cluster, result.job)
    cluster.close_job(result.job)
    with pytest.raises(UserError, match="is not open"):
        cluster.close_job(result.job)
    with pytest.raises(UserError, match="not handed over"):
        tokens_of(cluster, result.job)


def test_files_that_cannot_be_written(cluster: LocalCluster, tmp_path: Path) -> None:
    result = cluster.prefill(SHORT)
    for write in (cluster.export_job, cluster.dump):
        with pytest.raises(UserError, match="no directory"):
            write(result.job, tmp_path / "absent" / "file")
        with pytest.raises(UserError, match="job 999 is not open"):
            write(999, tmp_path / "file")
    cluster.close_job(result.job)


def test_a_damaged_page_is_sent_again(
    cluster: LocalCluster, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte changes at the decode worker after it arrived and before the commit: refused, repeated, right."""
    pool = next(pool for pool in pool_files(os.getpid()) if "decode" in pool.name)
    build, attempts = groups.build_messages, []

    def damaging(*arguments: Any, **named: Any) -> tuple[bytes, bytes]:
        if not attempts:
            with pool.open("r+b") as file:
                file.seek(4096 + 100)
                byte = file.read(1)[0]
                file.seek(4096 + 100)
                file.write(bytes([byte ^ 1]))
        attempts.append(named["attempt"])
        return build(*arguments, **named)

    monkeypatch.setattr(groups, "build_messages", damaging)
    assert generated(cluster, LONG) == expected
    assert attempts == [0, 1]


def test_a_worker_that_raises(cluster: LocalCluster, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are given a step that cannot be: they raise, and the cluster goes on."""
    plan: Any = groups.StepPlan

    def wrong_plan(**fields: Any) -> Any:
        monkeypatch.setattr(groups, "StepPlan", plan)
        fields["exchange"] = "by carrier pigeon"
        return plan(**fields)

    monkeypatch.setattr(groups, "StepPlan", wrong_plan)
    with pytest.raises(RunFailed, match=r"prefill rank \d failed: .*pigeon") as failure:
        cluster.prefill(LONG)
    assert "\n" not in str(failure.value)
    assert generated(cluster, LONG) == expected


@pytest.mark.parametrize(
    ("settings", "words"), [({"cp": 0}, "--cp 0"), ({"max_tokens": 0}, "max_tokens=0"), ({"cp": 900}, "GiB")]
)
def test_settings_are_checked_without_a_start(model: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LocalCluster(model, **settings)


def test_a_cluster_that_does_not_run(model: Path) -> None:
    cluster = start(model)
    with pytest.raises(UserError, match="not running"):
        cluster.prefill(SHORT)
    cluster.close()


def test_an_unknown_setting(model: Path) -> None:
    with pytest.raises(TypeError, match="ranks"):
        LocalCluster(model, ranks=2)
