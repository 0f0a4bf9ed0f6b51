"""Handing a job to a decode worker: pages stream as steps finish, state and logits follow, checksums prove arrival.

A pool file holds a worker's cache pages and behind them slots, one a job under way, each with a packed boundary state
and
fp32 logits. Prefill ranks write one-sided from their pool into the decode worker's; new pages are dealt over the ranks
in runs. A slot is a transport channel: a new attempt raises its generation, and no write of an older attempt arrives.

    sender (every prefill rank)     open - send_pages after each step - finish (or cancel)
    receiver (the decode worker)    reserve - commit - release

The controller turns the ranks' parts into one `Manifest` and a `Commit`; the receiver answers `Ack` or `Nack`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from longprefill.comms.checksum import checksum_bytes, checksum_tensor
from longprefill.comms.fields import MessageError
from longprefill.comms.manifest import LayerCounts, LogitsEntry, Manifest, PageEntry, StateEntry, check_complete
from longprefill.comms.messages import Ack, Commit, Nack, decode, encode
from longprefill.comms.transport.base import Copy, Peer, PoolAddress, Transfer, TransferState, TransportError
from longprefill.comms.transport.holder import Pool
from longprefill.comms.transport.shared_memory import SharedMemoryTransport
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.cache.pages import CacheFormats, CacheKind, CachePool, pool_bytes
from longprefill.workers.cache.states import BoundaryState, packed_bytes
from longprefill.workers.model.config import MlaConfig, ModelConfig

TRANSFER_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 10.0
MAX_IN_FLIGHT = 32
"""Batches that a rank has under way at once; a further one waits for the oldest."""
POOL_NAME = "cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTarget:
    """Where a decode worker expects one job. Pickles."""

    address: PoolAddress
    generation: int
    table: tuple[int, ...]
    """Physical pages at the decode side."""
    slot_offset: int
    """Byte offset of the job's slot in the pool file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffPart:
    """What one rank sent."""

    pages: tuple[PageEntry, ...]
    states: tuple[StateEntry, ...]
    logits: LogitsEntry | None


@dataclass(frozen=True, kw_only=True)
class Received:
    """A verified job."""

    job: int
    table: tuple[int, ...]
    state: BoundaryState
    logits_V: torch.Tensor


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """A slot: the largest packed boundary state, then fp32 logits."""
    pools = [
        m.indexer.pool for layer in config.layers if isinstance(m := layer.mixer, MlaConfig) and m.indexer is not None
    ]
    largest = max(packed_bytes(config, position, dtype) for position in range(max(pools, default=1)))
    return -(-largest // 64) * 64 + -(-4 * config.vocab_size // 64) * 64


def pool_file_bytes(
    config: ModelConfig, dtype: torch.dtype, kinds: tuple[CacheKind, ...], num_pages: int, num_slots: int
) -> int:
    """Size of a worker's pool file."""
    return pool_bytes(kinds, num_pages) + num_slots * slot_bytes(config, dtype)


@dataclass(kw_only=True)
class _Outgoing:
    target: HandoffTarget
    peer: Peer
    table: tuple[int, ...]
    slot: int
    pages: list[PageEntry] = field(default_factory=list)


class HandoffSender:
    """One prefill rank's side of all its hand-offs. `num_slots` jobs can be under way at once."""

    def __init__(self, rank: int, size: int, pool: CachePool, file: Pool, slot_size: int, num_slots: int) -> None:
        self._rank = rank
        self._size = size
        self._pool = pool
        self._file = file
        self._slot_size = slot_size
        self._free_slots = list(range(num_slots))
        self._slots_at = file.num_bytes - num_slots * slot_size
        self._transport = SharedMemoryTransport(max_queued=MAX_IN_FLIGHT)
        self._transport.register_pool(POOL_NAME, file.bytes_B)
        self._jobs: dict[int, _Outgoing] = {}
        self._in_flight: dict[int, deque[Transfer]] = {}

    def is_open(self, job: int) -> bool:
        return job in self._jobs

    def open(self, job: int, target: HandoffTarget, table: tuple[int, ...]) -> None:
        """Connects to the decode worker for this job; an earlier attempt is cancelled first.

        Raises:
            TransportError: the target is gone or has moved on to another attempt.
        """
        if job in self._jobs:
            self.cancel(job)
        peer = self._transport.connect(target.address, generation=target.generation)
        self._jobs[job] = _Outgoing(target=target, peer=peer, table=table, slot=self._free_slots.pop(0))
        self._in_flight[job] = deque()

    def send_pages(self, job: int, start: int, end: int, *, is_last: bool) -> None:
        """Queues this rank's run of the pages that the tokens [start, end) completed (at the job's end, the ragged page
        too)."""
        outgoing = self._jobs[job]
        batch: list[Copy] = []
        first = start // PAGE_TOKENS
        last = -(-end // PAGE_TOKENS) if is_last else end // PAGE_TOKENS
        num_pages = last - first
        run = range(first + num_pages * self._rank // self._size, first + num_pages * (self._rank + 1) // self._size)
        for kind in self._pool.kinds:
            for index in run:
                if index * PAGE_TOKENS // kind.tokens_per_row >= kind.num_rows(end):
                    continue  # no complete row in it yet: a ragged page of pooled keys
                source, size = self._pool.byte_range(kind.layer, kind.kind, outgoing.table[index])
                target, _ = self._pool.byte_range(kind.layer, kind.kind, outgoing.target.table[index])
                outgoing.pages.append(
                    PageEntry(
                        layer=kind.layer,
                        kind=kind.kind,
                        index=index,
                        owner=self._rank,
                        num_bytes=size,
                        checksum=checksum_tensor(self._file.bytes_B[source : source + size]),
                    )
                )
                batch.append(Copy(source=source, target=target, num_bytes=size))
        self._submit(job, _merged(batch))

    def finish(self, job: int, state: BoundaryState | None, logits_V: torch.Tensor | None) -> HandoffPart:
        """Sends state and logits, if this rank has them, and waits until everything of this rank has arrived.

        Raises:
            TransportError: a transfer failed or did not end in time; the attempt must be repeated.
        """
        outgoing = self._jobs[job]
        states: tuple[StateEntry, ...] = ()
        logits: LogitsEntry | None = None
        if state is not None and logits_V is not None:
            states, logits, copy = self._fill_slot(outgoing, state, logits_V)
            self._submit(job, [copy])
        while self._in_flight[job]:
            self._settle(job)
        part = HandoffPart(pages=tuple(outgoing.pages), states=states, logits=logits)
        self._forget(job)
        return part

    def cancel(self, job: int) -> None:
        """Returns when nothing of the job moves any more."""
        for transfer in self._in_flight.get(job, ()):
            self._transport.cancel_and_drain(transfer, timeout_s=DRAIN_TIMEOUT_S)
            self._transport.forget(transfer)
        if job in self._jobs:
            self._in_flight[job].clear()
            self._forget(job)

    def close(self) -> None:
        """Cancels everything."""
        self._transport.close()

    def _fill_slot(
        self, outgoing: _Outgoing, state: BoundaryState, logits_V: torch.Tensor
    ) -> tuple[tuple[StateEntry, ...], LogitsEntry, Copy]:
        begin = self._slots_at + outgoing.slot * self._slot_size
        packed = torch.cat((state.pack(), logits_V.float().contiguous().view(torch.uint8)))
        self._file.bytes_B[begin : begin + packed.numel()] = packed
        entries = _state_entries(state, self._rank)
        logits = LogitsEntry(
            vocab_size=logits_V.numel(),
            num_bytes=4 * logits_V.numel(),
            checksum=checksum_tensor(logits_V.float()),
            owner=self._rank,
        )
        return entries, logits, Copy(source=begin, target=outgoing.target.slot_offset, num_bytes=packed.numel())

    def _submit(self, job: int, batch: list[Copy]) -> None:
        if not batch:
            return
        queue = self._in_flight[job]
        while sum(len(transfers) for transfers in self._in_flight.values()) >= MAX_IN_FLIGHT:
            self._settle(next(name for name, transfers in self._in_flight.items() if transfers))
        queue.append(self._transport.submit(POOL_NAME, self._jobs[job].peer, batch, timeout_s=TRANSFER_TIMEOUT_S))

    def _settle(self, job: int) -> None:
        """Waits for the job's oldest batch."""
        transfer = self._in_flight[job].popleft()
        progress = self._transport.wait(transfer, timeout_s=TRANSFER_TIMEOUT_S + DRAIN_TIMEOUT_S)
        if progress.state is not TransferState.DONE:
            self._transport.cancel_and_drain(transfer, timeout_s=DRAIN_TIMEOUT_S)
            self._transport.forget(transfer)
            raise TransportError(f"pages of job {job} from rank {self._rank}: {progress.state.value}: {progress.error}")
        self._transport.forget(transfer)

    def _forget(self, job: int) -> None:
        outgoing = self._jobs.pop(job)
        del self._in_flight[job]
        self._free_slots.append(outgoing.slot)
        self._transport.disconnect(outgoing.peer, timeout_s=DRAIN_TIMEOUT_S)


@dataclass(kw_only=True)
class _Incoming:
    transfer_id: str
    attempt: int
    table: tuple[int, ...]
    slot: int
    is_committed: bool = False


class HandoffReceiver:
    """The decode worker's side: reserves, verifies, hands verified jobs on."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        formats: CacheFormats,
        pool: CachePool,
        file: Pool,
        fingerprint: str,
        num_slots: int,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._formats = formats
        self._pool = pool
        self._file = file
        self._fingerprint = fingerprint
        self._slot_size = slot_bytes(config, dtype)
        self._slots_at = file.num_bytes - num_slots * self._slot_size
        self._free_slots = list(range(num_slots))
        self._jobs: dict[int, _Incoming] = {}

    def reserve(self, job: int, transfer_id: str, attempt: int, table: tuple[int, ...]) -> HandoffTarget:
        """Room for a job. A further attempt of the same transfer fences all earlier ones.

        Raises:
            TransportError: no slot is free, or an attempt that is not newer than the last.
        """
        known = self._jobs.get(job)
        if known is None:
            if not self._free_slots:
                raise TransportError(f"no slot is free for job {job}: {len(self._jobs)} jobs are being handed over")
            known = _Incoming(transfer_id=transfer_id, attempt=-1, table=table, slot=self._free_slots.pop(0))
            self._jobs[job] = known
        if attempt <= known.attempt or transfer_id != known.transfer_id or known.is_committed:
            raise TransportError(
                f"job {job}: transfer {transfer_id} attempt {attempt} cannot follow {known.transfer_id} attempt "
                f"{known.attempt}{' (committed)' if known.is_committed else ''}"
            )
        known.attempt, known.table = attempt, table
        generation = self._file.advance_generation(known.slot, timeout_s=DRAIN_TIMEOUT_S)
        return HandoffTarget(
            address=self._file.address(known.slot),
            generation=generation,
            table=table,
            slot_offset=self._slot_at(known.slot),
        )

    def commit(self, manifest_bytes: bytes, commit_bytes: bytes) -> tuple[bytes, Received | None]:
        """Verifies the manifest against the model and every byte against its checksum; (Ack or Nack, the job if
        Ack)."""
        try:
            manifest, commit = decode(manifest_bytes), decode(commit_bytes)
            if not isinstance(manifest, Manifest) or not isinstance(commit, Commit):
                raise MessageError(
                    f"expected a manifest and a commit, got {type(manifest).__name__}, {type(commit).__name__}"
                )
        except MessageError as error:
            nack = Nack(
                transfer_id="unknown", attempt=0, job="unknown", code="incomplete", reason=str(error), may_retry=True
            )
            return encode(nack), None
        code, reason = self._refusal(manifest, commit, checksum_bytes(manifest_bytes))
        if code is not None:
            nack = Nack(
                transfer_id=manifest.transfer_id,
                attempt=manifest.attempt,
                job=manifest.job,
                code=code,
                reason=reason,
                may_retry=code in ("checksum", "incomplete"),
            )
            return encode(nack), None
        job = int(manifest.job)
        incoming = self._jobs[job]
        incoming.is_committed = True
        # nothing of this transfer may be written any more
        self._file.advance_generation(incoming.slot, timeout_s=DRAIN_TIMEOUT_S)
        state, logits_V = self._read_slot(incoming, manifest.position)
        ack = Ack(
            transfer_id=manifest.transfer_id,
            attempt=manifest.attempt,
            job=manifest.job,
            position=manifest.position,
            num_bytes=manifest.num_bytes,
        )
        return encode(ack), Received(job=job, table=incoming.table, state=state, logits_V=logits_V)

    def is_committed(self, job: int) -> bool:
        return job in self._jobs and self._jobs[job].is_committed

    def release(self, job: int) -> None:
        """Fences writers out and frees the slot."""
        incoming = self._jobs.pop(job)
        self._file.advance_generation(incoming.slot, timeout_s=DRAIN_TIMEOUT_S)
        self._free_slots.append(incoming.slot)

    def _refusal(self, manifest: Manifest, commit: Commit, manifest_checksum: int) -> tuple[str | None, str]:
        incoming = self._jobs.get(int(manifest.job)) if manifest.job.isdecimal() else None
        if incoming is None or (manifest.transfer_id, manifest.attempt) != (incoming.transfer_id, incoming.attempt):
            return (
                "unknown_transfer",
                f"transfer {manifest.transfer_id} attempt {manifest.attempt} was not reserved here",
            )
        if incoming.is_committed:
            return "unknown_transfer", f"transfer {manifest.transfer_id} is already committed"
        if commit.checksum != manifest_checksum:
            return "incomplete", "the commit is not of this manifest"
        has_index = any(kind.kind == "index_key" for kind in self._pool.kinds)
        expected = (self._fingerprint, self._formats.latent, self._formats.index_key if has_index else None)
        offered = (manifest.model_fingerprint, manifest.latent_format, manifest.index_format)
        if offered != expected:
            return "incompatible", f"model and formats are {offered}, this worker has {expected}"
        try:
            check_complete([manifest], page_tokens=PAGE_TOKENS)
        except MessageError as error:
            return "incomplete", str(error)
        return self._damage(manifest, incoming)

    def _damage(self, manifest: Manifest, incoming: _Incoming) -> tuple[str | None, str]:
        for page in manifest.pages:
            begin, size = self._pool.byte_range(page.layer, page.kind, incoming.table[page.index])
            if page.num_bytes != size or checksum_tensor(self._file.bytes_B[begin : begin + size]) != page.checksum:
                return "checksum", f"{page.kind} page {page.index} of layer {page.layer}"
        state, logits_V = self._read_slot(incoming, manifest.position)
        if _state_entries(state, manifest.states[0].owner if manifest.states else 0) != manifest.states:
            return "checksum", "boundary state"
        assert manifest.logits is not None
        if checksum_tensor(logits_V) != manifest.logits.checksum:
            return "checksum", "logits"
        return None, ""

    def _read_slot(self, incoming: _Incoming, position: int) -> tuple[BoundaryState, torch.Tensor]:
        begin = self._slot_at(incoming.slot)
        size = packed_bytes(self._config, position, self._dtype)
        state = BoundaryState.unpack(self._config, position, self._dtype, self._file.bytes_B[begin : begin + size])
        logits = self._file.bytes_B[begin + size : begin + size + 4 * self._config.vocab_size].clone()
        return state, logits.view(torch.float32)

    def _slot_at(self, slot: int) -> int:
        return self._slots_at + slot * self._slot_size


def build_messages(
    parts: Sequence[HandoffPart],
    *,
    transfer_id: str,
    attempt: int,
    job: int,
    fingerprint: str,
    formats: CacheFormats,
    layers: LayerCounts,
    position: int,
) -> tuple[bytes, bytes]:
    """(manifest, commit) of a finished job from what its ranks sent."""
    logits = [part.logits for part in parts if part.logits is not None]
    manifest = Manifest(
        transfer_id=transfer_id,
        attempt=attempt,
        job=str(job),
        model_fingerprint=fingerprint,
        latent_format=formats.latent,
        index_format=formats.index_key if layers.dsa else None,
        layers=layers,
        position=position,
        pages=tuple(page for part in parts for page in part.pages),
        states=tuple(state for part in parts for state in part.states),
        logits=logits[0] if logits else None,
    )
    encoded = encode(manifest)
    commit = Commit(
        transfer_id=transfer_id,
        attempt=attempt,
        job=str(job),
        position=position,
        num_manifests=1,
        num_pages=len(manifest.pages),
        num_states=len(manifest.states),
        num_bytes=manifest.num_bytes,
        checksum=checksum_bytes(encoded),
    )
    return encoded, encode(commit)


def _state_entries(state: BoundaryState, owner: int) -> tuple[StateEntry, ...]:
    kinds = {"state": "kda_state", "conv": "conv_tail"}
    entries: list[StateEntry] = []
    for name, tensor in state.named_tensors():
        _, layer, field_name = name.split(".")
        # a pool tail is two tensors (keys, gates): two parts of one entry
        part, num_parts = ({"pool_key": 0, "pool_gate": 1}[field_name], 2) if field_name not in kinds else (0, 1)
        entries.append(
            StateEntry(
                layer=int(layer),
                kind=kinds.get(field_name, "pool_tail"),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                num_bytes=tensor.nbytes,
                checksum=checksum_tensor(tensor),
                owner=owner,
                part=part,
                num_parts=num_parts,
            )
        )
    return tuple(entries)


def _merged(batch: list[Copy]) -> list[Copy]:
    """Neighbouring copies made one."""
    merged: list[Copy] = []
    for copy in batch:
        last = merged[-1] if merged else None
        if last and (last.source + last.num_bytes, last.target + last.num_bytes) == (copy.source, copy.target):
            merged[-1] = Copy(source=last.source, target=last.target, num_bytes=last.num_bytes + copy.num_bytes)
        else:
            merged.append(copy)
    return merged
