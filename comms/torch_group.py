"""A group over torch.distributed: gloo between processes of any host, nccl and hccl between accelerators.

The controller holds one store (`create_store`); each generation of a group meets under its own prefix in it. A rank
leaves by `close` and joins the next generation with a new `TorchGroup`. Any failure ends this rank's connections at
once, so that the peers fail too, within milliseconds, instead of at their deadlines.
"""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from .arguments import as_bytes, check_exchange, check_gather, check_root
from .gloo_wire import GlooWire
from .group import Group, GroupError, Ledger, Pending
from .wires import AcceleratorWire, Message, Started, Wire, WireError, first_line, listening_address

STORE_TIMEOUT_S = 60.0
TAG_CALLS = 1 << 14
"""Calls after which tags repeat; messages of one tag match in order, so a repeat is harmless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Where a rank meets its peers, and as what. Pickles, so that the controller can send it to an actor."""

    host: str
    port: int
    """Of the controller's store."""
    generation: int
    """Names the meeting: all ranks pass the same one, and none is used twice in one store."""
    rank: int
    size: int
    device: str
    """torch device of the tensors: `cpu`, `cuda:0`, `npu:0`."""
    backend: str
    """gloo, nccl or hccl: `workers.device.backend_for(device)`."""
    timeout_s: float
    """Deadline of every call, forming included."""
    address: str | None = None
    """Local address that gloo listens on; None: the one that reaches the store."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank} of size={self.size}: ranks are 0 to {self.size - 1}")
        if self.generation < 0:
            raise ValueError(f"generation={self.generation}: generations are 0 or more")
        if not 0.001 <= self.timeout_s <= 86400:
            raise ValueError(f"timeout_s={self.timeout_s}: a deadline is between 0.001 and 86400 seconds")
        if self.backend not in ("gloo", "nccl", "hccl"):
            raise ValueError(f"backend='{self.backend}': allowed are gloo, nccl, hccl")


class Store:
    """The controller's meeting point, alive as long as this object. It listens on the given address only."""

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0))
        self.host = host
        self.port: int = listener.getsockname()[1]
        # The store takes the descriptor over and closes it. Left to bind by itself it would listen on all interfaces.
        self._store: dist.TCPStore | None = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Groups that already stand go on without it; a second call does nothing."""
        self._store = None


def create_store(host: str = "127.0.0.1") -> tuple[Store, str, int]:
    """A store on a free port of `host`: (store to keep alive, host, port) for `GroupSpec`s.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    store = Store(host)
    return store, store.host, store.port


class TorchPending(Pending):
    """A gather in flight. The rank's own rows are copied at `wait`, while the others' are still coming."""

    def __init__(
        self, group: TorchGroup, call: Call, result_LX: torch.Tensor, own_LX: torch.Tensor, local_LX: torch.Tensor
    ) -> None:
        self._group = group
        self._call = call
        self._result_LX: torch.Tensor | None = result_LX
        self._own_LX = own_LX
        self._local_LX = local_LX

    def wait(self) -> torch.Tensor:
        if self._result_LX is None:
            raise RuntimeError(f"op '{self._call.op}': the result was already taken: wait once and keep it")
        began = time.perf_counter()
        self._own_LX.copy_(self._local_LX)
        self._group.ledger.add(self._call.op, seconds=time.perf_counter() - began)
        self._group.finish(self._call)
        result_LX, self._result_LX = self._result_LX, None
        return result_LX


@dataclass(eq=False, slots=True)
class Call:
    """One entered call: its name, its number in the group's life and its messages in flight."""

    op: str
    number: int
    started: list[Started]


class TorchGroup(Group):
    """Meets the peers of `spec.generation` at construction.

    Raises:
        GroupError: they did not all come within the deadline.
        ValueError: the backend is not available here.
    """

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.rank = spec.rank
        self.size = spec.size
        self.ledger = Ledger()
        self._device = torch.device(spec.device)
        self._num_calls = 0
        self._in_flight: set[Call] = set()
        """Started and not yet waited for: kept here too, so that memory which a peer still writes into stays alive when
        the caller drops its Pending."""
        self._end: str | None = None
        """Why this group takes no more calls."""
        try:
            self._wire: Wire | None = connect(spec)
        except (RuntimeError, OSError) as error:  # torch's distributed errors all derive from the first
            raise GroupError(
                f"rank {self.rank} of {self.size}: generation {spec.generation} did not form at "
                f"{spec.host}:{spec.port} within {spec.timeout_s} s: {first_line(error)}"
            ) from None

    def start_all_gather_rows(self, local_LX: torch.Tensor, counts: Sequence[int], *, op: str) -> Pending:
        began = time.perf_counter()
        check_gather(local_LX, counts, rank=self.rank, size=self.size, op=op)
        self._check_device(local_LX, op)
        row_shape = tuple(local_LX.shape[1:])
        result_LX = torch.empty((sum(counts), *row_shape), dtype=local_LX.dtype, device=local_LX.device)
        firsts = [sum(counts[:peer]) for peer in range(self.size)]
        own_LX = result_LX[firsts[self.rank] : firsts[self.rank] + counts[self.rank]]
        local_B = as_bytes(local_LX.contiguous())
        call, tag = self._enter(op, (local_LX.dtype, row_shape, tuple(counts)))
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        sends = [Message(peer, tag, local_B) for peer in peers if local_B.numel()]
        blocks = {peer: as_bytes(result_LX[firsts[peer] : firsts[peer] + counts[peer]]) for peer in peers}
        self._start(call, sends, [Message(peer, tag, block_B) for peer, block_B in blocks.items() if block_B.numel()])
        self.ledger.add(op, seconds=time.perf_counter() - began)
        return TorchPending(self, call, result_LX, own_LX, local_LX)

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
        for tensor in sends.values():
            self._check_device(tensor, op)
        call, tag = self._enter(op, ())
        received = {p: torch.empty(shape, dtype=dtype, device=self._device) for p, shape in receive_shapes.items()}
        if self.rank in sends:
            received[self.rank].copy_(sends[self.rank])
        # A shape is a matter between two ranks, so it is mixed into the tag of their message only.
        outgoing = [
            Message(peer, mixed(tag, (dtype, tuple(tensor.shape))), as_bytes(tensor.contiguous()))
            for peer, tensor in sends.items()
            if peer != self.rank and tensor.numel()
        ]
        incoming = [
            Message(peer, mixed(tag, (dtype, tuple(tensor.shape))), as_bytes(tensor))
            for peer, tensor in received.items()
            if peer != self.rank and tensor.numel()
        ]
        self._start(call, outgoing, incoming)
        self.ledger.add(op, seconds=time.perf_counter() - began)
        self.finish(call)
        return received

    def broadcast(self, tensor: torch.Tensor, root: int, *, op: str) -> torch.Tensor:
        began = time.perf_counter()
        check_root(root, size=self.size, op=op)
        self._check_device(tensor, op)
        call, tag = self._enter(op, (tensor.dtype, tuple(tensor.shape), root))
        buffer = tensor.contiguous()
        buffer_B = as_bytes(buffer)
        peers = [peer for peer in range(self.size) if peer != root] if buffer_B.numel() else []
        if self.rank == root:
            self._start(call, [Message(peer, tag, buffer_B) for peer in peers], [])
        else:
            self._start(call, [], [Message(root, tag, buffer_B)] if peers else [])
        self.ledger.add(op, seconds=time.perf_counter() - began)
        self.finish(call)
        if self.rank != root and buffer is not tensor:
            tensor.copy_(buffer)
        return tensor

    def barrier(self, *, op: str) -> None:
        """Dissemination: after round n every rank has heard, at one remove or more, of the 2^(n+1) ranks before it."""
        call, tag = self._enter(op, ("barrier",))
        began = time.perf_counter()
        token_B, heard_B = torch.zeros(2, 1, dtype=torch.uint8, device=self._device)
        distance = 1
        while distance < self.size:
            ahead, behind = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            self._start(call, [Message(ahead, tag, token_B)], [Message(behind, tag, heard_B)], num_bytes=0)
            self._finish_wire(call, began)
            distance *= 2
        self._in_flight.discard(call)
        self.ledger.add(op, seconds=time.perf_counter() - began)

    def finish(self, call: Call) -> None:
        """Waits for a started call's messages. Its deadline begins now: compute may lie between start and here."""
        began = time.perf_counter()
        self._finish_wire(call, began)
        self._in_flight.discard(call)
        self.ledger.add(call.op, seconds=time.perf_counter() - began)

    def close(self) -> None:
        if self._end is None:
            self._end = "the group is closed"
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        # Unfinished messages hold the connections open: the peers learn of the end only when these are gone.
        for call in self._in_flight:
            call.started.clear()
        self._in_flight.clear()

    def _enter(self, op: str, signature: tuple[object, ...]) -> tuple[Call, int]:
        if self._wire is None:
            raise GroupError(f"rank {self.rank} of {self.size}: op '{op}': {self._end}")
        call = Call(op, self._num_calls, [])
        self._num_calls += 1
        self._in_flight.add(call)
        self.ledger.add(op, calls=1)
        # Ranks that disagree about what this call is wait for tags that never come, until their deadline, instead of
        # taking one message for another.
        return call, mixed((call.number % TAG_CALLS) << 16, (op, *signature))

    def _start(
        self, call: Call, sends: Sequence[Message], receives: Sequence[Message], *, num_bytes: int | None = None
    ) -> None:
        if num_bytes is None:
            num_bytes = sum(message.bytes_B.numel() for message in sends)
        self.ledger.add(call.op, num_bytes=num_bytes)
        assert self._wire is not None
        try:
            self._wire.start(sends, receives, call.started)
        except WireError as error:
            self._fail(call, str(error))

    def _finish_wire(self, call: Call, began: float) -> None:
        if self._wire is None:
            raise GroupError(f"rank {self.rank} of {self.size}: op '{call.op}': {self._end}")
        spent_s = time.perf_counter() - began
        try:
            self._wire.finish(call.started, time.monotonic() + self.spec.timeout_s - spent_s)
        except WireError as error:
            self._fail(call, str(error))
        call.started.clear()

    def _fail(self, call: Call, cause: str) -> NoReturn:
        where = f"rank {self.rank} of {self.size}: op '{call.op}'"
        message = f"{where} (call {call.number}, generation {self.spec.generation}): {cause}"
        self._end = f"the group failed before: {message}"
        call.started.clear()
        self.close()
        raise GroupError(message)

    def _check_device(self, tensor: torch.Tensor, op: str) -> None:
        if tensor.device.type != self._device.type:
            raise ValueError(f"op '{op}': a tensor on {tensor.device} in a group on {self._device}: move it there")


def connect(spec: GroupSpec) -> Wire:
    """The wire of `spec`, once all its ranks have come."""
    timeout = timedelta(seconds=spec.timeout_s)
    client = dist.TCPStore(spec.host, spec.port, is_master=False, wait_for_workers=False, timeout=timeout)
    store = dist.PrefixStore(f"g{spec.generation}", client)
    if spec.backend == "gloo":
        address = spec.address if spec.address is not None else listening_address(spec.host, spec.port)
        return GlooWire(store, spec.rank, spec.size, spec.timeout_s, address)
    return AcceleratorWire(store, spec.rank, spec.size, spec.timeout_s, spec.backend)


def mixed(tag: int, signature: tuple[object, ...]) -> int:
    """`tag` with 16 bits of a checksum of `signature` mixed into its low half; 30 bits in all."""
    return tag ^ (zlib.crc32(repr(signature).encode()) & 0xFFFF)
