"""`LocalCluster`: a private Ray with one group of prefill workers and one decode worker on this machine.

    with LocalCluster(model="DIR", cp=2) as cluster:
        result = cluster.prefill(token_ids)
        for token in cluster.generate(result.job, Sampling(max_new_tokens=32)):
            ...

`prefill` runs every step and, while it does, streams finished pages to the decode worker; `generate` streams tokens.
Workers are kept between jobs. Leaving the block ends every process it started.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.outputs import check_writable
from longprefill.orchestrator.plan import (
    ClusterSettings,
    check_fits,
    check_pool_room,
    check_prompt_length,
    step_tokens_for,
)
from longprefill.orchestrator.ray_runtime import LocalRay, worker_environment
from longprefill.orchestrator.report import HandoffReport, StepDone
from longprefill.orchestrator.signals import uninterrupted
from longprefill.partition.errors import PromptError, UserError
from longprefill.partition.layout import Slice
from longprefill.partition.steps import pack_jobs
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.pieces import check_weights
from longprefill.workers.model.stored import fingerprint
from longprefill.workers.sampling import Sampling, Token


@dataclass(kw_only=True)
class PrefillResult:
    """A prefilled job, still open: generate from it, dump or export it, then `close` it."""

    job: int
    num_tokens: int
    steps: list[StepDone] = field(default_factory=list)
    prefill_s: float = 0.0
    """Wall time of all steps."""
    accepted_at: float = 0.0
    """time.perf_counter when running workers took the tokens."""
    handoff: HandoffReport | None = None


class LocalCluster:
    """See the module's text.

    Args:
        model: a published model directory.
        decode: False leaves the decode worker out (prefill, dump and export only).
        settings: the other keyword arguments are fields of `ClusterSettings`.

    Raises:
        UserError: the model, a setting or the machine's memory does not allow it; nothing was started.
        RunFailed: a worker did not start.
    """

    def __init__(self, model: str | Path, *, decode: bool = True, **settings: Any) -> None:
        self.settings = ClusterSettings(model_dir=str(Path(model).absolute()), **settings)
        self.config: ModelConfig = read_config(model)
        check_weights(model, self.config)
        self.fingerprint = fingerprint(model)
        step_tokens = step_tokens_for(self.settings, self.config, self.settings.max_tokens)
        self.memory = check_fits(self.settings, self.config, step_tokens, num_decode=int(decode))
        check_pool_room(self.settings, self.config, num_ranks=self.settings.num_ranks + int(decode))
        self.startup_s = 0.0
        self._has_decode = decode
        self._ray = LocalRay()
        self._workers: Any = None
        self._jobs: dict[int, np.ndarray] = {}
        self._next_job = 0

    def start(self) -> LocalCluster:
        """Starts Ray and the workers; entering the context does it. Does nothing when they run already."""
        if self._workers is not None:
            return self
        started = time.perf_counter()
        settings = self.settings
        try:
            # torch takes seconds to load, and Ray to start
            threading.Thread(target=_load_torch, name="load torch").start()
            self._ray.start(settings.num_ranks + 1, worker_environment(settings.threads_per_rank))
            # imported here: who only reads a plan needs no torch
            from longprefill.orchestrator.local_workers import LocalWorkers

            self._workers = LocalWorkers(settings, self.config, self.fingerprint, has_decode=self._has_decode)
            self._workers.start()
        except BaseException:
            self.close()
            raise
        self.startup_s = time.perf_counter() - started
        return self

    def close(self) -> None:
        """Ends every process and removes every file this cluster made; a second call does nothing. Interrupts wait
        until it is through, a few seconds at most."""
        with uninterrupted():
            workers, self._workers = self._workers, None
            self._jobs.clear()
            if workers is not None:
                workers.close()
            self._ray.stop()

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prefill(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int = 0,
        handoff: bool | None = None,
        on_step: Callable[[StepDone], None] | None = None,
    ) -> PrefillResult:
        """Prefills one prompt; room for `max_new_tokens` more tokens is kept at the decode worker. `handoff` False
        leaves the job in the prefill group only (default: hand over if there is a decode worker).

        Raises:
            PromptError: empty, a token outside the vocabulary, or too long for the model.
            UserError: not enough cache pages are free.
            RunFailed: a worker died, hung or failed.
        """
        hand_over = self._has_decode if handoff is None else handoff
        return self.prefill_many([tokens], max_new_tokens=max_new_tokens, handoff=hand_over, on_step=on_step)[0]

    def prefill_many(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        *,
        max_new_tokens: int = 0,
        handoff: bool = False,
        on_step: Callable[[StepDone], None] | None = None,
        step_tokens: int | None = None,
    ) -> list[PrefillResult]:
        """Prefills several prompts; short ones share steps. Raises as `prefill`."""
        arrays = [self._checked(tokens, max_new_tokens) for tokens in prompts]
        results: list[PrefillResult] = []
        with self._abandoning(results):
            for array in arrays:
                results.append(self._open(array, len(array) + max_new_tokens if handoff else len(array), None))
            jobs = [Slice(job=result.job, start=0, end=result.num_tokens) for result in results]
            return self._run(results, jobs, handoff=handoff, on_step=on_step, step_tokens=step_tokens)

    def run_until(
        self, tokens: Sequence[int] | np.ndarray, stop: int, *, step_tokens: int | None = None
    ) -> PrefillResult:
        """Prefills the first `stop` tokens only (a step border): to export a job in the middle of it.

        Raises:
            UserError: `stop` is less than 1; otherwise as `prefill`.
        """
        array = self._checked(tokens, 0)
        if stop < 1:
            raise UserError(f"stop={stop}: prefill at least 1 token")
        result = self._open(array, len(array), None)
        jobs = [Slice(job=result.job, start=0, end=min(stop, len(array)))]
        with self._abandoning([result]):
            return self._run([result], jobs, handoff=False, on_step=None, step_tokens=step_tokens)[0]

    def resume(
        self,
        snapshot: str | Path,
        *,
        max_new_tokens: int = 0,
        handoff: bool = False,
        step_tokens: int | None = None,
        on_step: Callable[[StepDone], None] | None = None,
        stop: int | None = None,
    ) -> PrefillResult:
        """Takes an exported job up where it stands, on this cluster's mesh, and finishes it, or goes on to its first
        `stop` tokens only (a step border).

        Raises:
            UserError: the snapshot is of another model, dtype or format.
        """
        path = str(Path(snapshot).absolute())
        header = self._running.read_snapshot(path)
        array = self._checked(header.tokens_T.numpy(), max_new_tokens)
        result = self._open(array, len(array) + max_new_tokens if handoff else len(array), path)
        end = len(array) if stop is None else min(stop, len(array))
        jobs = [Slice(job=result.job, start=header.position, end=end)] if header.position < end else []
        with self._abandoning([result]):
            return self._run([result], jobs, handoff=handoff, on_step=on_step, step_tokens=step_tokens)[0]

    def generate(self, job: int, sampling: Sampling) -> Generator[Token, None, None]:
        """Streams the tokens that the decode worker samples for a handed-over job; leaving the loop stops it too.

        Raises:
            UserError: the job was not handed over.
            RunFailed: the decode worker died or hung.
        """
        return self._running.generate(job, sampling)

    def dump(self, job: int, path: str | Path) -> None:
        """Writes logits, cache rows and states of a finished job as safetensors (workers/dump.py lists them).

        Raises:
            UserError: the path cannot be written, or the job is not open.
            RunFailed: it is not finished, or a worker died.
        """
        self._check_open(job)
        check_writable("the dump", Path(path))
        self._running.dump(job, str(Path(path).absolute()))

    def final_tensors(self, job: int) -> dict[str, np.ndarray]:
        """What `dump` writes, as fp32 arrays by name. Raises as `dump`."""
        self._check_open(job)
        return self._running.final_tensors(job)

    def export_job(self, job: int, path: str | Path) -> None:
        """Writes a snapshot that a cluster with any number of ranks resumes from.

        Raises:
            UserError: the path cannot be written, or the job is not open.
            RunFailed: a worker died.
        """
        self._check_open(job)
        check_writable("the snapshot", Path(path))
        self._running.export_job(job, str(Path(path).absolute()), self._jobs[job])

    def close_job(self, job: int) -> None:
        """Forgets a job everywhere; its pages become free.

        Raises:
            UserError: the job is not open.
            RunFailed: a worker died.
        """
        self._check_open(job)
        self._running.close_job(job)
        del self._jobs[job]

    @property
    def next_job(self) -> int:
        """The number that the next job gets."""
        return self._next_job

    @property
    def workers(self) -> Any:
        """The running workers (orchestrator/local_workers.py): statistics, recorded choices."""
        return self._workers

    @property
    def _running(self) -> Any:
        if self._workers is None:
            raise UserError("the cluster is not running: use it as a context manager, or call start() first")
        return self._workers

    def _check_open(self, job: int) -> None:
        if job not in self._jobs:
            raise UserError(f"job {job} is not open: open are {sorted(self._jobs) or 'none'}")

    @contextlib.contextmanager
    def _abandoning(self, results: list[PrefillResult]) -> Iterator[None]:
        """What fails in the block gives its pages back; the cluster takes further jobs if its workers live."""
        try:
            yield
        except (UserError, RunFailed):
            for result in results:
                self._running.abandon_job(result.job)
                self._jobs.pop(result.job, None)
            raise

    def _checked(self, tokens: Sequence[int] | np.ndarray, max_new_tokens: int) -> np.ndarray:
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
            raise PromptError(f"a prompt is a list of integer token ids, got {array.dtype} with shape {array.shape}")
        check_prompt_length(self.config, len(array), max_new_tokens)
        outside = np.flatnonzero((array < 0) | (array >= self.config.vocab_size))
        if outside.size:
            raise PromptError(
                f"token id {array[outside[0]]} at position {outside[0]} is outside the vocabulary of "
                f"{self.config.vocab_size}: ids are 0 to {self.config.vocab_size - 1}"
            )
        return array.astype(np.int32)

    def _open(self, array: np.ndarray, max_tokens: int, snapshot: str | None) -> PrefillResult:
        job, self._next_job = self._next_job, self._next_job + 1
        self._running.open(job, array, max_tokens, snapshot)
        self._jobs[job] = array
        return PrefillResult(job=job, num_tokens=len(array), accepted_at=time.perf_counter())

    def _run(
        self,
        results: list[PrefillResult],
        jobs: list[Slice],
        *,
        handoff: bool,
        on_step: Callable[[StepDone], None] | None,
        step_tokens: int | None,
    ) -> list[PrefillResult]:
        if handoff and not self._has_decode:
            raise UserError(
                "this cluster has no decode worker: start it with decode=True, or prefill with handoff=False"
            )
        if step_tokens is None:
            longest = max((job.num_tokens for job in jobs), default=1)
            step_tokens = step_tokens_for(self.settings, self.config, longest)
        by_job = {result.job: result for result in results}
        if handoff:
            self._workers.open_handoffs(list(by_job))
        steps = [tuple(step) for step in pack_jobs(jobs, step_tokens)]
        for number, slices in enumerate(steps):
            ending = tuple(part.job for part in slices if part.end == by_job[part.job].num_tokens)
            started = time.perf_counter()
            reports = self._workers.run_step(slices, ending)
            done = StepDone(
                number=number,
                num_steps=len(steps),
                slices=slices,
                seconds=time.perf_counter() - started,
                rank_seconds=tuple(report.seconds for report in reports),
            )
            for part in slices:
                by_job[part.job].steps.append(done)
                by_job[part.job].prefill_s += done.seconds
            if on_step is not None:
                on_step(done)
        if handoff:
            for result in results:
                result.handoff = self._workers.finish_handoff(result.job)
        return results


def _load_torch() -> None:
    with contextlib.suppress(ImportError):  # whoever needs it says what is missing
        importlib.import_module("torch")
