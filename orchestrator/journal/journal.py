"""The journal: every job, what happened to it and every token that a client may have seen, in SQLite on disk.

    journal = Journal.open(state_dir)                  # a new epoch: whoever had it open before can write no more
    journal.prompts.write(id, tokens_T)                # durable, before the job is
    journal.accept(NewJob(...))                        # durable when it returns
    journal.change(number, JobState.PREFILLING, ...)   # the one place where states change, by job.TRANSITIONS

A job's acceptance survives a loss of power; everything else a loss of the process. All methods are called from one
thread. A directory that cannot be written, a full disk or a damaged file raise `JournalError` and change nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longprefill.orchestrator.job import (
    TRANSITIONS,
    JobRequest,
    JobState,
    TokenRecord,
)
from longprefill.orchestrator.journal.prompts import PromptFiles
from longprefill.orchestrator.journal.reader import FINAL, JournalReader
from longprefill.orchestrator.journal.schema import (
    JOB_COLUMNS,
    PHASE_COLUMNS,
    SCHEMA,
    SCHEMA_VERSION,
    JobRow,
    request_text,
    token_row,
)
from longprefill.partition.errors import UserError

FILE_NAME = "journal.sqlite"
BUSY_TIMEOUT_S = 10.0
MAX_EVENTS = 20_000
"""Of one job: later steps are still counted, only not told one by one."""
MAX_KEPT_TOKENS = 20_000_000
"""Of ended jobs, about 1 GB: the oldest jobs go first."""
RETIRED_AT_ONCE = 500
UPDATABLE = frozenset(JOB_COLUMNS) - {"number", "id", "tenant", "request", "state", "num_tokens", "num_events"}


class JournalError(UserError):
    """The journal cannot be read or written: no permission, no room, or not a journal of this version."""


class StaleJournal(UserError):
    """A newer controller has taken the journal over: whoever is told this must end."""


class ImpossibleChange(RuntimeError):
    """A change of state that `TRANSITIONS` does not have, or tokens that repeat or skip: a bug of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job to accept. `fingerprint` stands for request and prompt."""

    id: str
    request: JobRequest
    fingerprint: str
    prompt_tokens: int
    created_at: float


class Journal(JournalReader):
    """See the module's text. `epoch` is this opening's number."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, epoch: int) -> None:
        super().__init__(connection)
        self.directory = directory
        self.epoch = epoch
        self.prompts = PromptFiles(directory / "prompts")
        self.snapshots = directory / "snapshots"
        self._depth = 0

    @classmethod
    def open(cls, directory: str | Path) -> Journal:
        """Opens or creates the journal of a directory, begins a new epoch and removes orphaned files.

        Raises:
            JournalError: with what is wrong with the directory or the file.
        """
        directory = Path(directory)
        try:
            for folder in (directory, directory / "prompts", directory / "snapshots"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise JournalError(f"state_dir {directory} cannot be written: give a directory of your own")
            connection = sqlite3.connect(
                directory / FILE_NAME, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise JournalError(f"state_dir {directory} cannot be used: {_why(error)}") from error
        try:
            epoch = _prepare(connection)
            journal = cls(directory, connection, epoch)
            journal.prompts.sweep({row.id for row in journal.unfinished()})
            journal.sweep_snapshots()
        except (OSError, sqlite3.Error, JournalError) as error:
            connection.close()
            raise JournalError(f"{directory / FILE_NAME} cannot be used: {_why(error)}") from error
        return journal

    def close(self) -> None:
        self._db.close()

    # ---- acceptance ----------------------------------------------------------------------------------------------

    def accept(self, job: NewJob) -> tuple[JobRow, bool]:
        """Takes a job whose prompt is on disk; it survives a loss of power when this returns. The second value is
        False when its idempotency key named an earlier one, which is returned.

        Raises:
            Conflict: as `earlier`.
        """
        request = job.request
        with self._durable(), self.transaction():
            earlier = self.earlier(request.tenant, request.idempotency_key, job.fingerprint)
            if earlier is not None:
                return earlier, False
            values = {
                "id": job.id,
                "tenant": request.tenant,
                "request": request_text(request),
                "fingerprint": job.fingerprint,
                "idempotency_key": request.idempotency_key,
                "prompt_tokens": job.prompt_tokens,
                "state": JobState.QUEUED,
                "created_at": job.created_at,
                "state_at": job.created_at,
            }
            names, marks = ", ".join(values), ", ".join("?" * len(values))
            cursor = self._db.execute(f"INSERT INTO jobs ({names}) VALUES ({marks})", tuple(values.values()))
            number = cursor.lastrowid
            assert number is not None
            self._db.executemany(
                "INSERT INTO samples (job, sample, num_tokens, text) VALUES (?, ?, 0, '')",
                [(number, sample) for sample in range(request.num_samples)],
            )
            self._add_event(number, job.created_at, "state", {"state": JobState.QUEUED, "reason": None})
            return self.job(number), True

    # ---- changes -------------------------------------------------------------------------------------------------

    def change(
        self, number: int, state: JobState, *, at: float | None = None, reason: str | None = None, **columns: Any
    ) -> JobRow:
        """A job goes into another state: time spent in the old one is booked, an event tells of it. `columns` change
        with it.

        Raises:
            ImpossibleChange: `TRANSITIONS` has no such change.
        """
        at = time.time() if at is None else at
        reason = _text(reason)
        with self.transaction():
            row = self.job(number)
            if state not in TRANSITIONS[row.state]:
                raise ImpossibleChange(f"job {row.id} cannot go from {row.state} to {state}")
            columns |= {"state_at": at, "reason": reason}
            if row.first_token_at is None:
                phase = PHASE_COLUMNS[row.state]
                columns[phase] = getattr(row, phase) + max(at - row.state_at, 0.0)
            if state is JobState.PREFILLING and row.started_at is None:
                columns["started_at"] = at
            if state.is_final:
                columns["finished_at"] = at
            self._db.execute("UPDATE jobs SET state = ? WHERE number = ?", (state, number))
            self._set(number, columns)
            self._add_event(number, at, "state", {"state": state, "reason": reason})
            return self.job(number)

    def update(self, number: int, **columns: Any) -> JobRow:
        """Other columns than the state."""
        with self.transaction():
            self._set(number, columns)
            return self.job(number)

    def record_step(self, number: int, *, end: int, event: Mapping[str, Any], at: float | None = None) -> JobRow:
        """A step of the job has ended at position `end`."""
        with self.transaction():
            self._db.execute("UPDATE jobs SET position = ?, num_steps = num_steps + 1 WHERE number = ?", (end, number))
            self._add_event(number, time.time() if at is None else at, "step", event)
            return self.job(number)

    def add_tokens(
        self, number: int, records: Sequence[TokenRecord], *, at: float | None = None, is_told: bool = True
    ) -> JobRow:
        """Tokens of a job, in the order in which its stream gives them; an event tells how many there are, if wanted.

        Raises:
            ImpossibleChange: a token repeats, skips one, or comes after its sample's end.
        """
        at = time.time() if at is None else at
        with self.transaction():
            row = self.job(number)
            cursor = row.num_tokens
            for record in records:
                cursor += 1
                grown = self._db.execute(
                    "UPDATE samples SET num_tokens = num_tokens + 1, text = text || ?, finish_reason = ? "
                    "WHERE job = ? AND sample = ? AND num_tokens = ? AND finish_reason IS NULL",
                    (record.text, record.finish_reason, number, record.sample, record.index),
                )
                if grown.rowcount != 1:
                    raise ImpossibleChange(
                        f"job {row.id}: token {record.index} of sample {record.sample} is not the next one"
                    )
                self._db.execute(
                    "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", token_row(number, cursor, record)
                )
            columns: dict[str, Any] = {}
            if row.first_token_at is None and records:
                columns["first_token_at"] = at
                phase = PHASE_COLUMNS.get(row.state, "first_decode_s")
                columns[phase] = getattr(row, phase) + max(at - row.state_at, 0.0)
            self._db.execute("UPDATE jobs SET num_tokens = ? WHERE number = ?", (cursor, number))
            self._set(number, columns)
            if records and is_told:
                self._add_event(number, at, "tokens", {"num_tokens": cursor})
            return self.job(number)

    # ---- retention -----------------------------------------------------------------------------------------------

    def retire(self, *, keep_jobs: int, keep_s: float, now: float | None = None) -> list[str]:
        """Forgets the oldest ended jobs beyond what is kept, at most RETIRED_AT_ONCE, and returns their ids."""
        now = time.time() if now is None else now
        marks = ", ".join("?" * len(FINAL))
        query = (
            f"SELECT * FROM (SELECT number, id, snapshot, finished_at, row_number() OVER newest AS place, "
            f"sum(num_tokens) OVER newest AS sum_tokens FROM jobs WHERE state IN ({marks}) "
            "WINDOW newest AS (ORDER BY number DESC)) WHERE place > ? OR sum_tokens > ? OR finished_at < ? "
            "ORDER BY number LIMIT ?"
        )
        with self.transaction():
            rows = self._rows(query, *FINAL, keep_jobs, MAX_KEPT_TOKENS, now - keep_s, RETIRED_AT_ONCE)
            self._db.executemany("DELETE FROM jobs WHERE number = ?", [(row["number"],) for row in rows])
        for row in rows:
            self.prompts.remove(row["id"])
            if row["snapshot"] is not None:
                with contextlib.suppress(OSError):
                    Path(row["snapshot"]).unlink()
        return [row["id"] for row in rows]

    def sweep_snapshots(self, min_age_s: float = 0.0) -> None:
        """Removes files that no job names: what a group wrote while it was given up, whole or in part. `min_age_s`
        spares those whose writer has yet to be heard."""
        newest = time.time() - min_age_s
        old: list[Path] = []
        for path in self.snapshots.iterdir():
            with contextlib.suppress(FileNotFoundError):  # a writer renames it at this moment
                if path.stat().st_mtime <= newest:
                    old.append(path)
        if not old:
            return
        named = {row["snapshot"] for row in self._rows("SELECT snapshot FROM jobs WHERE snapshot IS NOT NULL")}
        for path in old:
            if str(path) not in named:
                path.unlink(missing_ok=True)

    # ---- transactions --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written in the block, or nothing. Blocks may be nested.

        Raises:
            StaleJournal: a newer epoch has begun.
            JournalError: the disk does not take it.
        """
        if self._depth:
            yield
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                epoch = self._rows("SELECT value FROM meta WHERE name = 'epoch'")[0]["value"]
                if epoch != self.epoch:
                    raise StaleJournal(f"epoch {epoch} has begun, this controller is of epoch {self.epoch}")
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # an error of the disk has rolled back already
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._depth -= 1
        except sqlite3.IntegrityError as error:
            raise ImpossibleChange(f"the journal refuses it: {error}") from error
        except sqlite3.Error as error:
            raise JournalError(f"the journal in {self.directory} cannot be written: {_why(error)}") from error

    @contextlib.contextmanager
    def _durable(self) -> Iterator[None]:
        """What the block commits survives a loss of power."""
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")

    def _set(self, number: int, columns: Mapping[str, Any]) -> None:
        unknown = columns.keys() - UPDATABLE
        assert not unknown, unknown
        if columns:
            values = [json.dumps(value) if name == "report" else value for name, value in columns.items()]
            names = ", ".join(f"{name} = ?" for name in columns)
            self._db.execute(f"UPDATE jobs SET {names} WHERE number = ?", (*values, number))

    def _add_event(self, number: int, at: float, kind: str, data: Mapping[str, Any]) -> None:
        condition = "" if kind == "state" else f" AND num_events < {MAX_EVENTS}"
        counted = self._db.execute(
            f"UPDATE jobs SET num_events = num_events + 1 WHERE number = ?{condition}", (number,)
        )
        if counted.rowcount:
            self._db.execute(
                "INSERT INTO events SELECT number, num_events, ?, ?, ? FROM jobs WHERE number = ?",
                (at, kind, json.dumps(data), number),
            )


def _prepare(connection: sqlite3.Connection) -> int:
    """Settings, schema and a new epoch."""
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA journal_size_limit = 67108864")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("BEGIN IMMEDIATE")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        for statement in SCHEMA.split(";\n"):
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('epoch', 0)")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    elif version != SCHEMA_VERSION:
        raise JournalError(
            f"it has schema version {version}, this program knows {SCHEMA_VERSION}: name another state_dir"
        )
    connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'epoch'")
    epoch = connection.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()[0]
    connection.execute("COMMIT")
    connection.execute("PRAGMA synchronous = NORMAL")
    return int(epoch)


def _text(reason: str | None) -> str | None:
    """One line that SQLite and JSON can hold."""
    return None if reason is None else " ".join(reason.encode("utf-8", "replace").decode().split())[:2000]


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
