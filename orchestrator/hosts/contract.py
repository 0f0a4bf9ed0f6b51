"""What the controller asks of the hosts of prefill groups and decode workers, and how they refuse.

A host is a detached, named Ray actor. Its commands carry the controller's epoch: a higher one than any before takes the
host over, an older one is refused with `StaleEpoch`. In the order in which a job needs them:

    prefill host    start - await_ready - open_job - [start_handoff] - run_step ... - [export_job] -
                    [finish_handoff] - close_job
    decode host     start - await_ready - (reserve, commit: by the prefill host) - generate - poll ... -
                    [end_sample] - release

Every command may be repeated: one that was carried out already answers as it did then. Commands to a group wait for
each other; `state` never waits. Jobs are the controller's numbers. Errors raised here reach the caller through Ray as
they are (`cause` of Ray's error). Torch and ray free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from longprefill.orchestrator.errors import RunFailed
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.partition.errors import UserError
from longprefill.partition.layout import Slice
from longprefill.workers.sampling import DecodeFailure, DecodeToken, GenerateRequest
from longprefill.workers.sampling import SampleStart as SampleStart  # part of a GenerateRequest

if TYPE_CHECKING:
    from longprefill.comms.transport.base import PoolAddress
    from longprefill.workers.handoff.parts import HandoffTarget
    from longprefill.workers.spec import WorkerStats

NAMESPACE = "longprefill"
"""Of the controller's and all hosts' names in Ray."""
HOST_STATES = ("starting", "waiting", "ready", "rebuilding", "failed", "closed")


# ---- refusals --------------------------------------------------------------------------------------------------------


class StaleEpoch(UserError):
    """A newer controller commands this host: whoever is told this must end."""


class UnknownHostJob(UserError):
    """The job is not here: never opened, closed, or lost with the group that held it."""


class NotReady(UserError):
    """The host is not ready: it starts, waits for resources, rebuilds its group, or has failed; the reason is given."""


class NoLink(UserError):
    """Pages cannot travel from this prefill group to that decode worker; says what would help."""


class NoRoom(UserError):
    """Not enough cache pages or hand-off slots are free now. More than `max_tokens` never fits."""

    def __init__(self, message: str, needed_tokens: int, free_tokens: int, max_tokens: int) -> None:
        super().__init__(message)
        self.needed_tokens = needed_tokens
        self.free_tokens = free_tokens
        self.max_tokens = max_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return NoRoom, (str(self), self.needed_tokens, self.free_tokens, self.max_tokens)


class GroupLost(RunFailed):
    """The group failed in the middle of the command. All its open jobs are lost; the host rebuilds it if it can."""


class HandoffFailed(RunFailed):
    """The decode side did not take the job, or is gone. The job is still open and whole at the prefill side: start a
    hand-off to this or to another decode worker, or close it."""


# ---- settings and states ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """One prefill group or decode worker. `cluster` has the mesh, formats and capacity; a decode worker is a mesh of
    one, whatever cp and tp say."""

    name: str
    """The actor's name: "prefill-0"."""
    cluster: ClusterSettings
    resources: Mapping[str, float] = field(default_factory=dict)
    """Of every rank beside one CPU: "GPU", "NPU", or a custom name of nodes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of the ranks, where Ray's workers do not have it already."""
    listen: str | None = None
    """Decode: address of its machine at which it takes pages from prefill groups on others, on a free port; None:
    shared memory only. Unencrypted: for networks that are private to the service."""
    max_rebuilds: int = 10
    """After so many in a row without a finished step between them the host is failed."""
    max_running_samples: int = 64
    """Decode: samples in one iteration; more wait their turn."""
    max_kept_tokens: int = 65536
    """Decode: tokens that nobody has acknowledged; generation waits when there are more."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise UserError(f"host name {self.name!r}: use letters, digits, - and _")
        for name in ("max_rebuilds", "max_running_samples", "max_kept_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: use 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    sample: int
    num_generated: int
    """Tokens of it that exist, those before it came to this host included."""
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostJob:
    job: int
    stage: str
    """Prefill: "open" or "handing_off". Decode: "reserved", "committed", "generating" or "ended" (all samples)."""
    position: int
    """Prefill: tokens done. Decode: tokens handed over."""
    num_tokens: int
    decode: str | None = None
    """Prefill: the decode host that its pages stream to."""
    samples: tuple[HostSample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    name: str
    role: str
    """"prefill" or "decode"."""
    state: str
    """One of HOST_STATES."""
    reason: str | None
    """Why it waits, rebuilds or has failed."""
    epoch: int
    """The highest that commanded it."""
    generation: int
    """Of the group: it grows when the group is rebuilt, and every job that was opened under a lower one is lost."""
    mesh: str
    pid: int
    """Of the host's own process."""
    nodes: tuple[str, ...]
    """Names of the machines its workers run on."""
    jobs: tuple[HostJob, ...]
    used_tokens: int
    """Of cache pages that are held, 64 a page."""
    max_tokens: int
    rss_bytes: int
    """Of all its processes on the host's machine, as far as they could be read."""
    num_restarts: int
    last_step: int
    """The highest number that `run_step` was given; 0 before."""
    running: tuple[int, tuple[Slice, ...]] | None
    """(number, slices) of the step that runs now."""
    machine: str = ""
    """Where `pid` means something: `Whereabouts.machine` of the host."""
    first_cursor: int = 0
    """Decode: `poll` from here gives everything that was not acknowledged."""


# ---- prefill ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOutcome:
    position: int
    """Where the job stands: 0, or the snapshot's position."""
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    number: int
    seconds: float
    """Wall time at the host."""
    rank_seconds: tuple[float, ...]
    generation: int
    stats: tuple[WorkerStats, ...]
    """By rank: bytes and calls of this step's collectives, its spans when tracing is on, peak memory so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRequest:
    """Where a job goes and what room it needs there."""

    job: int
    decode: str
    """Name of the decode host."""
    max_new_tokens: int
    num_samples: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOutcome:
    """The decode worker has verified everything and holds the job; the prefill side may close it."""

    num_bytes: int
    seconds: float
    """From the reservation to the acknowledgement."""
    exposed_s: float
    """From `finish_handoff` to the acknowledgement."""
    num_attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOutcome:
    path: str
    position: int
    num_bytes: int
    seconds: float


class PrefillHostApi(Protocol):
    """All raise StaleEpoch; those that name a job UnknownHostJob; those that need the group NotReady and GroupLost."""

    def start(self, epoch: int) -> None:
        """Begins to place and start the group; returns at once. See `state`."""
        ...

    def state(self, epoch: int) -> HostState: ...

    def await_ready(self, epoch: int, timeout_s: float) -> HostState:
        """The state as soon as it is "ready", "failed" or "closed", or after `timeout_s`."""
        ...

    def check_link(self, epoch: int, decode: str) -> None:
        """Raises NoLink unless every rank can write to the decode host's pool."""
        ...

    def open_job(self, epoch: int, job: int, tokens_T: np.ndarray, snapshot: str | None = None) -> OpenOutcome:
        """Gives a job its pages, and its prompt (int [T]) to all ranks. `snapshot`: a file of `export_job` whose
        first `position` tokens are this prompt's.

        Raises:
            NoRoom: not enough pages.
            UserError: the snapshot cannot be used.
        """
        ...

    def start_handoff(self, epoch: int, request: HandoffRequest) -> None:
        """Reserves room at the decode host; what is done streams there now, and every further step as it ends. A
        hand-off to another host or under way already is given up first.

        Raises:
            NoRoom: at the decode host; nothing is reserved.
            NoLink: no way to it.
            HandoffFailed: it does not answer.
        """
        ...

    def run_step(self, epoch: int, number: int, slices: Sequence[Slice]) -> StepOutcome:
        """One step of open jobs, each continuing where it stands. Numbers grow, with gaps if you like; a repeated
        number answers (or fails) as the step did, waiting for it when it still runs."""
        ...

    def finish_handoff(self, epoch: int, job: int) -> HandoffOutcome:
        """Sends the rest of a job whose prompt is done and waits for the decode worker's acknowledgement; other jobs'
        steps go on meanwhile. What arrives damaged is sent once more.

        Raises:
            HandoffFailed: with the reason.
        """
        ...

    def cancel_handoff(self, epoch: int, job: int) -> None:
        """Stops sending, and releases the reservation if the decode host still answers."""
        ...

    def export_job(self, epoch: int, job: int, path: str) -> ExportOutcome:
        """Writes the job as it stands to a file (whole or not at all); `open_job` and `longprefill run --resume` take
        it up on any mesh.

        Raises:
            UserError: the file cannot be written.
        """
        ...

    def close_job(self, epoch: int, job: int) -> None:
        """Forgets a job; a hand-off under way is cancelled. An unknown job is closed already."""
        ...

    def close(self, epoch: int) -> None:
        """Ends all ranks and removes the pools. The actor itself is its owner's to end."""
        ...


# ---- decode ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a prefill host asks of a decode host."""

    job: int
    transfer_id: str
    """A new transfer of the same job replaces an older one that was not committed."""
    attempt: int
    num_tokens: int
    """Of the prompt."""
    max_new_tokens: int
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTokens:
    """News of all jobs, in the order in which they happened."""

    tokens: tuple[DecodeToken, ...]
    failures: tuple[DecodeFailure, ...]
    cursor: int
    """Poll with it next: that acknowledges everything up to here."""


class DecodeHostApi(Protocol):
    """All raise StaleEpoch; those that name a job UnknownHostJob (but release); NotReady until the model is loaded."""

    def start(self, epoch: int) -> None:
        """Begins to load the model; returns at once. See `state`."""
        ...

    def state(self, epoch: int) -> HostState: ...

    def await_ready(self, epoch: int, timeout_s: float) -> HostState:
        """As the prefill host's."""
        ...

    def link(self, epoch: int) -> tuple[PoolAddress, str]:
        """Where prefill ranks write to, and what they must have in common with this worker."""
        ...

    def reserve(self, epoch: int, reservation: Reservation) -> HandoffTarget:
        """Pages for the prompt and everything that all samples may generate, before the first byte is sent.

        Raises:
            NoRoom: with what is free.
        """
        ...

    def commit(self, epoch: int, manifest: bytes, commit: bytes) -> bytes:
        """Verifies what arrived, beside running generations; an Ack or a Nack message (comms/messages.py). A repeated
        commit of an acknowledged transfer is acknowledged again."""
        ...

    def generate(self, epoch: int, request: GenerateRequest) -> None:
        """Starts the continuations of a committed job: they join the next iteration. A second call for the job changes
        nothing."""
        ...

    def poll(self, epoch: int, cursor: int, timeout_s: float) -> DecodeTokens:
        """What happened after `cursor`, at most 4096 tokens; waits for news at most `timeout_s`. Everything up to
        `cursor` is acknowledged and forgotten."""
        ...

    def end_sample(self, epoch: int, job: int, sample: int) -> None:
        """No further token of it comes: it found a stop text. An ended one stays as it is."""
        ...

    def release(self, epoch: int, job: int, transfer_id: str | None = None) -> None:
        """Forgets a job, reserved, committed or generating; tokens that were not acknowledged are dropped. An unknown
        job is released already. With `transfer_id`: only if it came, or comes, by this transfer."""
        ...

    def close(self, epoch: int) -> None:
        """Ends generation and removes the pool. The actor itself is its owner's to end."""
        ...
