"""Ranks as threads of one process, for tests: the semantics of `TorchGroup`, and an error where a real group would hang
or hand over wrong bytes.

It notices: different operations at the same call number, counts, shapes or dtypes that disagree, an input changed
before `wait`, a result never waited for, ranks that end after different numbers of calls, and an element of a result
that no rank wrote (results are 0xFF before they are filled: NaN in every float format).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import torch

from .arguments import as_bytes, check_exchange, check_gather, check_root
from .group import Group, GroupError, Ledger, Pending

Result = TypeVar("Result")
Shape = tuple[int, ...]


def run_ranks(
    size: int, fn: Callable[[ThreadGroup], Result], timeout_s: float = 30.0, *, limit_s: float = 300.0
) -> list[Result]:
    """Runs `fn(group)` on `size` ranks, one thread each, and returns their results in rank order.

    `timeout_s` is the groups' deadline of each call, `limit_s` that of the whole run.

    Raises:
        GroupError: a call failed, ranks disagreed, or one did not end within `limit_s`.
        Exception: what the first rank that failed by itself raised; the other ranks got a `GroupError`.
    """
    board = Board(size, timeout_s)
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        group = ThreadGroup(board, rank)
        try:
            results[rank] = fn(group)
            board.leave(rank, None)
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            board.leave(rank, error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        board.fail(f"the run's limit of {limit_s} s is over")
        raise GroupError(f"ranks {late} of {size} did not end within {limit_s} s")
    board.raise_first_error()
    board.check_complete()
    return [results[rank] for rank in range(size)]


@dataclass(kw_only=True)
class Entry:
    """What one rank passed to one call."""

    op: str
    kind: str
    agreed: dict[str, object]
    """Must be equal on all ranks."""
    sends: dict[int, torch.Tensor]
    """Copies, by receiving rank."""
    receive_shapes: dict[int, Shape] = field(default_factory=dict)
    """Must equal what the peers send here; messages without elements are not compared, they do not travel."""


class Board:
    """What the ranks of one run share: the entries of every call that is not yet over, and who left."""

    def __init__(self, size: int, timeout_s: float) -> None:
        if size < 1:
            raise ValueError(f"size={size}: a group has 1 rank or more")
        self.size = size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._calls: dict[int, dict[int, Entry]] = {}
        self._unfinished: dict[int, dict[int, str]] = {rank: {} for rank in range(size)}
        """By rank: number and name of calls entered and not waited for."""
        self._num_calls = [0] * size
        self._gone: dict[int, str] = {}
        self._failure: str | None = None
        self._has_lost_ranks = False
        """A rank got an error from a call and went on: from there on the ranks need not have done the same."""
        self._errors: list[tuple[int, BaseException]] = []

    def enter(self, rank: int, entry: Entry) -> int:
        """Posts the rank's entry of its next call and returns the call's number."""
        with self._changed:
            number = self._num_calls[rank]
            self._raise_if_over(rank, entry.op)
            entries = self._calls.setdefault(number, {})
            for peer, other in entries.items():
                difference = disagreement(rank, entry, peer, other)
                if difference is not None:
                    self._failure = f"call {number}: {difference}"
                    self._changed.notify_all()
                    raise GroupError(f"rank {rank} of {self.size}: op '{entry.op}': {self._failure}")
            entries[rank] = entry
            self._unfinished[rank][number] = entry.op
            self._num_calls[rank] += 1
            self._changed.notify_all()
            return number

    def collect(self, rank: int, number: int, op: str, peers: Collection[int]) -> dict[int, Entry]:
        """Waits for the entries of `peers` in call `number`: those that a real group would move bytes to or from."""
        with self._changed:
            self._raise_if_over(rank, op)

            def is_decided() -> bool:
                entered = self._calls[number]
                return (
                    self._failure is not None
                    or any(p in self._gone and p not in entered for p in peers)
                    or (all(p in entered for p in peers))
                )

            if not self._changed.wait_for(is_decided, self.timeout_s):
                missing = [p for p in peers if p not in self._calls[number]]
                self._lose(rank, op, f"ranks {missing} did not enter call {number} within {self.timeout_s} s")
            self._raise_if_over(rank, op)
            entries = self._calls[number]
            for peer in peers:
                if peer not in entries:
                    self._lose(rank, op, f"rank {peer} will not enter call {number}: {self._gone[peer]}")
            found = {peer: entries[peer] for peer in peers}
            del self._unfinished[rank][number]
            if len(entries) == self.size and not any(number in calls for calls in self._unfinished.values()):
                del self._calls[number]
            return found

    def close(self, rank: int) -> None:
        with self._changed:
            self._gone.setdefault(rank, "it closed its group")
            self._unfinished[rank].clear()
            self._changed.notify_all()

    def leave(self, rank: int, error: BaseException | None) -> None:
        """The rank's function ended; an error ends the whole group."""
        with self._changed:
            if error is not None:
                self._errors.append((rank, error))
                if self._failure is None:
                    self._failure = f"rank {rank} raised {type(error).__name__}: {error}"
            self._gone.setdefault(rank, f"it ended after {self._num_calls[rank]} calls")
            self._changed.notify_all()

    def fail(self, cause: str) -> None:
        with self._changed:
            self._failure = self._failure or cause
            self._changed.notify_all()

    def raise_first_error(self) -> None:
        """Raises what went wrong first, a rank's own error before the group errors that follow from it."""
        if not self._errors:
            return
        own = [(rank, error) for rank, error in self._errors if not isinstance(error, GroupError)]
        rank, error = (own or self._errors)[0]
        error.add_note(f"on rank {rank} of {self.size}")
        raise error

    def check_complete(self) -> None:
        """All ranks ended well: did they also do the same calls, and wait for all of them?"""
        if self._has_lost_ranks:
            return
        if len(set(self._num_calls)) > 1:
            raise GroupError(f"the ranks ended after different numbers of calls: {self._num_calls}, rank by rank")
        for rank, calls in self._unfinished.items():
            for number, op in calls.items():
                raise GroupError(f"rank {rank} of {self.size}: op '{op}' (call {number}): nobody waited for its result")

    def _raise_if_over(self, rank: int, op: str) -> None:
        if self._failure is not None:
            raise GroupError(f"rank {rank} of {self.size}: op '{op}': {self._failure}")
        if rank in self._gone:
            raise GroupError(f"rank {rank} of {self.size}: op '{op}': this rank's group is over: {self._gone[rank]}")

    def _lose(self, rank: int, op: str, cause: str) -> NoReturn:
        # As over sockets: a rank that gave up is gone for the ranks that need it.
        self._has_lost_ranks = True
        self._gone[rank] = f"its op '{op}' failed: {cause}"
        self._unfinished[rank].clear()
        self._changed.notify_all()
        raise GroupError(f"rank {rank} of {self.size}: op '{op}': {cause}")


class ThreadPending(Pending):
    def __init__(self, take: Callable[[], torch.Tensor], op: str) -> None:
        self._take: Callable[[], torch.Tensor] | None = take
        self._op = op

    def wait(self) -> torch.Tensor:
        if self._take is None:
            raise RuntimeError(f"op '{self._op}': the result was already taken: wait once and keep it")
        take, self._take = self._take, None
        return take()


class ThreadGroup(Group):
    """One rank's group of a `run_ranks` call. The ledger's bytes are those of `TorchGroup` for the same calls."""

    def __init__(self, board: Board, rank: int) -> None:
        self.rank = rank
        self.size = board.size
        self.ledger = Ledger()
        self._board = board

    def start_all_gather_rows(self, local_LX: torch.Tensor, counts: Sequence[int], *, op: str) -> Pending:
        began = time.perf_counter()
        check_gather(local_LX, counts, rank=self.rank, size=self.size, op=op)
        counts = tuple(counts)
        row_shape = tuple(local_LX.shape[1:])
        copy_LX = copied(local_LX)
        others = [peer for peer in range(self.size) if peer != self.rank]
        agreed: dict[str, object] = {"counts": counts, "row shape": row_shape, "dtype": local_LX.dtype}
        sends = dict.fromkeys(range(self.size), copy_LX)
        number = self._enter(Entry(op=op, kind="all_gather_rows", agreed=agreed, sends=sends), began)

        def take() -> torch.Tensor:
            began = time.perf_counter()
            if not torch.equal(as_bytes(local_LX.contiguous()), as_bytes(copy_LX)):
                cause = f"rank {self.rank} changed the input of op '{op}' (call {number}) before its wait"
                self._board.fail(cause)
                raise GroupError(f"rank {self.rank} of {self.size}: op '{op}': {cause}")
            peers = [peer for peer in others if copy_LX.numel() or counts[peer] * math.prod(row_shape)]
            entries = self._board.collect(self.rank, number, op, peers)
            result_LX = poisoned((sum(counts), *row_shape), local_LX.dtype, local_LX.device)
            for peer in range(self.size):
                first = sum(counts[:peer])
                if peer == self.rank:
                    result_LX[first : first + counts[peer]].copy_(copy_LX)
                elif peer in entries:
                    result_LX[first : first + counts[peer]].copy_(entries[peer].sends[self.rank])
            self.ledger.add(op, seconds=time.perf_counter() - began)
            return result_LX

        self.ledger.add(op, num_bytes=copy_LX.nbytes * (self.size - 1))
        return ThreadPending(take, op)

    def exchange(
        self,
        sends: Mapping[int, torch.Tensor],
        receive_shapes: Mapping[int, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        op: str,
    ) -> dict[int, torch.Tensor]:
        began = time.perf_counter()
        check_exchange(sends, receive_shapes, dtype=dtype, rank=self.rank, size=self.size, op=op)
        copies = {peer: copied(tensor) for peer, tensor in sends.items()}
        shapes = {peer: tuple(shape) for peer, shape in receive_shapes.items()}
        entry = Entry(op=op, kind="exchange", agreed={"dtype": dtype}, sends=copies, receive_shapes=shapes)
        number = self._enter(entry, began)
        outgoing = {peer: copy for peer, copy in copies.items() if peer != self.rank and copy.numel()}
        incoming = {peer for peer, shape in shapes.items() if peer != self.rank and math.prod(shape)}
        entries = self._board.collect(self.rank, number, op, outgoing.keys() | incoming)
        device = next((tensor.device for tensor in sends.values()), torch.device("cpu"))
        received = {}
        for peer, shape in shapes.items():
            received[peer] = poisoned(shape, dtype, device)
            if peer in incoming:
                received[peer].copy_(entries[peer].sends[self.rank])
            elif peer == self.rank:
                received[peer].copy_(copies[peer])
        self.ledger.add(op, num_bytes=sum(t.nbytes for t in outgoing.values()), seconds=time.perf_counter() - began)
        return received

    def broadcast(self, tensor: torch.Tensor, root: int, *, op: str) -> torch.Tensor:
        began = time.perf_counter()
        check_root(root, size=self.size, op=op)
        others = [peer for peer in range(self.size) if peer != root]
        sends = dict.fromkeys(others, copied(tensor)) if self.rank == root else {}
        agreed: dict[str, object] = {"root": root, "shape": tuple(tensor.shape), "dtype": tensor.dtype}
        number = self._enter(Entry(op=op, kind="broadcast", agreed=agreed, sends=sends), began)
        peers = [] if tensor.numel() == 0 else others if self.rank == root else [root]
        entries = self._board.collect(self.rank, number, op, peers)
        if self.rank != root and peers:
            tensor.copy_(entries[root].sends[self.rank])
        num_bytes = tensor.nbytes * len(others) if self.rank == root else 0
        self.ledger.add(op, num_bytes=num_bytes, seconds=time.perf_counter() - began)
        return tensor

    def barrier(self, *, op: str) -> None:
        began = time.perf_counter()
        number = self._enter(Entry(op=op, kind="barrier", agreed={}, sends={}), began)
        self._board.collect(self.rank, number, op, [peer for peer in range(self.size) if peer != self.rank])
        self.ledger.add(op, seconds=time.perf_counter() - began)

    def close(self) -> None:
        self._board.close(self.rank)

    def _enter(self, entry: Entry, began: float) -> int:
        number = self._board.enter(self.rank, entry)
        self.ledger.add(entry.op, calls=1)
        if entry.kind == "all_gather_rows":
            self.ledger.add(entry.op, seconds=time.perf_counter() - began)
        return number


def disagreement(rank: int, entry: Entry, peer: int, other: Entry) -> str | None:
    """Why two ranks' entries cannot be the same call; None when they can."""
    if (entry.op, entry.kind) != (other.op, other.kind):
        return f"rank {rank} is in {entry.kind} '{entry.op}' while rank {peer} is in {other.kind} '{other.op}'"
    for name, value in entry.agreed.items():
        if value != other.agreed[name]:
            return f"{name} {value} on rank {rank} but {other.agreed[name]} on rank {peer}"
    if entry.kind != "exchange":
        return None
    for sender, sent, receiver, wanted in ((rank, entry, peer, other), (peer, other, rank, entry)):
        message = sent.sends.get(receiver)
        sent_shape = None if message is None or message.numel() == 0 else tuple(message.shape)
        wanted_shape = wanted.receive_shapes.get(sender)
        if wanted_shape is not None and math.prod(wanted_shape) == 0:
            wanted_shape = None
        if sent_shape != wanted_shape:
            return f"rank {sender} sends shape {sent_shape} to rank {receiver}, which expects shape {wanted_shape}"
    return None


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that no later change of the caller reaches."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def poisoned(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A fresh tensor of 0xFF bytes, so that an element nobody writes shows."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if dtype == torch.bool:  # a bool byte other than 0 and 1 is undefined behaviour
        return tensor.fill_(True)
    as_bytes(tensor).fill_(0xFF)
    return tensor
