"""The controller: many jobs over several groups, from a journal that no job is lost from (`contract.ControllerApi`).

    service = ControllerService(config, connect)
    await service.start()        # opens the journal, takes over living hosts, places unfinished jobs
    await service.run()          # until it must end: the error says why
    await service.stop(end_hosts=True)

An asyncio class without Ray; `actor.py` puts it into one. Its parts: `recovery` (once), `keeping` (a task a host),
`stepping` (prefill), `handing_off`, `generating`, over the books of `core`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longprefill.orchestrator.config import ServiceConfig
from longprefill.orchestrator.controller import admission
from longprefill.orchestrator.controller.contract import Busy, ClusterView, Conflict, NotReady, Readiness, Submission
from longprefill.orchestrator.controller.core import Core
from longprefill.orchestrator.controller.generating import Generating
from longprefill.orchestrator.controller.handing_off import EXPORT_DEADLINE_S, HandingOff
from longprefill.orchestrator.controller.keeping import Keeping
from longprefill.orchestrator.controller.links import HostDirectory
from longprefill.orchestrator.controller.live import LiveJob
from longprefill.orchestrator.controller.recovery import Recovery
from longprefill.orchestrator.controller.stepping import Stepping
from longprefill.orchestrator.controller.views import cluster_view, job_view, readiness
from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.hosts.contract import StaleEpoch
from longprefill.orchestrator.job import JobEvent, JobRequest, JobState, JobView, TokenBatch
from longprefill.orchestrator.journal.journal import FILE_NAME, Journal, JournalError, NewJob
from longprefill.partition.errors import UserError
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TICK_S = 0.2
RETIRE_EVERY_S = 10.0
SNAPSHOT_HEARD_S = 2 * EXPORT_DEADLINE_S
"""So old is no file whose export is still waited for."""
JOURNAL_RETRY_S = 1.0
MAX_WAIT_S = 60.0
MAX_LISTED = 1001
"""One more than HTTP gives at once, which tells it that more follow."""
STREAM_BATCH = 1000


class ControllerService:
    """See the module's text."""

    def __init__(self, config: ServiceConfig, connect: Callable[[int], HostDirectory]) -> None:
        """`connect` gives the hosts as the controller of an epoch commands them."""
        self._config = config
        self._connect = connect
        self._core: Core | None = None
        self._trouble = "it starts"
        self._is_draining = False
        self._writing: Counter[str] = Counter()
        """Jobs by tenant that are on their way to the disk."""

    # ---- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Opens the journal, waiting for a disk that takes it, and begins to work.

        Raises:
            UserError: the model or its tokenizer cannot be used.
        """
        model = read_config(self._config.model.dir)
        has_tokenizer = (Path(self._config.model.dir) / "tokenizer.json").is_file()
        tokenizer = Tokenizer(self._config.model.dir) if has_tokenizer else None
        journal = await self._open_journal()
        try:
            core = await self._begin(model, tokenizer, journal)
        except BaseException:
            journal.close()
            raise
        self._core, self._trouble = core, ""
        logger.info("epoch %d, %d groups, %d decode workers", journal.epoch, len(core.prefill), len(core.decode))

    async def _begin(self, model: ModelConfig, tokenizer: Tokenizer | None, journal: Journal) -> Core:
        """The books as the journal has them, and everything at work."""
        core = Core(self._config, model, tokenizer, journal, self._connect(journal.epoch))
        core.traces.sweep(journal.ids())
        generating = Generating(core)
        handing_off = HandingOff(core, generating)
        await Recovery(core, handing_off, generating).run()
        keeping = Keeping(core, generating)
        core.spawn(Stepping(core, handing_off).run(), "stepping")
        for host in core.all_hosts():
            core.spawn(keeping.keep(host), f"keep {host.name}")
        core.spawn(self._tick(core), "tick")
        return core

    async def run(self) -> None:
        """Until the controller must end.

        Raises:
            StaleEpoch, StaleJournal: a newer one has taken over.
            JournalError: the disk does not take what happened; another start waits until it does.
            Anything else: a bug.
        """
        await asyncio.shield(self._ready().failure)

    @property
    def is_running(self) -> bool:
        """Whether `start` has got through."""
        return self._core is not None

    async def stop(self, *, end_hosts: bool) -> None:
        """Ends all work at once. Jobs stay in the journal and on their hosts, unless these end too."""
        core, self._core, self._trouble = self._core, None, "it has ended"
        if core is None:
            return
        core.failure.cancel()
        await core.stop_tasks()
        if end_hosts:
            for host in core.all_hosts():
                if host.link is not None:
                    try:
                        await host.link.call("close", deadline_s=10.0)
                    except StaleEpoch:
                        continue  # it is a newer controller's by now, and stays
                    except (RunFailed, UserError) as error:
                        logger.info("%s was not closed: %s", host.name, error)
                with contextlib.suppress(RunFailed):
                    await core.directory.end(host.name, host.state)
        core.journal.close()

    async def _open_journal(self) -> Journal:
        while True:
            try:
                return Journal.open(self._config.service.state_dir)
            except JournalError as error:
                self._trouble = str(error)
                logger.error("%s", error)
                await asyncio.sleep(JOURNAL_RETRY_S)

    async def _tick(self, core: Core) -> None:
        """Timeouts, figures and retention."""
        service, retired_at = self._config.service, 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.time()
            for job in list(core.jobs.values()):
                limit_s = min(job.row.request.timeout_s or service.request_timeout_s, service.request_timeout_s)
                if now - job.row.created_at > limit_s and not job.is_ended:
                    core.end(job, JobState.FAILED, f"it had not ended {limit_s:g} s after it was accepted")
            core.metrics.stages([job.row for job in core.jobs.values()])
            if now - retired_at > RETIRE_EVERY_S:
                retired_at = now
                gone = core.journal.retire(keep_jobs=service.keep_finished_jobs, keep_s=service.keep_finished_s)
                core.traces.remove(gone)
                try:
                    core.journal.sweep_snapshots(SNAPSHOT_HEARD_S)
                except OSError as error:
                    logger.warning("snapshots that no job names were not removed: %s", error)
                with contextlib.suppress(OSError):
                    size = (core.journal.directory / FILE_NAME).stat().st_size
                    core.metrics.journal_bytes.set(size)

    def _ready(self) -> Core:
        """The books.

        Raises:
            NotReady: there are none yet, and why.
        """
        if self._core is None:
            raise NotReady(f"the controller takes nothing now: {self._trouble}", 1.0, is_draining=True)
        return self._core

    # ---- contract.ControllerApi ----------------------------------------------------------------------------------

    async def submit(self, request: JobRequest, tokens_T: np.ndarray) -> Submission:
        core = self._ready()
        try:
            return await self._submit(core, request, np.asarray(tokens_T))
        except UserError as refusal:
            core.metrics.refused.labels(type(refusal).__name__).inc()
            raise

    async def _submit(self, core: Core, request: JobRequest, tokens_T: np.ndarray) -> Submission:
        admission.check_request(core, request, tokens_T)
        mark = await asyncio.to_thread(admission.fingerprint, request, tokens_T)
        earlier = core.journal.earlier(request.tenant, request.idempotency_key, mark)
        if earlier is not None:
            return Submission(job=earlier.id, is_new=False, num_queued=core.num_queued())
        if self._is_draining:
            raise Busy("the service drains: it takes no new jobs", 10.0, is_draining=True)
        admission.check_queue(core, request, self._writing.total(), self._writing[request.tenant])
        name = f"job-{secrets.token_hex(12)}"
        async with self._being_written(core, request.tenant, name):
            await asyncio.to_thread(core.journal.prompts.write, name, tokens_T)
            new = NewJob(
                id=name, request=request, fingerprint=mark, prompt_tokens=len(tokens_T), created_at=time.time()
            )
            row, is_new = core.journal.accept(new)
            if is_new:
                core.enqueue(LiveJob(row=row))
        if is_new:
            core.metrics.submitted.labels(core.metrics.tenant(row.tenant)).inc()
            core.metrics.tokens.labels("prompt").inc(row.prompt_tokens)
        else:
            core.journal.prompts.remove(name)
        return Submission(job=row.id, is_new=is_new, num_queued=core.num_queued())

    @contextlib.asynccontextmanager
    async def _being_written(self, core: Core, tenant: str, name: str) -> AsyncIterator[None]:
        """Counts a job that is on its way to the disk; a disk that does not take it is a refusal."""
        self._writing[tenant] += 1
        try:
            yield
        except (OSError, JournalError) as error:
            core.journal.prompts.remove(name)
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise Busy(f"the job could not be written to state_dir: {why}", 10.0, is_draining=True) from error
        finally:
            self._writing[tenant] -= 1

    async def inspect(self, job: str, tenant: str | None) -> JobView:
        core = self._ready()
        return job_view(core, core.journal.find(job, tenant))

    async def list_jobs(
        self, tenant: str | None, *, states: Sequence[JobState] = (), limit: int = 100, before: str | None = None
    ) -> list[JobView]:
        core = self._ready()
        if not 1 <= limit <= MAX_LISTED:
            raise UserError(f"limit={limit}: use 1 to {MAX_LISTED}")
        return [job_view(core, row) for row in core.journal.list(tenant, states, limit, before)]

    async def cancel(self, job: str, tenant: str | None) -> JobView:
        core = self._ready()
        row = core.journal.find(job, tenant)
        live = core.jobs.get(row.number)
        if live is not None and not row.state.is_final:
            core.end(live, JobState.CANCELLED, "cancelled by its owner")
        return job_view(core, core.journal.job(row.number))

    async def events(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> list[JobEvent]:
        core = self._ready()
        row = core.journal.find(job, tenant)
        deadline = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        while True:
            found = core.journal.events(row, after, STREAM_BATCH)
            left_s = deadline - time.monotonic()
            if found or row.state.is_final or left_s <= 0:
                return found
            await core.news.wait(row.number, left_s)
            row = core.journal.find(job, tenant)

    async def tokens(self, job: str, tenant: str | None, *, after: int = 0, timeout_s: float = 20.0) -> TokenBatch:
        core = self._ready()
        row = core.journal.find(job, tenant)
        deadline = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        while True:
            records, cursor = core.journal.tokens(row.number, after, STREAM_BATCH)
            left_s = deadline - time.monotonic()
            if records or row.state.is_final or left_s <= 0:
                return TokenBatch(records=records, cursor=cursor, state=row.state, reason=row.reason)
            await core.news.wait(row.number, left_s)
            row = core.journal.find(job, tenant)

    async def trace(self, job: str, tenant: str | None) -> dict[str, Any]:
        core = self._ready()
        row = core.journal.find(job, tenant)
        if not self._config.service.trace:
            raise Conflict("there are no traces: start the service with trace = true in [service]")
        events = core.journal.events(row, limit=1 << 20)
        return await asyncio.to_thread(core.traces.chrome_trace, row.id, events, time.time())

    async def cluster(self) -> ClusterView:
        return await cluster_view(self._ready(), is_draining=self._is_draining)

    async def readiness(self) -> Readiness:
        if self._core is None:
            return Readiness(is_ready=False, reasons=(self._trouble,))
        return readiness(self._core, is_draining=self._is_draining)

    async def metrics(self) -> str:
        return self._ready().metrics.text()

    async def drain(self, timeout_s: float) -> bool:
        core = self._ready()
        self._is_draining = True
        deadline = time.monotonic() + timeout_s
        while (is_busy := bool(core.jobs) or self._writing.total() > 0) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return not is_busy
