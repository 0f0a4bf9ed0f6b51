"""A job of the service: what its owner asked for, the states it goes through, and what can be seen of it.

Everything here pickles and imports neither torch nor ray: it crosses from the HTTP side to the controller and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from longprefill.partition.errors import UserError


class JobState(StrEnum):
    """Where a job is. A preempted job is queued again, with a position above 0."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    GENERATING = "generating"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in FINAL_STATES


FINAL_STATES = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})
_ENDS = (JobState.FAILED, JobState.CANCELLED)
TRANSITIONS: Mapping[JobState, tuple[JobState, ...]] = {
    JobState.QUEUED: (JobState.PREFILLING, *_ENDS),
    # back to queued: preempted at a step border, or its group was lost; done: nothing was to be generated
    JobState.PREFILLING: (JobState.QUEUED, JobState.HANDING_OFF, JobState.DONE, *_ENDS),
    JobState.HANDING_OFF: (JobState.QUEUED, JobState.GENERATING, *_ENDS),
    # back to queued: the decode worker was lost
    JobState.GENERATING: (JobState.QUEUED, JobState.DONE, *_ENDS),
    JobState.DONE: (),
    JobState.FAILED: (),
    JobState.CANCELLED: (),
}
"""Every change of state that may happen; the journal refuses all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """What the owner of a job asks for, apart from the prompt's token ids.

    Raises:
        UserError: a value that cannot be, with what is allowed.
    """

    tenant: str
    max_new_tokens: int
    """0: prefill only."""
    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Texts that end a sample; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    """Alternatives reported beside each token's own log-probability; None: no log-probabilities."""
    timeout_s: float | None = None
    """The job fails when it has not ended this long after it was accepted."""
    deadline_s: float | None = None
    """By when, after acceptance, the owner wants the first token: what the scheduler aims at."""
    priority: float = 1.0
    idempotency_key: str | None = None
    keep_snapshot: bool = False
    """Keep the prefilled job (pages and boundary state) as a file that `longprefill run --resume` takes up."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise UserError(f"max_tokens={self.max_new_tokens}: use 0 (prefill only) or more")
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise UserError(f"n={self.num_samples}: use 1 to {MAX_SAMPLES}")
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise UserError(f"temperature={self.temperature}: use 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: use a number in (0, 1]")
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed={self.seed}: use an integer in [0, 2**64)")
        if len(self.stop) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop):
            raise UserError(f"stop: use at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters")
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_LOGPROBS:
            raise UserError(f"logprobs={self.num_logprobs}: use 0 to {MAX_LOGPROBS}")
        for name in ("timeout_s", "deadline_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_SECONDS:
                raise UserError(f"{name}={value}: use a number of seconds in (0, {MAX_SECONDS}]")
        if not 0 < self.priority <= MAX_PRIORITY:
            raise UserError(f"priority={self.priority}: use a number in (0, {MAX_PRIORITY:g}]")
        key = self.idempotency_key
        if key is not None and not (0 < len(key) <= MAX_KEY_CHARACTERS and key.isprintable()):
            raise UserError(f"an idempotency key has 1 to {MAX_KEY_CHARACTERS} printable characters")


MAX_SAMPLES = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_LOGPROBS = 20
MAX_SECONDS = 7 * 86400.0
MAX_PRIORITY = 1000.0
MAX_KEY_CHARACTERS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One sampled token, durable before anyone sees it: a stream that is taken up again never repeats or skips one."""

    sample: int
    index: int
    """Within the sample, from 0."""
    token: int
    text: str
    """What this token adds to the sample's text; characters that are not whole yet and what may begin a stop text come
    with a later token."""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""
    finish_reason: str | None = None
    """None: more follow; "stop" or "length"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Tokens after a cursor, in the order in which they became durable."""

    records: tuple[TokenRecord, ...]
    cursor: int
    """Ask for what comes after this next time."""
    state: JobState
    """Of the job when the batch was read: final and no records means that nothing more comes."""
    reason: str | None = None
    """Why it failed or was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Something that happened to a job. `number` is 1, 2, ... within the job: the Last-Event-ID of its event stream."""

    job: str
    number: int
    at: float
    """Seconds since the epoch."""
    kind: str
    """"state" (data: state, reason), "step" (number, start, end, seconds, num_steps_left, group), "tokens" (how many
    so far)."""
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    text: str
    num_tokens: int
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimings:
    """Seconds; None where the job has not come so far. They add up to the time from acceptance to the first token."""

    queue_s: float | None = None
    """Accepted until its first step starts, and again whenever it waits for a group."""
    prefill_s: float | None = None
    transfer_s: float | None = None
    """Hand-off that is not hidden behind prefill."""
    first_decode_s: float | None = None
    """From the end of the hand-off to the first token."""
    ttft_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEstimate:
    """What the scheduler expects now."""

    start_s: float | None
    """Until it runs next."""
    finish_s: float | None
    """Until its prefill is done."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """All that its owner may know of a job."""

    id: str
    tenant: str
    state: JobState
    reason: str | None
    """Why it failed or was cancelled, or why it waits."""
    created_at: float
    """Seconds since the epoch, as all `_at`."""
    started_at: float | None
    finished_at: float | None
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed because a prefix was at hand."""
    position: int
    """Prompt tokens that are prefilled."""
    num_steps: int
    """Steps that ended."""
    num_preemptions: int
    num_attempts: int
    """How often it was started: 1 without failures."""
    group: str | None
    decode_worker: str | None
    estimate: JobEstimate | None
    timings: JobTimings
    samples: tuple[SampleView, ...]
    request: JobRequest
    snapshot: str | None = None
    """The file, when it was asked for and is there."""
    report: Mapping[str, Any] | None = None
    """As `longprefill run --json` has it: mesh, comm, imbalance, handoff; once prefill is done."""
