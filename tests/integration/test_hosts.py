"""Hosts in a real Ray: hand-off between a pair, jobs and samples together, fences, a rank that is killed mid-step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from longprefill.comms.transport.holder import sweep_stale
from longprefill.orchestrator.hosts.actors import cause_of, create_host, end_host, find_host
from longprefill.orchestrator.hosts.contract import (
    GenerateRequest,
    GroupLost,
    HandoffFailed,
    HandoffRequest,
    HostSettings,
    NoLink,
    NoRoom,
    NotReady,
    SampleStart,
    StaleEpoch,
    UnknownHostJob,
)
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.orchestrator.ray_runtime import LocalRay, worker_environment
from longprefill.partition.errors import PromptError, UserError
from longprefill.partition.layout import Slice

from .support.clusters import assert_cluster_left_nothing
from .support.models import make_model, random_tokens
from .support.processes import marked, marking, pid_running, pool_files, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NUM_NEW = 6
PROMPTS = [random_tokens(length, seed=length) for length in (200, 64, 333, 130)]
LONG = random_tokens(30_000, seed=9)


class Service:
    """One prefill host of two ranks and one decode host, commanded as a controller would."""

    def __init__(self, mark: str, settings: ClusterSettings) -> None:
        self.mark = mark
        self.settings = settings
        self.epoch = 1
        self.step = 0
        self._next_job = 0

    def ask(self, host: str, method: str, *arguments: Any) -> Any:
        """A command's result; its error as the host raised it."""
        try:
            return ray.get(self.begin(host, method, *arguments), timeout=120)
        except RayError as error:
            raise cause_of(error) from None

    def ready(self, host: str = "prefill-0") -> Any:
        """Its state once it is ready."""
        wait_for(
            lambda: self.ask(host, "await_ready", 10.0).state == "ready",
            lambda: f"{host} to be ready: {self.state(host).state}, {self.state(host).reason}",
            deadline_s=150,
        )
        return self.state(host)

    def open(self, prompt: np.ndarray, snapshot: str | None = None) -> int:
        job, self._next_job = self._next_job, self._next_job + 1
        self.ask("prefill-0", "open_job", job, prompt, snapshot)
        return job

    def run(self, *slices: Slice) -> Any:
        self.step += 1
        return self.ask("prefill-0", "run_step", self.step, slices)

    def hand_over(self, job: int, num_samples: int = 1) -> Any:
        self.ask("prefill-0", "start_handoff", self.handoff(job, num_samples))
        outcome = self.ask("prefill-0", "finish_handoff", job)
        self.ask("prefill-0", "close_job", job)
        return outcome

    def handoff(self, job: int, num_samples: int = 1, decode: str = "decode-0") -> HandoffRequest:
        return HandoffRequest(job=job, decode=decode, max_new_tokens=NUM_NEW, num_samples=num_samples)

    def prefilled(self, prompt: np.ndarray, num_samples: int = 1) -> int:
        """A job that the decode host has."""
        job = self.open(prompt)
        self.run(Slice(job=job, start=0, end=len(prompt)))
        self.hand_over(job, num_samples)
        return job

    def generate(self, job: int, *starts: SampleStart) -> None:
        request = GenerateRequest(job=job, samples=starts, max_new_tokens=NUM_NEW, temperature=0.8, seed=3)
        self.ask("decode-0", "generate", request)

    def collect(self, num_streams: int) -> dict[tuple[int, int], list[int]]:
        """Tokens by (job, sample) until so many streams have ended."""
        found: dict[tuple[int, int], list[int]] = {}
        num_ended = 0
        cursor = self.ask("decode-0", "state").first_cursor
        while num_ended < num_streams:
            news = self.ask("decode-0", "poll", cursor, 60.0)
            assert news.cursor > cursor, "no news within a minute"
            assert not news.failures
            cursor = news.cursor
            for token in news.tokens:
                found.setdefault((token.job, token.sample), []).append(token.token)
                num_ended += token.finish_reason is not None
        self.ask("decode-0", "poll", cursor, 0.0)
        return found

    def begin(self, host: str, method: str, *arguments: Any) -> Any:
        """A command whose result is asked for later."""
        return getattr(find_host(host), method).remote(self.epoch, *arguments)

    def state(self, host: str = "prefill-0") -> Any:
        return self.ask(host, "state")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = make_model(tmp_path_factory.mktemp("models") / "hybrid", "longprefill_hybrid", index_kpool=4)
    settings = ClusterSettings(model_dir=str(model), cp=2, dtype="fp32", max_tokens=32_768)
    local = LocalRay()
    with marking() as mark:
        local.start(4, worker_environment(1))
        try:
            for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
                create_host(HostSettings(name=name, cluster=settings), role)
            running = Service(mark, settings)
            for name in ("prefill-0", "decode-0"):
                running.ask(name, "start")
            for name in ("prefill-0", "decode-0"):
                running.ready(name)
            yield running
            for name in ("prefill-0", "decode-0"):
                if find_host(name) is not None:
                    owner = running.state(name).pid
                    running.ask(name, "close")
                    assert pool_files(owner) == []
                    end_host(name)
        finally:
            local.stop()
            sweep_stale()  # of hosts that were killed
        assert_cluster_left_nothing(mark)


@pytest.fixture(autouse=True)
def nothing_is_held(service: Service) -> Iterator[None]:
    """Every test gives back what it took."""
    yield
    for host in ("prefill-0", "decode-0"):
        if find_host(host) is not None:
            state = service.state(host)
            assert (state.jobs, state.used_tokens) == ((), 0)


def test_jobs_and_samples_together_as_one_at_a_time(service: Service) -> None:
    alone: dict[tuple[int, int], list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        job = service.prefilled(prompt, num_samples=2)
        service.generate(job, SampleStart(sample=0), SampleStart(sample=1))
        tokens = service.collect(2)
        alone |= {(number, sample): tokens[job, sample] for sample in (0, 1)}
        service.ask("decode-0", "release", job)
    # the same once more: all four at once, their steps shared, both samples of each
    jobs = [service.open(prompt) for prompt in PROMPTS]
    for job in jobs:
        service.ask("prefill-0", "start_handoff", service.handoff(job, 2))
    service.run(*(Slice(job=job, start=0, end=64) for job in jobs))
    outcome = service.run(
        *(Slice(job=j, start=64, end=len(p)) for j, p in zip(jobs, PROMPTS, strict=True) if j != jobs[1])
    )
    assert len(outcome.rank_seconds) == len(outcome.stats) == 2
    assert outcome.stats[0].comm["cache_rows"][1] > 0
    for job in jobs:
        assert service.ask("prefill-0", "finish_handoff", job) == service.ask("prefill-0", "finish_handoff", job)
        service.ask("prefill-0", "close_job", job)
    state = service.state("decode-0")
    assert {job.stage for job in state.jobs} == {"committed"}
    for job in jobs:
        service.generate(job, SampleStart(sample=0), SampleStart(sample=1))
    together = service.collect(8)
    assert {(jobs.index(job), sample): tokens for (job, sample), tokens in together.items()} == alone
    assert {job.stage for job in service.state("decode-0").jobs} == {"ended"}
    # a stream that is taken up again: its tokens so far in the prompt, or run at the decode host
    done = alone[0, 1][:3]
    longer = service.prefilled(np.concatenate([PROMPTS[0], done]))
    service.generate(longer, SampleStart(sample=1, num_generated=3))
    assert service.collect(1)[longer, 1] == alone[0, 1][3:]
    for job in (*jobs, longer):
        service.ask("decode-0", "release", job)
        service.ask("decode-0", "release", job)


def test_refusals_leave_everything_as_it_was(service: Service) -> None:
    job = service.open(PROMPTS[0])
    for prompt, words in (([], "1 or more token ids"), ([1, 512], "vocabulary"), ([[1]], "shape")):
        with pytest.raises(PromptError, match=words):
            service.open(np.array(prompt, dtype=np.int64))
    with pytest.raises(NoRoom, match="cache pages") as refusal:
        service.open(random_tokens(40_000))
    assert (refusal.value.needed_tokens, refusal.value.max_tokens) == (40_000, 32_768 + 8 * 64)
    for slices, words in (
        ((Slice(job=job, start=64, end=128),), "stands at 0"),
        ((Slice(job=job, start=0, end=4096),), "of 200 tokens"),
        ((Slice(job=77, start=0, end=64),), "not open"),
        ((), "at least one"),
    ):
        with pytest.raises(UserError, match=words):
            service.run(*slices)
    with pytest.raises(HandoffFailed, match="start_handoff first"):
        service.ask("prefill-0", "finish_handoff", job)
    with pytest.raises(NoLink, match="decode-9 is not running"):
        service.ask("prefill-0", "start_handoff", service.handoff(job, decode="decode-9"))
    with pytest.raises(NoRoom, match="finds no room at decode-0"):
        service.ask("prefill-0", "start_handoff", HandoffRequest(job=job, decode="decode-0", max_new_tokens=40_000))
    with pytest.raises(UnknownHostJob):
        service.ask(
            "decode-0", "generate", GenerateRequest(job=job, samples=(SampleStart(sample=0),), max_new_tokens=1)
        )
    with pytest.raises(UserError, match="cursor=999999"):
        service.ask("decode-0", "poll", 999_999, 0.0)
    outcome = service.run(Slice(job=job, start=0, end=200))
    assert service.ask("prefill-0", "run_step", service.step, ()) == outcome  # a repeated number: what it was then
    service.ask("prefill-0", "start_handoff", service.handoff(job))
    assert [held.stage for held in service.state("decode-0").jobs] == ["reserved"]
    service.ask("prefill-0", "cancel_handoff", job)
    assert service.state("decode-0").jobs == ()
    service.ask("prefill-0", "close_job", job)
    service.ask("prefill-0", "close_job", job)


def test_an_older_controller_is_fenced(service: Service) -> None:
    """A new one attaches, sees what is open and goes on; a poll of the old one ends at once."""
    job = service.open(PROMPTS[2])
    service.run(Slice(job=job, start=0, end=128))
    cursor = service.state("decode-0").first_cursor
    old_poll = service.begin("decode-0", "poll", cursor, 60.0)
    old, service.epoch = service.epoch, service.epoch + 1
    state = service.state()
    assert [(held.job, held.position, held.num_tokens) for held in state.jobs] == [(job, 128, 333)]
    assert (state.last_step, state.running) == (service.step, None)
    service.state("decode-0")
    with pytest.raises(RayTaskError) as refusal:
        ray.get(old_poll, timeout=30)
    assert isinstance(cause_of(refusal.value), StaleEpoch)
    service.epoch, new = old, service.epoch
    for method, arguments in (("run_step", (99, ())), ("state", ()), ("close_job", (job,)), ("close", ())):
        with pytest.raises(StaleEpoch, match=f"epoch {new} commands"):
            service.ask("prefill-0", method, *arguments)
    service.epoch = new
    service.run(Slice(job=job, start=128, end=333))
    service.hand_over(job)
    service.ask("decode-0", "release", job)


def test_a_killed_rank_is_replaced_and_a_snapshot_taken_up(service: Service, tmp_path: Path) -> None:
    job = service.open(LONG)
    service.run(Slice(job=job, start=0, end=512))
    exported = service.ask("prefill-0", "export_job", job, str(tmp_path / "job.safetensors"))
    assert (exported.position, exported.num_bytes > 0) == (512, True)
    generation = service.state().generation
    service.step += 1
    step = service.begin("prefill-0", "run_step", service.step, (Slice(job=job, start=512, end=len(LONG)),))
    pid = pid_running(service.mark, "ray::PrefillWorker.run_step")
    assert service.state().running == (service.step, (Slice(job=job, start=512, end=len(LONG)),))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayTaskError) as failure:
        ray.get(step, timeout=60)
    cause = cause_of(failure.value)
    assert isinstance(cause, GroupLost)
    assert f"(pid {pid}) died" in str(cause)
    state = service.ready()
    assert (state.state, state.jobs, state.used_tokens) == ("ready", (), 0)
    assert (state.generation, state.num_restarts) == (generation + 1, 1)
    # the prompt's first 512 tokens come from the file
    short = LONG[:700]
    with pytest.raises(UserError, match="are not this prompt's"):
        service.open(short[::-1].copy(), exported.path)
    resumed = service.open(short, exported.path)
    assert service.state().jobs[0].position == 512
    service.run(Slice(job=resumed, start=512, end=700))
    service.hand_over(resumed)
    service.generate(resumed, SampleStart(sample=0))
    tokens = service.collect(1)[resumed, 0]
    service.ask("decode-0", "release", resumed)
    fresh = service.prefilled(short)
    service.generate(fresh, SampleStart(sample=0))
    assert service.collect(1)[fresh, 0] == tokens
    service.ask("decode-0", "release", fresh)


def test_an_idle_rank_that_dies_is_noticed(service: Service) -> None:
    generation = service.state().generation
    os.kill(pid_running(service.mark, "ray::PrefillWorker"), signal.SIGKILL)
    wait_for(lambda: service.state().generation > generation, lambda: "the loss of an idle rank")
    service.ready()


def test_a_place_that_is_not_there_is_waited_for(service: Service) -> None:
    settings = HostSettings(name="prefill-9", cluster=service.settings, resources={"NPU": 2.0})
    create_host(settings, "prefill")
    service.ask("prefill-9", "start")
    wait_for(lambda: service.state("prefill-9").state == "waiting", lambda: "the host to wait")
    assert "2 times 1 CPU and 2 NPU; the cluster has" in service.state("prefill-9").reason
    with pytest.raises(NotReady, match="prefill-9 is waiting: its place is not free"):
        service.ask("prefill-9", "open_job", 0, PROMPTS[0])
    service.ask("prefill-9", "close")
    assert service.state("prefill-9").state == "closed"
    end_host("prefill-9")


def test_hosts_that_die(service: Service) -> None:
    """The last test. The job stays whole at the prefill side, and goes to the host that takes the dead one's place."""
    job = service.open(PROMPTS[0])
    service.run(Slice(job=job, start=0, end=200))
    service.ask("prefill-0", "start_handoff", service.handoff(job))
    state = service.state("decode-0")
    os.kill(state.pid, signal.SIGKILL)
    with pytest.raises(HandoffFailed, match="decode-0"):
        service.ask("prefill-0", "finish_handoff", job)
    end_host("decode-0", state)
    create_host(HostSettings(name="decode-0", cluster=service.settings), "decode")
    service.ask("decode-0", "start")
    service.ready("decode-0")
    assert service.hand_over(job).num_attempts == 1
    service.generate(job, SampleStart(sample=0))
    assert len(service.collect(1)[job, 0]) == NUM_NEW
    service.ask("decode-0", "release", job)
    # a prefill host that is stopped, which Ray does not see: its ranks go with it, and so does its place
    state = service.state()
    os.kill(state.pid, signal.SIGSTOP)
    with pytest.raises(GetTimeoutError):
        ray.get(service.begin("prefill-0", "state"), timeout=0.5)
    ranks = [pid for pid, line in marked(service.mark).items() if "ray::PrefillWorker" in line]
    end_host("prefill-0", state)
    wait_for(lambda: not marked(service.mark).keys() & {state.pid, *ranks}, lambda: "the end of host and ranks")
    create_host(HostSettings(name="prefill-0", cluster=service.settings), "prefill")
    service.ask("prefill-0", "start")
    service.ready()
