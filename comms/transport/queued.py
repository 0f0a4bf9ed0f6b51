"""What transports share that copy in a thread of their own: a bounded queue, handles, deadlines, cancelling, draining.

A batch is moved in pieces; before each piece the thread looks at the cancel flag and the deadline. Where a piece goes,
and whether the target's generation still allows it, is the `Link`'s business: a mapped file or a connection.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .base import (
    Copy,
    NotDrainedError,
    PageTransport,
    Peer,
    PoolAddress,
    Progress,
    Transfer,
    TransferState,
    TransportBusyError,
    TransportError,
)

PIECE_BYTES = 4 << 20
"""Copied between two looks at cancel flag, deadline and generation: about a millisecond."""
MAX_KNOWN = 4096
"""Transfers remembered, terminal ones included, until `forget`."""


class Link(Protocol):
    """An open way to one generation of one channel of a pool. Used by one thread at a time."""

    def write(self, piece: Sequence[Copy], source_B: torch.Tensor, deadline_s: float) -> None:
        """Copies a piece, offsets already checked, and returns when all of it has arrived.

        Raises:
            TransportError: it is refused, too late (time.monotonic), or the way is gone; nothing of it arrives later.
        """
        ...

    def close(self) -> None:
        """A second call does nothing."""
        ...


@dataclass(eq=False, slots=True, kw_only=True)
class Submission:
    """A submitted batch and where it stands. Guarded by the transport's lock but for the copy itself."""

    number: int
    source_B: torch.Tensor
    peer: Peer
    link: Link
    batch: tuple[Copy, ...]
    deadline_s: float
    state: TransferState = TransferState.QUEUED
    moved_bytes: int = 0
    error: str | None = None
    is_cancelled: bool = False

    def progress(self) -> Progress:
        return Progress(
            state=self.state,
            moved_bytes=self.moved_bytes,
            total_bytes=sum(copy.num_bytes for copy in self.batch),
            error=self.error,
        )


class QueuedTransport(PageTransport):
    """`max_queued` batches may wait; one more is refused. A kind of transport says how a link is opened."""

    def __init__(self, *, max_queued: int = 64) -> None:
        if not 1 <= max_queued <= MAX_KNOWN:
            raise ValueError(f"max_queued={max_queued}: needs 1 to {MAX_KNOWN}")
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._pools: dict[str, torch.Tensor] = {}
        self._peers: dict[int, tuple[Peer, Link]] = {}
        self._submissions: dict[int, Submission] = {}
        self._queue: deque[Submission] = deque()
        self._numbers = itertools.count(1)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="page-transport", daemon=True)
        self._thread.start()

    def register_pool(self, name: str, pool_B: torch.Tensor) -> None:
        if pool_B.dtype != torch.uint8 or pool_B.dim() != 1 or not pool_B.is_contiguous():
            raise TransportError(
                f"pool '{name}' is {pool_B.dtype} {tuple(pool_B.shape)}: needs contiguous uint8 [bytes]"
            )
        with self._changed:
            if name in self._pools:
                raise TransportError(f"pool '{name}' is registered already: names are used once")
            self._pools[name] = pool_B

    def connect(self, address: PoolAddress, *, generation: int) -> Peer:
        with self._changed:
            self._check_open()
        peer = Peer(number=next(self._numbers), address=address, generation=generation)
        link = self.open_link(peer)
        with self._changed:
            if self._is_closing:
                link.close()
            self._check_open()
            self._peers[peer.number] = (peer, link)
            return peer

    @abstractmethod
    def open_link(self, peer: Peer) -> Link:
        """The way to a peer's pool. Raises as `connect`."""

    def submit(self, pool: str, peer: Peer, batch: Sequence[Copy], *, timeout_s: float) -> Transfer:
        if not 0 < timeout_s <= 86400:
            raise TransportError(f"timeout_s={timeout_s}: a deadline is more than 0 and at most 86400 seconds")
        with self._changed:
            self._check_open()
            if pool not in self._pools:
                raise TransportError(f"pool '{pool}' is not registered: known are {', '.join(sorted(self._pools))}")
            if self._peers.get(peer.number, (None,))[0] != peer:
                raise TransportError(f"peer {peer.number} is not connected: connect first")
            source_B, link = self._pools[pool], self._peers[peer.number][1]
            check_batch(batch, source_B.numel(), peer.address.num_bytes)
            if len(self._queue) >= self._max_queued or len(self._submissions) >= MAX_KNOWN:
                raise TransportBusyError(
                    f"{len(self._queue)} batches of at most {self._max_queued} are queued, {len(self._submissions)} of "
                    f"at most {MAX_KNOWN} remembered: wait for some, forget those that ended, then submit again"
                )
            submission = Submission(
                number=next(self._numbers),
                source_B=source_B,
                peer=peer,
                link=link,
                batch=tuple(batch),
                deadline_s=time.monotonic() + timeout_s,
            )
            self._submissions[submission.number] = submission
            self._queue.append(submission)
            self._changed.notify_all()
            return Transfer(number=submission.number)

    def poll(self, transfer: Transfer) -> Progress:
        with self._changed:
            return self._find(transfer).progress()

    def wait(self, transfer: Transfer, *, timeout_s: float) -> Progress:
        with self._changed:
            submission = self._find(transfer)
            self._changed.wait_for(lambda: submission.state.is_terminal, timeout_s)
            return submission.progress()

    def cancel_and_drain(self, transfer: Transfer, *, timeout_s: float) -> Progress:
        with self._changed:
            submission = self._find(transfer)
            self._drain([submission], timeout_s)
            return submission.progress()

    def forget(self, transfer: Transfer) -> None:
        with self._changed:
            submission = self._find(transfer)
            if not submission.state.is_terminal:
                raise TransportError(
                    f"transfer {transfer.number} is {submission.state.value}: cancel and drain it first"
                )
            del self._submissions[transfer.number]

    def disconnect(self, peer: Peer, *, timeout_s: float) -> None:
        with self._changed:
            if self._peers.get(peer.number, (None,))[0] != peer:
                raise TransportError(f"peer {peer.number} is not connected")
            self._drain([submission for submission in self._submissions.values() if submission.peer == peer], timeout_s)
            _, link = self._peers.pop(peer.number)
            link.close()

    def close(self, *, timeout_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._is_closing = True
            self._drain(list(self._submissions.values()), timeout_s)
            self._changed.notify_all()
        self._thread.join(max(deadline_s - time.monotonic(), 0.1))
        if self._thread.is_alive():
            raise NotDrainedError(f"the copying thread did not end within {timeout_s} s: quarantine its pools")
        with self._changed:
            for _, link in self._peers.values():
                link.close()
            self._peers.clear()
            self._pools.clear()

    def _find(self, transfer: Transfer) -> Submission:
        if transfer.number not in self._submissions:
            raise TransportError(f"transfer {transfer.number} is unknown: never submitted here, or forgotten")
        return self._submissions[transfer.number]

    def _check_open(self) -> None:
        if self._is_closing:
            raise TransportError("the transport is closed")

    def _drain(self, submissions: list[Submission], timeout_s: float) -> None:
        for submission in submissions:
            submission.is_cancelled = True
            if submission.state is TransferState.QUEUED:
                self._queue.remove(submission)
                submission.state = TransferState.CANCELLED
        self._changed.notify_all()
        if not self._changed.wait_for(
            lambda: all(submission.state.is_terminal for submission in submissions), timeout_s
        ):
            numbers = [submission.number for submission in submissions if not submission.state.is_terminal]
            raise NotDrainedError(f"transfers {numbers} still move after {timeout_s} s: quarantine their memory")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    return
                submission = self._queue.popleft()
                submission.state = TransferState.RUNNING
            try:
                state, error = self._move(submission)
            except RuntimeError as failure:  # torch's: a source on a device that failed
                state, error = TransferState.FAILED, str(failure)
            with self._changed:
                submission.state, submission.error = state, error
                self._changed.notify_all()

    def _move(self, submission: Submission) -> tuple[TransferState, str | None]:
        """Moves a batch piece by piece; the state it ends in and why."""
        for piece in pieces(submission.batch):
            if submission.is_cancelled:
                return TransferState.CANCELLED, None
            if time.monotonic() >= submission.deadline_s:
                return TransferState.FAILED, f"the deadline came after {submission.moved_bytes} bytes"
            try:
                submission.link.write(piece, submission.source_B, submission.deadline_s)
            except TransportError as error:
                return TransferState.FAILED, str(error)
            with self._changed:
                submission.moved_bytes += sum(copy.num_bytes for copy in piece)
        return TransferState.DONE, None


def pieces(batch: Sequence[Copy]) -> Iterator[list[Copy]]:
    """The batch in order, in groups of at most `PIECE_BYTES`: neighbours on both sides joined, long copies cut."""
    piece: list[Copy] = []
    room = PIECE_BYTES
    for copy in batch:
        first = 0
        while first < copy.num_bytes:
            size = min(room, copy.num_bytes - first)
            source, target = copy.source + first, copy.target + first
            last = piece[-1] if piece else None
            if last and (last.source + last.num_bytes, last.target + last.num_bytes) == (source, target):
                piece[-1] = Copy(source=last.source, target=last.target, num_bytes=last.num_bytes + size)
            else:
                is_whole = size == copy.num_bytes
                piece.append(copy if is_whole else Copy(source=source, target=target, num_bytes=size))
            first += size
            room -= size
            if room == 0:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def refused(address: PoolAddress, current: int, generation: int) -> str:
    """Why a write is refused."""
    return (
        f"pool {address.path}, channel {address.channel}, is at generation {current}: "
        f"a write of generation {generation} is refused"
    )


def check_batch(batch: Sequence[Copy], source_bytes: int, target_bytes: int) -> None:
    """Refuses an empty batch and copies that leave either pool."""
    if not batch:
        raise TransportError("a batch without copies: leave it out")
    for copy in batch:
        for name, offset, limit in (("source", copy.source, source_bytes), ("target", copy.target, target_bytes)):
            if copy.num_bytes < 1 or offset < 0 or offset + copy.num_bytes > limit:
                raise TransportError(
                    f"a copy of {copy.num_bytes} bytes at {name} offset {offset}: needs 1 or more inside [0, {limit})"
                )
