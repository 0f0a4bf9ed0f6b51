"""The decode worker's side of hand-offs: reserves, verifies, hands verified jobs on."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from longprefill.comms.checksum import checksum_bytes, checksum_tensor
from longprefill.comms.fields import MessageError
from longprefill.comms.manifest import Manifest, check_complete
from longprefill.comms.messages import Ack, Commit, Nack, decode, encode
from longprefill.comms.transport.base import PoolAddress, TransportError
from longprefill.comms.transport.holder import Pool
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.cache.pages import CacheFormats, CachePool
from longprefill.workers.cache.states import BoundaryState, packed_bytes
from longprefill.workers.handoff.parts import (
    DRAIN_TIMEOUT_S,
    HandoffTarget,
    handoff_identity,
    layer_counts,
    slot_bytes,
    state_entries,
)
from longprefill.workers.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Received:
    """A verified job."""

    job: int
    table: tuple[int, ...]
    state: BoundaryState
    logits_V: torch.Tensor


@dataclass(kw_only=True)
class _Incoming:
    transfer_id: str
    attempt: int
    table: tuple[int, ...]
    slot: int
    """Another job's as soon as this one is committed."""
    is_committed: bool = False
    checksum: int = 0
    """Of the manifest that was committed."""
    ack: bytes = b""


VERIFY_BYTES = 8 << 20
"""Checked between two pauses of a verification: a millisecond or two."""


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
        self.identity = handoff_identity(fingerprint, dtype, formats)
        self._slot_size = slot_bytes(config, dtype)
        self._slots_at = file.num_bytes - num_slots * self._slot_size
        self._free_slots = list(range(num_slots))
        self._jobs: dict[int, _Incoming] = {}
        self.publish: Callable[[int], PoolAddress] = file.address
        """The address of a channel, as senders are told it; a server of the pool adds its endpoint."""

    def reserve(self, job: int, transfer_id: str, attempt: int, table: tuple[int, ...]) -> HandoffTarget:
        """Room for a job. A further attempt of the same transfer fences all earlier ones.

        Raises:
            TransportError: no slot is free, or an attempt that is not newer than the last.
        """
        known = self._jobs.get(job)
        if known is None:
            if not self._free_slots:
                num_underway = sum(not incoming.is_committed for incoming in self._jobs.values())
                raise TransportError(f"no slot is free for job {job}: {num_underway} jobs are being handed over")
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
            address=self.publish(known.slot),
            generation=generation,
            table=table,
            num_pages=self._pool.num_pages,
            identity=self.identity,
            slot_offset=self._slot_at(known.slot),
        )

    def commit(self, manifest_bytes: bytes, commit_bytes: bytes) -> tuple[bytes, Received | None]:
        """Verifies the manifest against the model and every byte against its checksum; (Ack or Nack, the job if
        Ack). A repeated commit gets its Ack again, and no job."""
        verification = self.verification(manifest_bytes, commit_bytes)
        while True:
            try:
                next(verification)
            except StopIteration as end:
                return end.value

    def verification(
        self, manifest_bytes: bytes, commit_bytes: bytes
    ) -> Generator[None, None, tuple[bytes, Received | None]]:
        """`commit` with a pause every few milliseconds, in which the receiver may be used."""
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
        yield
        incoming = self._jobs.get(int(manifest.job)) if manifest.job.isdecimal() else None
        checksum = checksum_bytes(manifest_bytes)
        if incoming is not None and incoming.is_committed and incoming.checksum == checksum:
            return incoming.ack, None
        code, reason = self._refusal(manifest, commit, checksum)
        if code is None and incoming is not None:
            code, reason = yield from self._damage(manifest, incoming)
            if code is None and not self._is_current(manifest):
                code, reason = "unknown_transfer", f"transfer {manifest.transfer_id} was replaced while it was verified"
        if code is not None or incoming is None:
            return encode(_nack(manifest, code or "unknown_transfer", reason)), None
        return self._accept(manifest, incoming, checksum)

    def _accept(self, manifest: Manifest, incoming: _Incoming, checksum: int) -> tuple[bytes, Received]:
        # nothing of this transfer may be written any more
        self._file.advance_generation(incoming.slot, timeout_s=DRAIN_TIMEOUT_S)
        state, logits_V = self._read_slot(incoming, manifest.position)
        self._free_slots.append(incoming.slot)
        ack = Ack(
            transfer_id=manifest.transfer_id,
            attempt=manifest.attempt,
            job=manifest.job,
            position=manifest.position,
            num_bytes=manifest.num_bytes,
        )
        incoming.is_committed, incoming.checksum, incoming.ack = True, checksum, encode(ack)
        return incoming.ack, Received(job=int(manifest.job), table=incoming.table, state=state, logits_V=logits_V)

    @property
    def num_free_slots(self) -> int:
        """Jobs that may be on their way beside those that are."""
        return len(self._free_slots)

    def is_committed(self, job: int) -> bool:
        return job in self._jobs and self._jobs[job].is_committed

    def release(self, job: int) -> None:
        """Forgets a job; one that is still under way is fenced off first. Nothing happens for an unknown job."""
        incoming = self._jobs.get(job)
        if incoming is not None and not incoming.is_committed:
            self._file.advance_generation(incoming.slot, timeout_s=DRAIN_TIMEOUT_S)
            self._free_slots.append(incoming.slot)
        self._jobs.pop(job, None)

    def _is_current(self, manifest: Manifest) -> bool:
        """Whether the manifest is of the last attempt that was reserved, and nothing was committed yet."""
        incoming = self._jobs.get(int(manifest.job)) if manifest.job.isdecimal() else None
        if incoming is None or incoming.is_committed:
            return False
        return (manifest.transfer_id, manifest.attempt) == (incoming.transfer_id, incoming.attempt)

    def _refusal(self, manifest: Manifest, commit: Commit, manifest_checksum: int) -> tuple[str | None, str]:
        if not self._is_current(manifest):
            return "unknown_transfer", f"transfer {manifest.transfer_id} attempt {manifest.attempt} is not open here"
        if commit.checksum != manifest_checksum:
            return "incomplete", "the commit is not of this manifest"
        has_index = any(kind.kind == "index_key" for kind in self._pool.kinds)
        expected = (self._fingerprint, self._formats.latent, self._formats.index_key if has_index else None)
        offered = (manifest.model_fingerprint, manifest.latent_format, manifest.index_format)
        if offered != expected:
            return "incompatible", f"model and formats are {offered}, this worker has {expected}"
        if manifest.layers != layer_counts(self._config):
            return "incompatible", f"layers are {manifest.layers}, this model has {layer_counts(self._config)}"
        unknown = next((page for page in manifest.pages if (page.layer, page.kind) not in self._pool.kind_of), None)
        if unknown is not None:
            return "incompatible", f"layer {unknown.layer} of this model has no {unknown.kind} pages"
        num_reserved = len(self._jobs[int(manifest.job)].table)
        if manifest.position > num_reserved * PAGE_TOKENS:
            return "no_room", f"position {manifest.position} is beyond the {num_reserved} pages that were reserved"
        try:
            check_complete([manifest], page_tokens=PAGE_TOKENS)
        except MessageError as error:
            return "incomplete", str(error)
        return None, ""

    def _damage(self, manifest: Manifest, incoming: _Incoming) -> Generator[None, None, tuple[str | None, str]]:
        num_unpaused = 0
        for page in manifest.pages:
            begin, size = self._pool.byte_range(page.layer, page.kind, incoming.table[page.index])
            if page.num_bytes != size or checksum_tensor(self._file.bytes_B[begin : begin + size]) != page.checksum:
                return "checksum", f"{page.kind} page {page.index} of layer {page.layer}"
            num_unpaused += size
            if num_unpaused >= VERIFY_BYTES:
                num_unpaused = 0
                yield
        state, logits_V = self._read_slot(incoming, manifest.position)
        if state_entries(state, manifest.states[0].owner if manifest.states else 0) != manifest.states:
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


def _nack(manifest: Manifest, code: str, reason: str) -> Nack:
    return Nack(
        transfer_id=manifest.transfer_id,
        attempt=manifest.attempt,
        job=manifest.job,
        code=code,
        reason=reason,
        may_retry=code in ("checksum", "incomplete"),
    )
