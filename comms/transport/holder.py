"""Pools: files in memory that outlive the process group which reads and writes them.

A pool file is named `longprefill-<pid>-<start time>-<pid namespace>-<label>-<random>` after the process that made it,
so that `sweep_stale` can remove what dead processes left and nothing else. Layout: one header page, then the bytes.

    offset 0  magic, 8 bytes   8  size, u64   16  generations, u64 for each of CHANNELS   4096  bytes

Generations fence writers. A writer copies a piece while it shares its channel's lock, and looks at the generation
first; `advance_generation` raises the generation and then takes that lock alone. When it returns, no write of an older
one is under way and none will come, not even from a process that was stopped and wakes up later.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .base import NotDrainedError, PoolAddress, TransportError

MAGIC = b"LPPOOL01"
HEADER_BYTES = 4096
CHANNELS = (HEADER_BYTES - 16) // 8
SHARED_MEMORY = Path("/dev/shm")
NAME = re.compile(r"longprefill-(\d+)-(\d+)-(\d+)-([A-Za-z0-9_]{1,32})-([0-9a-f]{16})")
LABEL = re.compile(r"[A-Za-z0-9_]{1,32}")
LOCK_POLL_S = 0.002


class Pool:
    """A mapped pool file. `bytes_B` is uint8 [num_bytes] in shared memory; views of it keep the mapping alive.

    Made by `create_pool` (new) or `attach_pool` (existing).
    """

    def __init__(self, path: Path, file: int, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._file = file
        self._map = mmap.mmap(file, HEADER_BYTES + num_bytes)
        self.bytes_B = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES, count=num_bytes)
        self._is_open = True

    def address(self, channel: int = 0) -> PoolAddress:
        """What to publish to writers of this channel."""
        check_channel(channel)
        return PoolAddress(path=str(self.path), num_bytes=self.num_bytes, channel=channel)

    def generation(self, channel: int = 0) -> int:
        """Current generation of a channel; 0 in a fresh pool."""
        check_channel(channel)
        return int(struct.unpack_from("<Q", self._map, 16 + 8 * channel)[0])

    def advance_generation(self, channel: int = 0, *, timeout_s: float) -> int:
        """Raises the channel's generation by one and returns it once no write of an older one is under way. For the
        pool's owner only.

        Raises:
            NotDrainedError: a writer is still in the middle of a piece after `timeout_s` (a stopped process). The older
                generations are refused all the same; call again, or quarantine what the channel's writers could reach.
        """
        check_channel(channel)
        generation = self.generation(channel) + 1
        # Raised before the lock is ours: writers that come now leave at once instead of keeping us out by taking turns.
        struct.pack_into("<Q", self._map, 16 + 8 * channel, generation)
        with self.locked(channel, fcntl.F_WRLCK, time.monotonic() + timeout_s):
            return generation

    @contextmanager
    def locked(self, channel: int, mode: int, deadline_s: float) -> Iterator[None]:
        """Holds a channel's lock, `fcntl.F_RDLCK` (shared) or `F_WRLCK` (alone), taken before `deadline_s` on
        time.monotonic. The kernel frees it when its holder dies. It belongs to this `Pool`: one thread at a time.

        Raises:
            NotDrainedError: others hold it beyond the deadline.
        """
        while not self._try_lock(channel, mode):
            if time.monotonic() >= deadline_s:
                raise NotDrainedError(f"pool {self.path}, channel {channel}: another process holds its lock too long")
            time.sleep(LOCK_POLL_S)
        try:
            yield
        finally:
            self._try_lock(channel, fcntl.F_UNLCK)

    def _try_lock(self, channel: int, mode: int) -> bool:
        # A lock of the open file, not of the process: two mappings in one process exclude each other too.
        request = struct.pack("hhqqi", mode, os.SEEK_SET, 16 + 8 * channel, 8, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        """Gives up this process's hold; the file and other mappings stay, and so do views that are still in use."""
        if self._is_open:
            self._is_open = False
            os.close(self._file)
            del self.bytes_B
            del self._map

    def unlink(self) -> None:
        """Removes the file; its memory is free once the last mapping is gone. A second call does nothing."""
        self.path.unlink(missing_ok=True)


def create_pool(num_bytes: int, *, label: str, directory: Path | None = None) -> Pool:
    """A new pool of `num_bytes` zero bytes, all of them allocated: a full disk is an error here, not a signal later.

    `directory` None: /dev/shm when it has the room, else the directory for temporary files.

    Raises:
        TransportError: no room, or a label that is not 1 to 32 letters, digits and underscores.
    """
    if LABEL.fullmatch(label) is None:
        raise TransportError(f"label='{label}': needs 1 to 32 letters, digits and underscores")
    if num_bytes < 1:
        raise TransportError(f"num_bytes={num_bytes}: a pool has 1 byte or more")
    directory = choose_directory(num_bytes) if directory is None else directory
    path = directory / f"longprefill-{owner_tag()}-{label}-{secrets.token_hex(8)}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, HEADER_BYTES + num_bytes)
        os.pwrite(file, struct.pack("<8sQ", MAGIC, num_bytes), 0)
        return Pool(path, file, num_bytes)
    except OSError as error:
        os.close(file)
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        free_bytes = room(directory)
        raise TransportError(
            f"a pool of {num_bytes} bytes does not fit in {directory}, where {free_bytes} are free: make it smaller or "
            f"free some memory"
        ) from None


def attach_pool(address: PoolAddress) -> Pool:
    """Maps an existing pool. The address may come from outside: nothing but a pool file of this user opens.

    Raises:
        TransportError: no such pool, not ours, or of another size than the address says.
    """
    path = Path(address.path)
    check_channel(address.channel)
    if NAME.fullmatch(path.name) is None or not path.is_absolute() or ".." in path.parts:
        raise TransportError(f"'{address.path}' is no pool: needs the absolute path of a longprefill-... file")
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransportError(f"pool '{address.path}' cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise TransportError(f"pool '{address.path}' is no regular file of this user")
        if status.st_size != HEADER_BYTES + address.num_bytes or address.num_bytes < 1:
            raise TransportError(
                f"pool '{address.path}' has {status.st_size - HEADER_BYTES} bytes, its address says {address.num_bytes}"
            )
        magic, num_bytes = struct.unpack("<8sQ", os.pread(file, 16, 0))
        if magic != MAGIC or num_bytes != address.num_bytes:
            raise TransportError(
                f"pool '{address.path}' has no valid header: another version made it, or it is damaged"
            )
        return Pool(path, file, num_bytes)
    except BaseException:
        os.close(file)
        raise


def sweep_stale(directories: tuple[Path, ...] | None = None) -> list[Path]:
    """Removes the pools of processes that no longer live and returns their paths. Pools made in other pid namespaces
    (containers that share the directory) and by other users are left alone: from here their owners cannot be seen."""
    removed = []
    namespace = str(pid_namespace())
    for directory in pool_directories() if directories is None else directories:
        for path in sorted(directory.glob("longprefill-*")):
            match = NAME.fullmatch(path.name)
            if match is None or match[3] != namespace or start_time(int(match[1])) == int(match[2]):
                continue
            try:
                if path.lstat().st_uid == os.geteuid():
                    path.unlink()
                    removed.append(path)
            except FileNotFoundError:
                continue  # another sweep was faster
    return removed


def pool_directories() -> tuple[Path, ...]:
    """Where pools may be, best first."""
    temporary = Path(tempfile.gettempdir())
    return (SHARED_MEMORY, temporary) if SHARED_MEMORY.is_dir() else (temporary,)


def choose_directory(num_bytes: int) -> Path:
    """The first pool directory with room for the pool, or the last one if none has."""
    directories = pool_directories()
    return next((path for path in directories if room(path) >= HEADER_BYTES + num_bytes), directories[-1])


def room(directory: Path) -> int:
    """Bytes that this user may still write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def owner_tag() -> str:
    """pid, start time and pid namespace of this process: together never reused while the machine is up."""
    return f"{os.getpid()}-{start_time(os.getpid())}-{pid_namespace()}"


def start_time(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot; None when there is no such process (a zombie is none)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return None if fields[0] in ("Z", "X") else int(fields[19])


def pid_namespace() -> int:
    """Number of the pid namespace that this process lives in."""
    return Path("/proc/self/ns/pid").stat().st_ino


def check_channel(channel: int) -> None:
    """Refuses a channel that the header has no row for."""
    if not 0 <= channel < CHANNELS:
        raise TransportError(f"channel={channel}: a pool has channels 0 to {CHANNELS - 1}")
