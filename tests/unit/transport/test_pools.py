"""Pools: private, found by nobody else, fenced by generations, read by other processes, swept when their makers die."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longprefill.comms.transport import holder
from longprefill.comms.transport.base import Copy, NotDrainedError, PoolAddress, TransportError
from longprefill.comms.transport.holder import Pool, attach_pool, create_pool, sweep_stale
from longprefill.comms.transport.shared_memory import SharedMemoryTransport

DEADLINE_S = 30.0


def in_child(body: Callable[[], Any]) -> Any:
    """What `body` returns in a forked process, which has exited by then."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def run() -> None:
        there.send(body())
        os._exit(0)

    process = context.Process(target=run)
    process.start()
    there.close()
    with here:
        assert here.poll(DEADLINE_S), "the child said nothing"
        value = here.recv()
    process.join(DEADLINE_S)
    return value


def test_another_process_reads_what_was_written_and_writes_into_the_pool(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(1 << 16)
    pool.bytes_B.copy_(torch.arange(1 << 16) % 251)
    address = pool.address()

    def body() -> tuple[bool, str]:
        attached = attach_pool(address)
        found = torch.equal(attached.bytes_B.long(), torch.arange(1 << 16) % 251)
        sender = SharedMemoryTransport()
        sender.register_pool("own", torch.full((100,), 7, dtype=torch.uint8))
        peer = sender.connect(address, generation=0)
        copy = Copy(source=0, target=50, num_bytes=100)
        transfer = sender.submit("own", peer, [copy], timeout_s=DEADLINE_S)
        state = sender.wait(transfer, timeout_s=DEADLINE_S).state
        sender.close()
        return found, state.value

    assert in_child(body) == (True, "done")
    assert pool.bytes_B[50:150].eq(7).all()
    assert pool.bytes_B[49] == 49
    assert pool.bytes_B[150] == 150


def test_the_generation_waits_for_a_write_under_way_and_refuses_those_behind_it(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(100)
    writer = attach_pool(pool.address())
    with writer.locked(0, fcntl.F_RDLCK, time.monotonic() + DEADLINE_S):
        with pytest.raises(NotDrainedError, match="channel 0: another process holds its lock"):
            pool.advance_generation(timeout_s=0.01)
        assert writer.generation() == 1, "the writer's next look must already see it"
        pool.advance_generation(1, timeout_s=0.01)
    assert pool.advance_generation(timeout_s=DEADLINE_S) == 2
    writer.close()


def test_a_killed_writer_holds_nothing(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(100)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def body() -> None:
        writer = attach_pool(pool.address())
        with writer.locked(0, fcntl.F_RDLCK, time.monotonic() + DEADLINE_S):
            there.send("locked")
            signal.pause()

    process = context.Process(target=body)
    process.start()
    assert here.poll(DEADLINE_S)
    with pytest.raises(NotDrainedError):
        pool.advance_generation(timeout_s=0.01)
    process.kill()
    process.join(DEADLINE_S)
    assert pool.advance_generation(timeout_s=DEADLINE_S) == 2
    here.close()
    there.close()


def test_a_pool_is_private_named_after_its_maker_and_all_there(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(1 << 20, "latent_0")
    match = holder.NAME.fullmatch(pool.path.name)
    assert match is not None
    assert int(match[1]) == os.getpid()
    assert match[4] == "latent_0"
    status = pool.path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 1 << 20
    assert pool.bytes_B.numel() == 1 << 20
    assert pool.bytes_B.eq(0).all()


def test_a_pool_that_does_not_fit_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"a pool of \d+ bytes does not fit in .*, where \d+ are free"):
        create_pool(1 << 60, label="huge", directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_pool_prefers_shared_memory_and_goes_elsewhere_when_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(holder, "pool_directories", lambda: (first, second))
    monkeypatch.setattr(holder, "room", lambda directory: {first: 5000, second: 10_000}[directory])
    assert holder.choose_directory(904) == first
    assert holder.choose_directory(905) == second
    assert holder.choose_directory(1 << 40) == second


@pytest.mark.parametrize(("num_bytes", "label"), [(0, "x"), (-1, "x"), (1, ""), (1, "a/b"), (1, "a-b"), (1, "x" * 33)])
def test_a_pool_without_bytes_or_with_a_wrong_label_is_refused(num_bytes: int, label: str, tmp_path: Path) -> None:
    with pytest.raises(TransportError):
        create_pool(num_bytes, label=label, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_a_pool_of_the_size_its_address_says_attaches(make_pool: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make_pool(100)
    name = pool.path.name
    link = tmp_path / name.replace("-test-", "-link-")
    link.symlink_to(pool.path)
    other = tmp_path / "secret"
    other.write_bytes(b"x" * 4196)
    renamed = tmp_path / name.replace("-test-", "-fake-")
    renamed.write_bytes(b"x" * 4196)
    addresses = [
        PoolAddress(path=str(pool.path), num_bytes=101),
        PoolAddress(path=str(pool.path), num_bytes=-4096),
        PoolAddress(path=str(pool.path), num_bytes=100, channel=holder.CHANNELS),
        PoolAddress(path=str(pool.path), num_bytes=100, channel=-1),
        PoolAddress(path=str(link), num_bytes=100),
        PoolAddress(path=str(other), num_bytes=100),
        PoolAddress(path=str(renamed), num_bytes=100),
        PoolAddress(path=str(tmp_path / "x" / ".." / name), num_bytes=100),
        PoolAddress(path=name, num_bytes=100),
        PoolAddress(path=str(pool.path) + "0", num_bytes=100),
        PoolAddress(path=str(pool.path.with_name(name[:-1] + "g")), num_bytes=100),
    ]
    for address in addresses:
        with pytest.raises(TransportError):
            attach_pool(address)
    pool.unlink()
    pool.unlink()
    with pytest.raises(TransportError, match="cannot be opened"):
        attach_pool(pool.address())


def test_a_view_outlives_the_pool_object_and_the_file(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(100)
    view = pool.bytes_B[10:20]
    view.fill_(5)
    pool.close()
    pool.close()
    pool.unlink()
    del pool
    gc.collect()
    assert view.eq(5).all()


def test_the_sweep_removes_what_the_dead_left_and_nothing_else(make_pool: Callable[..., Pool], tmp_path: Path) -> None:
    alive = make_pool(10)

    def body() -> str:
        return str(create_pool(10, label="dead", directory=tmp_path).path)

    dead = Path(in_child(body))
    name = alive.path.name
    start = holder.start_time(os.getpid())
    reused = tmp_path / name.replace(f"-{start}-", f"-{(start or 0) + 1}-")
    elsewhere = tmp_path / dead.name.replace(f"-{holder.pid_namespace()}-", "-1-")
    unrelated = tmp_path / "longprefill-notes"
    for path in (reused, elsewhere, unrelated):
        path.touch()
    assert sorted(sweep_stale((tmp_path,))) == sorted((dead, reused))
    assert sorted(tmp_path.iterdir()) == sorted((alive.path, elsewhere, unrelated))
    assert sweep_stale((tmp_path,)) == []


def test_start_times_tell_processes_apart() -> None:
    assert holder.start_time(os.getpid()) == in_child(lambda: holder.start_time(os.getppid()))
    assert holder.start_time(in_child(os.getpid)) is None
