"""One prefill rank's side of its hand-offs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from longprefill.comms.checksum import checksum_tensor
from longprefill.comms.manifest import LogitsEntry, PageEntry, StateEntry
from longprefill.comms.transport.base import (
    Copy,
    PageTransport,
    Peer,
    PoolAddress,
    Transfer,
    TransferState,
    TransportError,
)
from longprefill.comms.transport.holder import Pool, attach_pool
from longprefill.comms.transport.shared_memory import SharedMemoryTransport
from longprefill.comms.transport.socket_transport import SocketTransport
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.cache.pages import CachePool, PoolLayout
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.handoff.parts import DRAIN_TIMEOUT_S, HandoffPart, HandoffTarget, state_entries

TRANSFER_TIMEOUT_S = 60.0
MAX_IN_FLIGHT = 32
"""Batches that a rank has under way at once; a further one waits for the oldest."""
POOL_NAME = "cache"


@dataclass(kw_only=True)
class _Outgoing:
    target: HandoffTarget
    transport: PageTransport
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
        self._transports: dict[type[PageTransport], PageTransport] = {}
        self._jobs: dict[int, _Outgoing] = {}
        self._in_flight: dict[int, deque[Transfer]] = {}

    def is_open(self, job: int) -> bool:
        return job in self._jobs

    def open(self, job: int, target: HandoffTarget, table: tuple[int, ...]) -> None:
        """Connects to the decode worker for this job; an earlier attempt is cancelled first.

        Raises:
            TransportError: the target is gone or has moved on to another attempt, or no slot is free.
        """
        if job in self._jobs:
            self.cancel(job)
        if not self._free_slots:
            raise TransportError(f"no slot is free for job {job}: {len(self._jobs)} jobs are being handed over")
        transport = self._transport_to(target.address)
        peer = transport.connect(target.address, generation=target.generation)
        slot = self._free_slots.pop(0)
        self._jobs[job] = _Outgoing(target=target, transport=transport, peer=peer, table=table, slot=slot)
        self._in_flight[job] = deque()

    def send_pages(self, job: int, start: int, end: int, *, is_last: bool) -> None:
        """Queues this rank's run of the pages that the tokens [start, end) completed (at the job's end, the ragged page
        too)."""
        outgoing = self._jobs[job]
        layout = PoolLayout(self._pool.kinds, outgoing.target.num_pages)
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
                target, _ = layout.byte_range(kind.layer, kind.kind, outgoing.target.table[index])
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
            transport = self._jobs[job].transport
            transport.cancel_and_drain(transfer, timeout_s=DRAIN_TIMEOUT_S)
            transport.forget(transfer)
        if job in self._jobs:
            self._in_flight[job].clear()
            self._forget(job)

    def close(self) -> None:
        """Cancels everything."""
        for transport in self._transports.values():
            transport.close()

    def _transport_to(self, address: PoolAddress) -> PageTransport:
        """Shared memory where the pool's file is on this machine, else its endpoint."""
        kind = SharedMemoryTransport if is_file_here(address) else SocketTransport
        if kind not in self._transports:
            self._transports[kind] = kind(max_queued=MAX_IN_FLIGHT)
            self._transports[kind].register_pool(POOL_NAME, self._file.bytes_B)
        return self._transports[kind]

    def _fill_slot(
        self, outgoing: _Outgoing, state: BoundaryState, logits_V: torch.Tensor
    ) -> tuple[tuple[StateEntry, ...], LogitsEntry, Copy]:
        begin = self._slots_at + outgoing.slot * self._slot_size
        packed = torch.cat((state.pack(), logits_V.float().contiguous().view(torch.uint8)))
        self._file.bytes_B[begin : begin + packed.numel()] = packed
        entries = state_entries(state, self._rank)
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
        outgoing = self._jobs[job]
        queue.append(outgoing.transport.submit(POOL_NAME, outgoing.peer, batch, timeout_s=TRANSFER_TIMEOUT_S))

    def _settle(self, job: int) -> None:
        """Waits for the job's oldest batch."""
        transfer, transport = self._in_flight[job].popleft(), self._jobs[job].transport
        progress = transport.wait(transfer, timeout_s=TRANSFER_TIMEOUT_S + DRAIN_TIMEOUT_S)
        if progress.state is not TransferState.DONE:
            transport.cancel_and_drain(transfer, timeout_s=DRAIN_TIMEOUT_S)
            transport.forget(transfer)
            raise TransportError(f"pages of job {job} from rank {self._rank}: {progress.state.value}: {progress.error}")
        transport.forget(transfer)

    def _forget(self, job: int) -> None:
        outgoing = self._jobs.pop(job)
        del self._in_flight[job]
        self._free_slots.append(outgoing.slot)
        outgoing.transport.disconnect(outgoing.peer, timeout_s=DRAIN_TIMEOUT_S)


def is_file_here(address: PoolAddress) -> bool:
    """Whether the pool can be mapped. With no other way to it, a reason is raised instead.

    Raises:
        TransportError: neither its file is here nor has it an endpoint.
    """
    try:
        attach_pool(address).close()
    except TransportError:
        if address.endpoint is None:
            raise
        return False
    return True


def check_link(address: PoolAddress) -> None:
    """Raises TransportError unless pages can be sent to the pool, whose channel has never been used."""
    if is_file_here(address):
        return
    transport = SocketTransport()
    try:
        transport.connect(address, generation=0)
    finally:
        transport.close()


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
