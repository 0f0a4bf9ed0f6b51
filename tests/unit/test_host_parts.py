"""Parts of hosts that need neither models nor Ray: fences, commands carried out once, the token log, the loop."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayTaskError

from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.hosts import remote_decode
from longprefill.orchestrator.hosts.contract import HandoffFailed, HostSettings, NoRoom, NotReady, StaleEpoch
from longprefill.orchestrator.hosts.fence import Condition, Fence
from longprefill.orchestrator.hosts.once import Once
from longprefill.orchestrator.hosts.prefill_host import PrefillHost
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.partition.errors import UserError
from longprefill.workers.decode_loop import DecodeLoop, LoopEnded
from longprefill.workers.sampling import DecodeToken
from longprefill.workers.token_log import TokenLog

DEADLINE_S = 20.0


def token(job: int, index: int) -> DecodeToken:
    return DecodeToken(job=job, sample=0, index=index, token=index, finish_reason=None)


# ---- fence -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1))
def test_a_fence_lets_pass_what_is_not_older(epochs: list[int]) -> None:
    fence, highest = Fence(), 0
    for epoch in epochs:
        if epoch < highest:
            with pytest.raises(StaleEpoch, match=f"epoch {highest} commands"):
                fence.check(epoch)
        else:
            assert fence.check(epoch) == (epoch > highest)
            highest = epoch


def test_a_closed_host_stays_closed() -> None:
    condition = Condition("prefill-3")
    with pytest.raises(NotReady, match="prefill-3 is starting"):
        condition.check_ready()
    condition.set("failed", "no weights")
    with pytest.raises(NotReady, match="prefill-3 is failed: no weights"):
        condition.check_ready()
    condition.set("closed")
    condition.set("ready")
    assert condition.state == "closed"
    condition.await_settled(DEADLINE_S)


def test_refusals_cross_processes_whole() -> None:
    refusal = pickle.loads(pickle.dumps(NoRoom("no room", 3, 2, 1)))
    assert (str(refusal), refusal.needed_tokens, refusal.free_tokens, refusal.max_tokens) == ("no room", 3, 2, 1)


def test_a_hand_off_that_is_not_under_way_is_told_as_one_that_failed() -> None:
    """The controller begins another then; any other refusal would be a bug to it."""
    host = PrefillHost(HostSettings(name="prefill-0", cluster=ClusterSettings(model_dir="")))
    group = SimpleNamespace(is_open=lambda job: True)
    host._supervisor = SimpleNamespace(using=lambda: nullcontext(group))  # type: ignore[assignment]
    with pytest.raises(HandoffFailed, match="job 3 is not being handed over: start_handoff first"):
        host.finish_handoff(1, 3)


# ---- once ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (NoRoom("full", 3, 2, 1), NoRoom),
        (StaleEpoch("epoch 1 is over"), StaleEpoch),
        (NotReady("decode-0 is failed: no memory"), HandoffFailed),
        (UserError("job 1 was handed over already: release it first"), HandoffFailed),
        (ZeroDivisionError("division by zero"), HandoffFailed),
    ],
)
def test_trouble_of_a_decode_host_is_not_its_senders(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, told: type[Exception]
) -> None:
    """NotReady of the decode host would tell the controller that the prefill group is lost."""

    def get(_: object, timeout: float) -> None:
        raise RayTaskError("link", "", raised)

    handle = SimpleNamespace(link=SimpleNamespace(remote=lambda epoch: epoch))
    monkeypatch.setattr(remote_decode, "find_host", lambda name: handle)
    monkeypatch.setattr(remote_decode, "ray", SimpleNamespace(get=get))
    with pytest.raises(told, match=re.escape(str(raised))) as found:
        remote_decode.RemoteDecode("decode-0", lambda: 1).link()
    assert type(found.value) is told


def test_a_command_runs_once_however_often_it_is_asked_for() -> None:
    once: Once[int] = Once(4, timeout_s=DEADLINE_S)
    calls: list[int] = []
    may_end = threading.Event()

    def slow() -> int:
        calls.append(1)
        assert may_end.wait(DEADLINE_S)
        return 42

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(once.run, 1, slow) for _ in range(4)]
        may_end.set()
        assert [result.result(DEADLINE_S) for result in results] == [42] * 4
    assert calls == [1]
    assert once.run(1, lambda: 0) == 42


def test_errors_are_kept_but_for_stale_callers() -> None:
    once: Once[int] = Once(4, timeout_s=DEADLINE_S)
    kept, forgotten = iter([RunFailed("the group is lost"), None]), iter([StaleEpoch("too old"), None])

    def next_of(outcomes: Iterator[Exception | None]) -> Callable[[], str]:
        def run() -> str:
            error = next(outcomes)
            if error is not None:
                raise error
            return "done"

        return run

    for _ in range(2):
        with pytest.raises(RunFailed, match="the group is lost"):
            once.run(1, next_of(kept))
    with pytest.raises(StaleEpoch):
        once.run(2, next_of(forgotten))
    assert once.run(2, next_of(forgotten)) == "done"
    once.forget(1)
    assert once.run(1, next_of(kept)) == "done"


def test_only_first_callers_need_admission_and_old_outcomes_go() -> None:
    once: Once[int] = Once(2, timeout_s=DEADLINE_S)

    def refuse() -> None:
        raise UserError("long over")

    for key in range(3):
        once.run(key, lambda: "first")
    assert once.run(2, lambda: "second", admit=refuse) == "first"
    with pytest.raises(UserError, match="long over"):
        once.run(0, lambda: "second", admit=refuse)


# ---- token log -------------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_log_tells_everything_once_and_in_order(data: st.DataObject) -> None:
    """Appending, polling with any cursor seen, and acknowledging: what is told from a cursor is what followed it."""
    log = TokenLog(1000, lambda: None)
    told: list[DecodeToken] = []
    acknowledged = 0
    for step in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            entries = [token(step, n) for n in range(data.draw(st.integers(0, 3)))]
            log.append(entries)
            told += entries
        else:
            cursor = data.draw(st.integers(acknowledged, len(told)))
            acknowledged = cursor
            batch = log.poll(cursor, 0.0)
            assert list(batch.entries) == told[cursor:]
            assert batch.cursor == len(told)
            assert log.acknowledged == cursor
    # somebody who begins anew, where the last one has acknowledged
    assert list(log.poll(log.acknowledged, 0.0).entries) == told[acknowledged:]


def test_a_log_is_full_until_somebody_acknowledges_and_forgets_dropped_jobs() -> None:
    rooms: list[int] = []
    log = TokenLog(4, lambda: rooms.append(1))
    log.append([token(1, 0), token(2, 0), token(1, 1), token(2, 1)])
    assert log.is_full
    batch = log.poll(0, 0.0)
    assert log.is_full, "told is not acknowledged"
    assert log.poll(2, 0.0).entries == batch.entries[2:]
    assert not log.is_full
    log.append([token(1, 2), token(3, 0)])
    log.drop(1)
    assert [entry.job for entry in log.poll(2, 0.0).entries] == [2, 3]
    assert rooms
    with pytest.raises(UserError, match="cursor=7"):
        log.poll(7, 0.0)


def test_a_poll_waits_for_news_a_newer_controller_or_the_end() -> None:
    log = TokenLog(4, lambda: None)
    stale = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(log.poll, 0, DEADLINE_S)
        log.append([token(1, 0)])
        assert len(waiting.result(DEADLINE_S).entries) == 1
        outdated = pool.submit(lambda: log.poll(1, DEADLINE_S, is_stale=stale.is_set))
        stale.set()
        log.wake()
        assert outdated.result(DEADLINE_S).entries == ()
        last = pool.submit(log.poll, 1, DEADLINE_S)
        log.close()
        assert last.result(DEADLINE_S) == ((), 1)


# ---- loop ------------------------------------------------------------------------------------------------------------


class Counting:
    """In the place of a DecodeBatch: one entry an iteration while it has work."""

    def __init__(self) -> None:
        self.has_work = False
        self.num_iterations = 0
        self.error: Exception | None = None

    def iterate(self) -> list[DecodeToken]:
        if self.error is not None:
            raise self.error
        self.num_iterations += 1
        return [token(1, self.num_iterations)]


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def loop(counting: Counting) -> Iterator[DecodeLoop]:
    batch: Any = counting
    running = DecodeLoop(batch, max_kept=50)
    yield running
    running.close()


def set_work(counting: Counting, value: bool) -> None:
    counting.has_work = value


def test_calls_and_long_work_run_between_iterations(loop: DecodeLoop, counting: Counting) -> None:
    def long_work() -> Generator[None, None, str]:
        for _ in range(50):
            seen.append((threading.current_thread().name, counting.num_iterations))
            yield
        return "verified"

    seen: list[tuple[str, int]] = []
    loop.call(lambda: set_work(counting, True), timeout_s=DEADLINE_S)
    assert loop.work(long_work(), timeout_s=DEADLINE_S) == "verified"
    assert {name for name, _ in seen} == {"decode"}
    assert loop.call(lambda: 3, timeout_s=DEADLINE_S) == 3
    with pytest.raises(KeyError):
        loop.call(lambda: {}[5], timeout_s=DEADLINE_S)


def test_decoding_waits_while_the_log_is_full(loop: DecodeLoop, counting: Counting) -> None:
    loop.call(lambda: set_work(counting, True), timeout_s=DEADLINE_S)
    cursor = 0
    while cursor < 100:  # only acknowledging lets it go on
        batch = loop.log.poll(cursor, DEADLINE_S)
        assert batch.entries
        assert counting.num_iterations <= cursor + 50
        cursor = batch.cursor


def test_a_loop_that_fails_says_why_to_everybody(
    loop: DecodeLoop, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_value))
    counting.error = ZeroDivisionError("a bug")
    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(loop.log.poll, 0, DEADLINE_S)
        loop.call(lambda: set_work(counting, True), timeout_s=DEADLINE_S)
        assert polling.result(DEADLINE_S) == ((), 0)
    with pytest.raises(LoopEnded, match="ZeroDivisionError: a bug"):
        loop.call(lambda: 3, timeout_s=DEADLINE_S)
    loop.close()
    assert loop.failure == "ZeroDivisionError: a bug"
    assert [type(error) for error in raised] == [ZeroDivisionError]


def test_a_call_that_breaks_the_loop_is_told_so(loop: DecodeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    with pytest.raises(LoopEnded, match="ZeroDivisionError"):
        loop.call(lambda: 1 // 0, timeout_s=DEADLINE_S)
