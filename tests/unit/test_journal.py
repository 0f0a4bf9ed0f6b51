"""The journal keeps what it took: through reopening, kills and full disks; changes follow the table only."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.orchestrator.controller.contract import Conflict, UnknownJob
from longprefill.orchestrator.job import TRANSITIONS, JobRequest, JobState, TokenRecord
from longprefill.orchestrator.journal.journal import (
    FILE_NAME,
    ImpossibleChange,
    Journal,
    JournalError,
    NewJob,
    StaleJournal,
)
from longprefill.orchestrator.journal.schema import JobRow

PROMPT = np.arange(5, dtype=np.int32)


def accept(journal: Journal, name: str, *, key: str | None = None, tenant: str = "a", fingerprint: str = "f") -> JobRow:
    request = JobRequest(tenant=tenant, max_new_tokens=4, num_samples=2, stop=("x", "é"), idempotency_key=key)
    journal.prompts.write(name, PROMPT)
    new = NewJob(id=name, request=request, fingerprint=fingerprint, prompt_tokens=len(PROMPT), created_at=100.0)
    return journal.accept(new)[0]


def to_generating(journal: Journal, number: int) -> None:
    journal.change(number, JobState.PREFILLING, at=101.0)
    journal.change(number, JobState.HANDING_OFF, at=103.0)
    journal.change(number, JobState.GENERATING, at=104.0)


def record(sample: int, index: int, finish: str | None = None) -> TokenRecord:
    return TokenRecord(
        sample=sample, index=index, token=index, text="é", logprob=-0.5, top_logprobs=((3, -1.0),), finish_reason=finish
    )


def snapshot(journal: Journal) -> dict[str, Any]:
    """Everything that can be read."""
    rows = journal.list(None, (), 1000, None)
    return {row.id: (row, journal.samples(row.number), journal.tokens(row.number), journal.events(row)) for row in rows}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.sampled_from([None, "k1", "k2"]), st.sampled_from("ab")),
        st.tuples(st.just("change"), st.integers(0, 5), st.sampled_from(list(JobState))),
        st.tuples(st.just("tokens"), st.integers(0, 5), st.integers(0, 1), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("step"), st.integers(0, 5), st.integers(1, 5)),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("retire"), st.integers(0, 3)),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(OPERATIONS)
def test_what_was_taken_is_there_after_every_reopening(operations: list[tuple[Any, ...]]) -> None:
    """Against a model in memory: states by the table, token counts by sample."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.open(folder)
        model: dict[str, tuple[JobState, list[int]]] = {}
        for place, (kind, *arguments) in enumerate(operations):
            names = list(model)
            if kind == "accept":
                key, tenant = arguments
                row = accept(journal, f"job{place}", key=key, tenant=tenant)
                is_known = key is not None and row.id != f"job{place}"
                assert is_known == (row.id in model)
                model.setdefault(row.id, (JobState.QUEUED, [0, 0]))
            elif kind == "reopen":
                before = snapshot(journal)
                journal.close()
                journal = Journal.open(folder)
                assert snapshot(journal) == before
            elif kind == "retire":
                gone = journal.retire(keep_jobs=arguments[0], keep_s=1e9, now=0.0)
                ended = [name for name in names if model[name][0].is_final]
                assert gone == ended[: max(len(ended) - arguments[0], 0)]
                model = {name: value for name, value in model.items() if name not in gone}
            elif arguments[0] < len(names):
                name = names[arguments[0]]
                number, (state, counts) = journal.find(name, None).number, model[name]
                if kind == "change":
                    if arguments[1] in TRANSITIONS[state]:
                        journal.change(number, arguments[1])
                        model[name] = (arguments[1], counts)
                    else:
                        with pytest.raises(ImpossibleChange):
                            journal.change(number, arguments[1])
                elif kind == "step":
                    assert journal.record_step(number, end=arguments[1], event={"end": 1}).position == arguments[1]
                else:
                    _, sample, index, ends = arguments
                    if index == counts[sample]:
                        journal.add_tokens(number, [record(sample, index, "stop" if ends else None)])
                        counts[sample] = 99 if ends else index + 1
                    else:
                        with pytest.raises(ImpossibleChange):
                            journal.add_tokens(number, [record(sample, index)])
            assert {row.id: row.state for row in journal.list(None, (), 1000, None)} == {
                name: state for name, (state, _) in model.items()
            }
        journal.close()


def test_time_to_first_token_is_the_sum_of_its_phases(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    number = accept(journal, "one").number
    to_generating(journal, number)
    row = journal.add_tokens(number, [record(0, 0)], at=104.5)
    journal.add_tokens(number, [record(0, 1)], at=110.0)
    timings = journal.change(number, JobState.DONE, at=111.0).timings(500.0)
    assert (timings.queue_s, timings.prefill_s, timings.transfer_s, timings.first_decode_s) == (1.0, 2.0, 1.0, 0.5)
    assert (timings.ttft_s, timings.total_s) == (4.5, 11.0)
    assert row.timings(500.0).ttft_s == 4.5
    kinds = [(event.number, event.kind, event.data) for event in journal.events(row)]
    assert [number for number, _, _ in kinds] == list(range(1, len(kinds) + 1))
    assert kinds[4] == (5, "tokens", {"num_tokens": 1})


def test_tokens_come_back_as_they_went_in(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    number = accept(journal, "one").number
    to_generating(journal, number)
    records = [record(1, 0), record(0, 0), record(1, 1, "stop")]
    journal.add_tokens(number, records)
    assert journal.tokens(number) == (tuple(records), 3)
    assert journal.tokens(number, after=2) == ((records[2],), 3)
    assert journal.tokens(number, after=3) == ((), 3)
    assert journal.tokens(number, limit=1) == ((records[0],), 1)
    assert journal.token_ids(number) == {1: (0, 1), 0: (0,)}
    assert [(view.text, view.num_tokens, view.finish_reason) for view in journal.samples(number)] == [
        ("é", 1, None),
        ("éé", 2, "stop"),
    ]
    with pytest.raises(ImpossibleChange):  # half a batch is no batch
        journal.add_tokens(number, [record(0, 1), record(1, 2)])
    assert journal.job(number).num_tokens == 3


def test_idempotency_keys_belong_to_a_tenant_and_one_request(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    first = accept(journal, "one", key="k")
    assert accept(journal, "two", key="k").id == "one"
    assert accept(journal, "three", key="k", tenant="b").id == "three"
    with pytest.raises(Conflict, match="job one with another prompt"):
        accept(journal, "four", key="k", fingerprint="g")
    assert first.request.stop == ("x", "é")
    with pytest.raises(UnknownJob):
        journal.find("one", "b")
    assert [row.id for row in journal.list("a", (), 10, None)] == ["one"]


def test_a_newer_epoch_shuts_the_older_one_out(tmp_path: Path) -> None:
    old = Journal.open(tmp_path)
    number = accept(old, "one").number
    new = Journal.open(tmp_path)
    assert new.epoch == old.epoch + 1
    for write in (
        lambda: old.change(number, JobState.PREFILLING),
        lambda: old.add_tokens(number, [record(0, 0)]),
        lambda: accept(old, "two"),
    ):
        with pytest.raises(StaleJournal, match=f"epoch {new.epoch} has begun"):
            write()
    new.change(number, JobState.PREFILLING)
    assert [row.id for row in new.unfinished()] == ["one"]


def test_orphans_are_swept_and_prompts_kept(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    number = accept(journal, "done").number
    accept(journal, "live")
    journal.prompts.write("orphan", PROMPT)
    (tmp_path / "prompts" / "half.new").write_bytes(b"\x93NUM")
    (tmp_path / "snapshots" / "job-1").write_bytes(b"x")
    journal.change(number, JobState.CANCELLED)
    journal.close()
    journal = Journal.open(tmp_path)
    assert [path.name for path in (tmp_path / "prompts").iterdir()] == ["live.npy"]
    assert list((tmp_path / "snapshots").iterdir()) == []
    np.testing.assert_array_equal(journal.prompts.read("live"), PROMPT)


def test_snapshots_that_no_job_names_are_swept_when_nobody_can_wait_for_them(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    names = ["named", "orphan", "half.partial", "fresh"]
    for name in names:
        (tmp_path / "snapshots" / name).write_bytes(b"x")
    for name in names[:3]:
        os.utime(tmp_path / "snapshots" / name, times=(1e9, 1e9))
    number = accept(journal, "j").number
    journal.update(number, snapshot=str(tmp_path / "snapshots" / "named"), snapshot_position=64)
    journal.sweep_snapshots(min_age_s=600)
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == ["fresh", "named"]


def test_old_jobs_go_with_their_tokens(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for place in range(6):
        number = accept(journal, f"j{place}").number
        to_generating(journal, number)
        journal.add_tokens(number, [record(0, 0)])
        if place != 2:
            journal.change(number, JobState.DONE, at=1000.0 + place)
    assert journal.retire(keep_jobs=3, keep_s=1e9, now=2000.0) == ["j0", "j1"]
    assert journal.retire(keep_jobs=3, keep_s=100.0, now=1104.5) == ["j3", "j4"]
    assert [row.id for row in journal.list(None, (), 10, None)] == ["j5", "j2"]
    with sqlite3.connect(tmp_path / FILE_NAME) as check:
        for table in ("tokens", "events", "samples"):
            assert len(check.execute(f"SELECT DISTINCT job FROM {table}").fetchall()) == 2
    check.close()


def test_a_full_disk_is_a_refusal_and_changes_nothing(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    number = accept(journal, "one").number
    before = snapshot(journal)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalError, match="cannot be written: database or disk is full"):
        journal.change(number, JobState.FAILED, reason="x" * 2000, report={"filler": "x" * 100_000})
    assert snapshot(journal) == before
    journal._db.execute("PRAGMA max_page_count = 1000000")
    assert journal.change(number, JobState.FAILED, reason="two\nlines \ud800").reason == "two lines ?"


@pytest.mark.parametrize("damage", ["garbage", "version", "file", "directory"])
def test_what_is_no_journal_is_refused(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "state"
    if damage == "file":
        folder.write_text("x")
    else:
        folder.mkdir()
    if damage == "garbage":
        (folder / FILE_NAME).write_bytes(b"no database" * 100)
    elif damage == "version":
        with sqlite3.connect(folder / FILE_NAME) as other:
            other.execute("PRAGMA user_version = 99")
        other.close()
    elif damage == "directory":
        (folder / FILE_NAME).mkdir()
    with pytest.raises(JournalError, match="cannot be used"):
        Journal.open(folder)


WRITER = """
import sys, numpy as np
from longprefill.orchestrator.job import JobRequest, JobState, TokenRecord
from longprefill.orchestrator.journal.journal import Journal, NewJob
journal = Journal.open(sys.argv[1])
for place in range(10**6):
    name = f"{journal.epoch}-{place}"
    journal.prompts.write(name, np.full(100, place, dtype=np.int32))
    request = JobRequest(tenant="a", max_new_tokens=4)
    row, _ = journal.accept(NewJob(id=name, request=request, fingerprint="", prompt_tokens=100, created_at=0.0))
    for state in (JobState.PREFILLING, JobState.HANDING_OFF, JobState.GENERATING):
        journal.change(row.number, state)
    journal.add_tokens(row.number, [TokenRecord(sample=0, index=n, token=n, text="") for n in range(3)])
    print(name, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    acknowledged: list[str] = []
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ
        ) as writer:
            assert writer.stdout is not None
            wanted = int(random.integers(1, 12))
            acknowledged += [writer.stdout.readline().strip() for _ in range(wanted)]
            os.kill(writer.pid, signal.SIGKILL)  # somewhere in the next one
            acknowledged += writer.stdout.read().split()
    journal = Journal.open(tmp_path)
    assert journal.epoch == 5
    kept = {row.id: row for row in journal.unfinished()}
    assert kept.keys() >= set(acknowledged)
    assert len(kept) <= len(acknowledged) + 4
    for name in acknowledged:
        assert kept[name].state is JobState.GENERATING
        assert journal.token_ids(kept[name].number) == {0: (0, 1, 2)}
    for name, row in kept.items():
        assert len(journal.prompts.read(name)) == row.prompt_tokens
    assert len(list((tmp_path / "prompts").iterdir())) == len(kept)
