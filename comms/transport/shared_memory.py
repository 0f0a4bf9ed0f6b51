"""Page transport between processes of one host: both pools are mapped files, a background thread copies.

The copies release the interpreter lock, so they overlap the caller's compute. Before each piece the thread looks at the
target's generation, under the channel's lock.
"""

from __future__ import annotations

import ctypes
import fcntl
from collections.abc import Sequence

import torch

from .base import Copy, Peer, TransportError
from .holder import Pool, attach_pool
from .queued import QueuedTransport, refused


class MappedLink:
    """Writes through a mapping of the target's pool file."""

    def __init__(self, peer: Peer, target: Pool) -> None:
        self._peer = peer
        self._target = target

    def write(self, piece: Sequence[Copy], source_B: torch.Tensor, deadline_s: float) -> None:
        channel = self._peer.address.channel
        with self._target.locked(channel, fcntl.F_RDLCK, deadline_s):
            current = self._target.generation(channel)
            if current != self._peer.generation:
                raise TransportError(refused(self._peer.address, current, self._peer.generation))
            copy_piece(piece, source_B, self._target.bytes_B)

    def close(self) -> None:
        self._target.close()


class SharedMemoryTransport(QueuedTransport):
    """Copies to pools of other processes on this host."""

    def open_link(self, peer: Peer) -> MappedLink:
        target = attach_pool(peer.address)
        current = target.generation(peer.address.channel)
        if current != peer.generation:
            target.close()
            raise TransportError(refused(peer.address, current, peer.generation))
        return MappedLink(peer, target)


def copy_piece(piece: Sequence[Copy], source_B: torch.Tensor, target_B: torch.Tensor) -> None:
    """Copies between tensors, offsets already checked. By address: slicing a tensor costs more than a page's bytes."""
    if source_B.device.type != "cpu":
        for copy in piece:
            device_B = source_B[copy.source : copy.source + copy.num_bytes]
            target_B[copy.target : copy.target + copy.num_bytes].copy_(device_B)
        return
    source, target = source_B.data_ptr(), target_B.data_ptr()
    for copy in piece:
        ctypes.memmove(target + copy.target, source + copy.source, copy.num_bytes)  # without the interpreter lock
