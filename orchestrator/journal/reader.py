"""Reading the journal."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from longprefill.orchestrator.controller.contract import Conflict, UnknownJob
from longprefill.orchestrator.job import FINAL_STATES, JobEvent, JobState, SampleView, TokenRecord
from longprefill.orchestrator.journal.schema import JobRow, job_row, sample_view, token_record

FINAL = tuple(sorted(FINAL_STATES))


class JournalReader:
    """Queries over the tables of `schema`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def job(self, number: int) -> JobRow:
        return job_row(self._rows("SELECT * FROM jobs WHERE number = ?", number)[0])

    def find(self, job: str, tenant: str | None) -> JobRow:
        """A job by its id; `tenant` None sees all.

        Raises:
            UnknownJob: there is none of this id, or it is another tenant's.
        """
        found = self._rows("SELECT * FROM jobs WHERE id = ?", job)
        if not found or tenant not in (None, found[0]["tenant"]):
            raise UnknownJob(f"there is no job {job[:64]!r}")
        return job_row(found[0])

    def unfinished(self) -> list[JobRow]:
        """Jobs that have not ended, oldest first."""
        marks = ", ".join("?" * len(FINAL))
        return [
            job_row(row)
            for row in self._rows(f"SELECT * FROM jobs WHERE state NOT IN ({marks}) ORDER BY number", *FINAL)
        ]

    def ids(self) -> set[str]:
        """Of all jobs."""
        return {row["id"] for row in self._rows("SELECT id FROM jobs")}

    def list(self, tenant: str | None, states: Sequence[JobState], limit: int, before: str | None) -> list[JobRow]:
        """Newest first."""
        conditions, values = ["1"], list[Any]()
        if tenant is not None:
            conditions.append("tenant = ?")
            values.append(tenant)
        if states:
            conditions.append(f"state IN ({', '.join('?' * len(states))})")
            values += states
        if before is not None:
            conditions.append("number < ?")
            values.append(self.find(before, tenant).number)
        query = f"SELECT * FROM jobs WHERE {' AND '.join(conditions)} ORDER BY number DESC LIMIT ?"
        return [job_row(row) for row in self._rows(query, *values, limit)]

    def samples(self, number: int) -> tuple[SampleView, ...]:
        rows = self._rows("SELECT * FROM samples WHERE job = ? ORDER BY sample", number)
        return tuple(sample_view(row) for row in rows)

    def tokens(self, number: int, after: int = 0, limit: int = 1000) -> tuple[tuple[TokenRecord, ...], int]:
        """Tokens after a cursor, and the cursor of the last of them."""
        rows = self._rows(
            "SELECT * FROM tokens WHERE job = ? AND cursor > ? ORDER BY cursor LIMIT ?", number, after, limit
        )
        return tuple(token_record(row) for row in rows), rows[-1]["cursor"] if rows else after

    def token_ids(self, number: int) -> dict[int, tuple[int, ...]]:
        """The tokens of each sample that has any."""
        found: dict[int, list[int]] = {}
        query = "SELECT sample, token FROM tokens WHERE job = ? ORDER BY cursor"
        for row in self._rows(query, number):
            found.setdefault(row["sample"], []).append(row["token"])
        return {sample: tuple(ids) for sample, ids in found.items()}

    def events(self, row: JobRow, after: int = 0, limit: int = 1000) -> list[JobEvent]:
        rows = self._rows(
            "SELECT * FROM events WHERE job = ? AND number > ? ORDER BY number LIMIT ?", row.number, after, limit
        )
        return [
            JobEvent(job=row.id, number=e["number"], at=e["at"], kind=e["kind"], data=json.loads(e["data"]))
            for e in rows
        ]

    def num_queued(self) -> dict[str, int]:
        """Waiting jobs by tenant."""
        query = "SELECT tenant, count(*) AS num FROM jobs WHERE state = ? GROUP BY tenant"
        return {row["tenant"]: row["num"] for row in self._rows(query, JobState.QUEUED)}

    def earlier(self, tenant: str, key: str | None, fingerprint: str) -> JobRow | None:
        """The job that an idempotency key already stands for.

        Raises:
            Conflict: the key came with another prompt or request.
        """
        if key is None:
            return None
        found = self._rows("SELECT * FROM jobs WHERE tenant = ? AND idempotency_key = ?", tenant, key)
        if not found:
            return None
        row = job_row(found[0])
        if row.fingerprint != fingerprint:
            raise Conflict(
                f"the idempotency key {key!r} was used for job {row.id} with another prompt or other parameters: use "
                "a new key"
            )
        return row

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        return self._db.execute(query, values).fetchall()
