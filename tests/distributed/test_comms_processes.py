"""TorchGroup over real gloo between processes: the same as threads, and an error in time whatever happens to a peer."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from longprefill.comms.arguments import as_bytes
from longprefill.comms.group import Group, GroupError
from longprefill.comms.solo import SoloGroup
from longprefill.comms.thread_group import run_ranks
from longprefill.comms.torch_group import GroupSpec, TorchGroup, create_store

DEADLINE_S = 60.0
"""Nothing here may take as long: a test that gets there has hung."""
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
Join = Callable[..., TorchGroup]


@dataclass
class Rank:
    process: BaseProcess
    pipe: Connection

    def receive(self) -> Any:
        """What the rank sent next; its exception is raised here."""
        if not self.pipe.poll(DEADLINE_S):
            raise TimeoutError(f"process {self.process.pid} said nothing for {DEADLINE_S} s")
        value = self.pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value


@contextmanager
def processes(size: int, body: Callable[[int, Join, Connection], object], *, port: int | None = None) -> Iterator[Any]:
    """Forks `size` ranks that run `body(rank, join, pipe)` and send what it returns. All are gone afterwards."""
    store, host, own_port = create_store()
    context = multiprocessing.get_context("fork")

    def run(rank: int, pipe: Connection) -> None:
        def join(generation: int, rank: int, size: int, timeout_s: float = DEADLINE_S) -> TorchGroup:
            return TorchGroup(
                GroupSpec(
                    host=host,
                    port=own_port if port is None else port,
                    generation=generation,
                    rank=rank,
                    size=size,
                    device="cpu",
                    backend="gloo",
                    timeout_s=timeout_s,
                )
            )

        torch.set_num_threads(1)
        try:
            pipe.send(body(rank, join, pipe))
        except Exception as error:  # noqa: BLE001 - the test process raises it
            pipe.send(error)
        os._exit(0)  # nothing that belongs to the test process may be torn down here

    ranks = []
    for rank in range(size):
        here, there = context.Pipe()
        process = context.Process(target=run, args=(rank, there), daemon=True)
        process.start()
        there.close()
        ranks.append(Rank(process, here))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join(DEADLINE_S)
            rank.pipe.close()
        store.close()


def failure(call: Callable[[], object]) -> GroupError:
    """The error that the call must end in."""
    with pytest.raises(GroupError) as caught:
        call()
    return caught.value


def random_tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, sometimes as a view that is not contiguous."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    if len(shape) > 1 and rng.random() < 0.4:
        return torch.randint(0, 100, (*shape, 2), generator=generator).to(dtype)[..., 0]
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def random_calls(group: Group, seed: int, num_calls: int) -> tuple[list[bytes], dict[str, tuple[int, int]]]:
    """Random but agreed calls, some gathers left open over others: all result bytes, calls and bytes of the ledger."""
    shared, own = random.Random(seed), random.Random(1000 * seed + group.rank)
    results: list[torch.Tensor] = []
    open_gathers = []
    for call in range(num_calls):
        dtype = shared.choice(DTYPES)
        row = tuple(shared.choice((1, 1, 2, 5)) for _ in range(shared.randrange(3)))
        kind = shared.choice(("gather", "gather", "exchange", "broadcast", "barrier"))
        op = f"{kind}{shared.randrange(2)}"
        if kind == "gather":
            counts = [shared.choice((0, 0, 1, 3, 700)) for _ in range(group.size)]
            local_LX = random_tensor(own, (counts[group.rank], *row), dtype)
            open_gathers.append(group.start_all_gather_rows(local_LX, counts, op=op))
        elif kind == "exchange":
            pairs = [(a, b) for a in range(group.size) for b in range(group.size) if shared.random() < 0.5]
            shapes = {pair: (shared.choice((0, 1, 4, 300)), *row) for pair in pairs}
            sends = {b: random_tensor(own, shape, dtype) for (a, b), shape in shapes.items() if a == group.rank}
            receives = {a: shape for (a, b), shape in shapes.items() if b == group.rank}
            received = group.exchange(sends, receives, dtype=dtype, op=op)
            assert {peer: tuple(tensor.shape) for peer, tensor in received.items()} == receives
            results += [received[peer] for peer in sorted(received)]
        elif kind == "broadcast":
            results.append(
                group.broadcast(random_tensor(own, (3, *row), dtype).clone(), shared.randrange(group.size), op=op)
            )
        else:
            group.barrier(op=op)
        while open_gathers and (shared.random() < 0.5 or call == num_calls - 1):
            results.append(open_gathers.pop(shared.randrange(len(open_gathers))).wait())
    ledger = {op: (count.calls, count.bytes) for op, count in group.ledger.ops.items()}
    return [as_bytes(tensor.contiguous()).numpy().tobytes() for tensor in results], ledger


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_calls_give_what_threads_give_byte_for_byte_and_count_the_same_bytes(size: int) -> None:
    seeds = range(10 * size, 10 * size + 6)

    def body(rank: int, join: Join, pipe: Connection) -> object:
        found = []
        for generation, seed in enumerate(seeds):
            group = join(generation, rank, size)
            found.append(random_calls(group, seed, 25))
            group.close()
        return found

    with processes(size, body) as ranks:
        over_gloo = [rank.receive() for rank in ranks]
    for index, seed in enumerate(seeds):
        in_threads = run_ranks(size, lambda group, seed=seed: random_calls(group, seed, 25))
        assert [rank[index] for rank in over_gloo] == in_threads


def test_one_rank_over_gloo_is_the_solo_group() -> None:
    with processes(1, lambda rank, join, pipe: random_calls(join(1, 0, 1), 5, 40)) as ranks:
        assert ranks[0].receive() == random_calls(SoloGroup(), 5, 40)


def test_open_gathers_overlap_compute_and_each_other() -> None:
    rows = 40_000

    def body(rank: int, join: Join, pipe: Connection) -> object:
        group = join(1, rank, 2)
        locals_LX = [torch.full((rows, 64), float(2 * turn + rank)) for turn in range(3)]
        pending = [group.start_all_gather_rows(local, [rows, rows], op=f"turn{i}") for i, local in enumerate(locals_LX)]
        product = torch.eye(300) @ torch.full((300, 300), 2.0)
        group.barrier(op="between")
        good = bool((product == 2).all())
        for turn in (2, 0, 1):
            gathered_LX = pending[turn].wait()
            good &= bool((gathered_LX[:rows] == 2 * turn).all() and (gathered_LX[rows:] == 2 * turn + 1).all())
        return good

    with processes(2, body) as ranks:
        assert [rank.receive() for rank in ranks] == [True, True]


def test_a_killed_peer_is_an_error_before_the_deadline_and_the_survivors_form_a_smaller_group() -> None:
    def body(rank: int, join: Join, pipe: Connection) -> object:
        group = join(1, rank, 3)
        group.barrier(op="ready")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(GroupError) as caught:
            group.all_gather_rows(torch.ones(1 << 20), [1 << 20] * 3, op="kda_summaries")
        with pytest.raises(GroupError, match="the group failed before"):
            group.barrier(op="again")
        group.close()
        smaller = join(2, (0, None, 1)[rank] or 0, 2)
        gathered = smaller.all_gather_rows(torch.tensor([rank]), [1, 1], op="after").tolist()
        smaller.close()
        return str(caught.value), gathered

    with processes(3, body) as ranks:
        messages = {rank: ranks[rank].receive() for rank in (0, 2)}
    for rank, (message, gathered) in messages.items():
        assert message.startswith(f"rank {rank} of 3: op 'kda_summaries' (call 1, generation 1): ")
        assert "Timed out" not in message
        assert gathered == [0, 2]


@pytest.mark.parametrize("counts", [[1, 1], [1, 0], [0, 1]], ids=["both ways", "sending", "receiving"])
def test_a_peer_killed_in_the_middle_of_a_transfer_is_an_error_before_the_deadline(counts: list[int]) -> None:
    rows = [count << 28 for count in counts]

    def body(rank: int, join: Join, pipe: Connection) -> object:
        group = join(1, rank, 2, 10 * DEADLINE_S)
        pending = group.start_all_gather_rows(torch.zeros(rows[rank], dtype=torch.uint8), rows, op="cut")
        pipe.send("started")
        error = failure(lambda: (pending.wait(), group.barrier(op="cut") if rank == 0 else pipe.recv()))
        return str(error)

    with processes(2, body) as ranks:
        assert [rank.receive() for rank in ranks] == ["started", "started"]
        ranks[1].process.kill()
        message = ranks[0].receive()
    assert message.startswith("rank 0 of 2: op 'cut'")
    assert "Timed out" not in message


def test_a_replaced_member_joins_the_next_generation_with_the_survivors() -> None:
    def body(rank: int, join: Join, pipe: Connection) -> object:
        if rank < 2:
            first = join(1, rank, 2)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(GroupError):
                first.barrier(op="lost")
        second = join(2, 0 if rank == 0 else 1, 2)
        return second.all_gather_rows(torch.tensor([rank]), [1, 1], op="after").tolist()

    with processes(3, body) as ranks:
        assert [ranks[rank].receive() for rank in (0, 2)] == [[0, 2], [0, 2]]


@pytest.mark.parametrize("call", ["gather", "exchange", "broadcast", "barrier"])
def test_a_stopped_peer_is_an_error_at_the_deadline(call: str) -> None:
    def body(rank: int, join: Join, pipe: Connection) -> object:
        group = join(1, rank, 2, timeout_s=1.5)
        group.barrier(op="ready")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        big = torch.zeros(1 << 22)
        calls = {
            "gather": lambda: group.all_gather_rows(big, [1 << 22] * 2, op=call),
            "exchange": lambda: group.exchange({1: big}, {}, dtype=torch.float32, op=call),
            "broadcast": lambda: group.broadcast(big, 1, op=call),
            "barrier": lambda: group.barrier(op=call),
        }
        began = time.monotonic()
        return str(failure(calls[call])), time.monotonic() - began >= 1.4

    with processes(2, body) as ranks:
        message, waited = ranks[0].receive()
    assert f"rank 0 of 2: op '{call}'" in message
    assert "rank 1: Timed out" in message
    assert waited


def test_ranks_that_disagree_end_at_the_deadline_and_never_take_one_message_for_another() -> None:
    def body(rank: int, join: Join, pipe: Connection) -> object:
        errors = []
        for generation, names in enumerate((("left", "right"), ("same", "same"))):
            group = join(generation, rank, 2, timeout_s=1.0)
            rows = 1 if generation == 0 else 1 + rank  # the second pair disagrees about the counts
            with pytest.raises(GroupError) as caught:
                group.all_gather_rows(torch.zeros(rows), [rows, rows], op=names[rank])
            errors.append(str(caught.value))
        return errors

    with processes(2, body) as ranks:
        for rank in ranks:
            assert len(rank.receive()) == 2


def test_a_peer_that_closes_its_group_is_an_error_at_once_for_those_inside_a_call() -> None:
    def body(rank: int, join: Join, pipe: Connection) -> object:
        group = join(1, rank, 2)
        if rank == 1:
            group.start_all_gather_rows(torch.zeros(1 << 20), [1 << 20] * 2, op="never waited for")
            group.close()
            group.close()
            with pytest.raises(GroupError, match="the group is closed"):
                group.barrier(op="closed")
            return "closed"

        def gather_and_meet() -> None:
            group.all_gather_rows(torch.zeros(1 << 20), [1 << 20] * 2, op="never waited for")
            group.barrier(op="left alone")

        return str(failure(gather_and_meet))

    with processes(2, body) as ranks:
        assert "Timed out" not in ranks[0].receive()
        assert ranks[1].receive() == "closed"


def test_two_groups_in_one_process_are_independent() -> None:
    def body(rank: int, join: Join, pipe: Connection) -> object:
        one, other = join(1, rank, 2), join(2, 1 - rank, 2)
        first = one.start_all_gather_rows(torch.tensor([rank]), [1, 1], op="one")
        second = other.start_all_gather_rows(torch.tensor([10 + rank]), [1, 1], op="other")
        found = [second.wait().tolist(), first.wait().tolist()]
        one.close()
        found.append(other.all_gather_rows(torch.tensor([20 + rank]), [1, 1], op="other").tolist())
        return found, {op: count.calls for op, count in other.ledger.ops.items()}

    with processes(2, body) as ranks:
        for rank in ranks:
            assert rank.receive() == ([[11, 10], [0, 1], [21, 20]], {"other": 2})


def test_a_result_is_given_once_and_a_dropped_one_does_no_harm() -> None:
    def body(rank: int, join: Join, pipe: Connection) -> object:
        group = join(1, rank, 2)
        group.start_all_gather_rows(torch.full((1 << 18,), float(rank)), [1 << 18] * 2, op="dropped")
        pending = group.start_all_gather_rows(torch.tensor([rank]), [1, 1], op="kept")
        value = pending.wait().tolist()
        with pytest.raises(RuntimeError, match="already taken"):
            pending.wait()
        group.barrier(op="end")
        return value

    with processes(2, body) as ranks:
        assert [rank.receive() for rank in ranks] == [[0, 1], [0, 1]]


def test_a_group_that_does_not_come_together_is_an_error_at_the_deadline() -> None:
    def body(rank: int, join: Join, pipe: Connection) -> object:
        with pytest.raises(GroupError) as caught:
            join(7, 0, 2, timeout_s=1.0)
        return str(caught.value)

    with processes(1, body) as ranks:
        assert "rank 0 of 2: generation 7 did not form" in ranks[0].receive()


def test_no_store_is_an_error_at_the_deadline() -> None:
    def body(rank: int, join: Join, pipe: Connection) -> object:
        with pytest.raises(GroupError) as caught:
            join(1, 0, 1, timeout_s=1.0)
        return str(caught.value)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        unused = taken.getsockname()[1]
    with processes(1, body, port=unused) as ranks:
        assert f"127.0.0.1:{unused}" in ranks[0].receive()


def test_the_store_listens_on_the_given_address_only() -> None:
    store, host, port = create_store()
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    listening = [fields[1] for fields in map(str.split, lines) if fields[3] == "0A"]
    addresses = [address for address in listening if int(address.split(":")[1], 16) == port]
    store.close()
    assert host == "127.0.0.1"
    assert addresses == [f"0100007F:{port:04X}"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", 2), ("rank", -1), ("size", 0), ("generation", -1), ("timeout_s", 0.0), ("backend", "mpi")],
)
def test_a_wrong_spec_is_refused_where_it_is_made(field: str, value: object) -> None:
    fields = {
        "host": "127.0.0.1",
        "port": 1,
        "generation": 0,
        "rank": 0,
        "size": 2,
        "device": "cpu",
        "backend": "gloo",
        "timeout_s": 1.0,
    }
    spec = GroupSpec(**fields)  # pyright: ignore[reportArgumentType]
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(ValueError, match=field if field != "size" else "rank"):
        GroupSpec(**(fields | {field: value}))  # pyright: ignore[reportArgumentType]


def test_nothing_stays_behind() -> None:
    with processes(1, lambda rank, join, pipe: rank) as ranks:
        assert ranks[0].receive() == 0
        process = ranks[0].process
        assert wait([process.sentinel], DEADLINE_S)
    assert not process.is_alive()
