"""The narrow interface through which cache pages reach another process, whatever moves them.

In the order of calls. Receiving side: make a pool, `advance_generation` on its channel, publish the `PoolAddress`.
Sending side: `register_pool` its own pool, `connect` to the address at that generation, `submit` batches, `poll` or
`wait`, and before memory of either side is used for something else `cancel_and_drain`. Writes are one-sided: the
receiver learns of them by the manifest. Deadlines are kept here, not by the library below.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


class TransportError(RuntimeError):
    """A transfer or a pool cannot be used: names what, its value, what is allowed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class TransportBusyError(TransportError):
    """The queue of transfers is full: poll the running ones and submit again."""


class NotDrainedError(TransportError):
    """A transfer did not stop in time: its memory on both sides may still be written, quarantine it."""


class TransferState(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """No byte moves any more."""
        return self in (TransferState.DONE, TransferState.FAILED, TransferState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the owner of a pool takes pages from other machines."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    """Of one channel at one generation: whoever has it may write there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAddress:
    """Where a pool is, as published to other processes."""

    path: str
    num_bytes: int
    channel: int = 0
    """Row of the pool's generation table: what shares a channel is fenced together."""
    endpoint: Endpoint | None = None
    """None: reached through its file only, on the machine that it is on."""

    @property
    def endpoint_text(self) -> str:
        """host:port, for messages."""
        return "no endpoint" if self.endpoint is None else f"{self.endpoint.host}:{self.endpoint.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A connection to a remote pool at one generation of one channel."""

    number: int
    address: PoolAddress
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`num_bytes` from `source` in the local pool to `target` in the peer's, both byte offsets."""

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Handle of a submitted batch."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a transfer is."""

    state: TransferState
    moved_bytes: int
    total_bytes: int
    error: str | None
    """Why it failed."""


class PageTransport(ABC):
    """Sends from registered local pools. Any thread may call; only `wait` and what drains block."""

    @abstractmethod
    def register_pool(self, name: str, pool_B: torch.Tensor) -> None:
        """Makes the local uint8 tensor [bytes] a source under `name`. It must outlive its transfers.

        Raises:
            TransportError: not flat uint8, or the name is taken.
        """

    @abstractmethod
    def connect(self, address: PoolAddress, *, generation: int) -> Peer:
        """Opens a remote pool for writing while its channel is at `generation`.

        Raises:
            TransportError: not there, not a pool of that size, or already at another generation.
        """

    @abstractmethod
    def submit(self, pool: str, peer: Peer, batch: Sequence[Copy], *, timeout_s: float) -> Transfer:
        """Queues a batch and returns. It fails unless done within `timeout_s` from now; what it has written by then is
        undefined.

        Raises:
            TransportBusyError: the queue is full.
            TransportError: unknown pool or peer, an empty batch, or a copy that leaves either pool.
        """

    @abstractmethod
    def poll(self, transfer: Transfer) -> Progress:
        """Where the transfer stands.

        Raises:
            TransportError: unknown, or already forgotten.
        """

    @abstractmethod
    def wait(self, transfer: Transfer, *, timeout_s: float) -> Progress:
        """Blocks until the transfer is terminal or `timeout_s` is over, and says which."""

    @abstractmethod
    def cancel_and_drain(self, transfer: Transfer, *, timeout_s: float) -> Progress:
        """Stops the transfer, waits until no byte of it moves any more, and says how it ended. A done one stays DONE.

        Raises:
            NotDrainedError: it is still moving after `timeout_s`.
        """

    @abstractmethod
    def forget(self, transfer: Transfer) -> None:
        """Drops the handle of a terminal transfer; the transport remembers only a limited number of them."""

    @abstractmethod
    def disconnect(self, peer: Peer, *, timeout_s: float) -> None:
        """Cancels and drains the peer's transfers and closes the connection.

        Raises:
            NotDrainedError: one is still moving after `timeout_s`.
        """

    @abstractmethod
    def close(self, *, timeout_s: float = 10.0) -> None:
        """Cancels and drains everything; a second call does nothing.

        Raises:
            NotDrainedError: a transfer is still moving after `timeout_s`.
        """
