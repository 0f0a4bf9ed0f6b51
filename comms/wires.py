"""Point-to-point messages over one torch.distributed backend each: all that `TorchGroup` needs of gloo, nccl and hccl.

gloo's own all-gather moves a fifth to a tenth of what its send and receive move, and the other backends' collectives
cannot be ragged, so every collective of ours is a batch of messages. Backend objects are made directly, not through
`init_process_group`: a process may hold several groups, and forming a new one touches no global state. gloo's wire is
in `gloo_wire.py`.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

POLL_S = 50e-6
"""Pause between two looks at an accelerator's unfinished messages."""


MAX_TAG = (1 << 30) - 1
"""Tags above it are the wires' own."""


class Message(NamedTuple):
    """One message of a batch. Messages between one pair match by tag, those of one tag in order."""

    peer: int
    tag: int
    bytes_B: torch.Tensor
    """uint8, contiguous: sent from or received into."""


class Started(NamedTuple):
    """A message (or a whole batch, then `peer` is None) in flight. Keeps its memory alive."""

    work: Any
    peer: int | None
    verb: str
    tensors: tuple[torch.Tensor, ...]


class WireError(Exception):
    """Why messages did not arrive. `TorchGroup` turns it into a `GroupError` that names rank and operation."""


class Wire(ABC):
    """Moves batches of messages between the ranks of one group."""

    @abstractmethod
    def start(self, sends: Sequence[Message], receives: Sequence[Message], started: list[Started]) -> None:
        """Puts all messages in flight and returns. Fills `started` as it goes, so that nothing in flight is lost when
        it raises `WireError` halfway."""

    @abstractmethod
    def finish(self, started: list[Started], deadline_s: float) -> None:
        """Blocks the host until all are done, or raises `WireError` at the first failure or at `deadline_s` on
        time.monotonic. `started` must outlive the call."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connections; peers that wait for this rank fail at once. A second call does nothing."""


class AcceleratorWire(Wire):
    """nccl and hccl: a batch is one grouped call on the device.

    `finish` blocks the host, which a stream wait would not: only so is a peer's death an error here instead of a
    watchdog that ends the whole process. The batch has had the time from start to finish to hide behind compute.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float, backend: str) -> None:
        self._name = backend
        # The library's own watchdog must not come before our deadline.
        self._backend: Any = make_accelerator_backend(backend, store, rank, size, timedelta(seconds=4 * timeout_s + 60))

    def start(self, sends: Sequence[Message], receives: Sequence[Message], started: list[Started]) -> None:
        messages = [("isend", message) for message in sends] + [("irecv", message) for message in receives]
        if not messages:
            return
        tensors = tuple(message.bytes_B for _, message in messages)
        try:
            if self._name == "hccl":
                verbs, peers = [verb for verb, _ in messages], [message.peer for _, message in messages]
                work = self._backend.batch_isend_irecv(verbs, list(tensors), peers)
            else:
                self._backend._start_coalescing()
                for verb, message in messages:
                    call = self._backend.send if verb == "isend" else self._backend.recv
                    call([message.bytes_B], message.peer, message.tag)
                work = self._backend._end_coalescing()
        except RuntimeError as error:
            raise WireError(f"starting {len(messages)} messages: {first_line(error)}") from None
        started.append(Started(work, None, "moving messages", tensors))

    def finish(self, started: list[Started], deadline_s: float) -> None:
        for index in range(len(started)):
            try:
                while not started[index].work.is_completed():
                    if time.monotonic() >= deadline_s:
                        raise WireError(f"{started[index].verb}: not done at the deadline")
                    time.sleep(POLL_S)
                started[index].work.wait()  # orders the current stream behind it, raises what went wrong
            except RuntimeError as error:
                raise WireError(f"{started[index].verb}: {first_line(error)}") from None

    def close(self) -> None:
        if self._backend is None:
            return
        if self._name == "hccl":
            self._backend.abort_hccl_comm("group closed")
        else:
            self._backend.abort()
        self._backend = None


def make_accelerator_backend(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """The backend object of nccl or hccl.

    Raises:
        ValueError: an unknown name, or this torch was built without it.
    """
    if name == "nccl":
        if not dist.is_nccl_available():
            raise ValueError("backend 'nccl': this torch was built without it: install a CUDA build, or use 'cpu'")
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    if name == "hccl":
        import torch_npu  # pyright: ignore[reportMissingImports]

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = []
        options.group_id = f"longprefill_{rank}_of_{size}"
        return torch_npu._C._distributed_c10d.ProcessGroupHCCL(store, rank, size, options)
    raise ValueError(f"backend '{name}': allowed are gloo, nccl, hccl")


def listening_address(store_host: str, store_port: int) -> str:
    """The local address from which the store is reached: the only one that peers connect to, never all interfaces."""
    if ipaddress.ip_address(socket.gethostbyname(store_host)).is_loopback:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((store_host, store_port))  # sends nothing, only asks the routing table
        return str(probe.getsockname()[0])


def first_line(error: BaseException) -> str:
    """The cause without the library's advice and source paths."""
    lines = str(error).splitlines()
    line = lines[0] if lines else type(error).__name__
    if line.startswith("[") and "] " in line:
        line = line.split("] ", 1)[1]
    return line.split(". This is typically", 1)[0]
