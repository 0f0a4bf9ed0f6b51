"""ThreadGroup and SoloGroup: what the engine relies on, and an error for every misuse that a real group hangs on."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longprefill.comms.group import Group, GroupError, Ledger
from longprefill.comms.solo import SoloGroup
from longprefill.comms.thread_group import ThreadGroup, poisoned, run_ranks

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.bool)


def group_error(size: int, fn: Callable[[ThreadGroup], object], timeout_s: float = 20.0) -> str:
    with pytest.raises(GroupError) as caught:
        run_ranks(size, fn, timeout_s)
    return str(caught.value)


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    row=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from(DTYPES),
)
def test_gather_is_the_concatenation_in_rank_order(counts: list[int], row: list[int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    parts = [torch.randint(0, 2, (count, *row), generator=generator).to(dtype) for count in counts]

    def fn(group: ThreadGroup) -> tuple[torch.Tensor, Ledger]:
        return group.all_gather_rows(parts[group.rank], counts, op="rows"), group.ledger

    for rank, (gathered_LX, ledger) in enumerate(run_ranks(len(counts), fn)):
        assert torch.equal(gathered_LX, torch.cat(parts))
        assert ledger.ops["rows"].calls == 1
        assert ledger.ops["rows"].bytes == parts[rank].nbytes * (len(counts) - 1)


@given(data=st.data(), size=st.integers(1, 4))
def test_exchange_delivers_each_message_to_its_receiver(data: st.DataObject, size: int) -> None:
    pairs = [(a, b) for a in range(size) for b in range(size)]
    shapes = data.draw(st.dictionaries(st.sampled_from(pairs), st.tuples(st.integers(0, 3), st.integers(1, 3))))

    def message(a: int, b: int) -> torch.Tensor:
        return torch.full(shapes[a, b], 10 * a + b)

    def fn(group: ThreadGroup) -> tuple[dict[int, torch.Tensor], int]:
        sends = {b: message(a, b) for a, b in shapes if a == group.rank}
        wanted = {a: shapes[a, b] for a, b in shapes if b == group.rank}
        return group.exchange(sends, wanted, dtype=torch.int64, op="x"), group.ledger.ops["x"].bytes

    for rank, (received, sent_bytes) in enumerate(run_ranks(size, fn)):
        assert received.keys() == {a for a, b in shapes if b == rank}
        assert all(torch.equal(tensor, message(a, rank)) for a, tensor in received.items())
        assert sent_bytes == sum(message(a, b).nbytes for a, b in shapes if a == rank and b != rank)


def test_results_are_copies_that_no_other_rank_can_change() -> None:
    gate = threading.Barrier(2)

    def fn(group: ThreadGroup) -> list[float]:
        local_L = torch.tensor([float(group.rank)])
        pending = group.start_all_gather_rows(local_L, [1, 1], op="gather")
        if group.rank == 0:
            first = pending.wait()
            local_L.fill_(99)
            first.fill_(98)
            gate.wait(20)
            sent = {1: local_L}
        else:
            gate.wait(20)  # rank 0 has changed its input and its result by now
            first, sent = pending.wait(), {}
        received = group.exchange(sent, {0: (1,)} if group.rank == 1 else {}, dtype=torch.float32, op="send")
        buffer = torch.tensor([float(group.rank)])
        group.broadcast(buffer, 1, op="broadcast")
        return [*first.tolist(), *(tensor.item() for tensor in received.values()), buffer.item()]

    assert run_ranks(2, fn) == [[98.0, 98.0, 1.0], [0.0, 1.0, 99.0, 1.0]]


def test_broadcast_fills_a_buffer_that_is_not_contiguous() -> None:
    def fn(group: ThreadGroup) -> torch.Tensor:
        buffer = torch.full((3, 4), float(group.rank))
        assert group.broadcast(buffer[:, ::2], 2, op="b").shape == (3, 2)
        return buffer

    for rank, buffer in enumerate(run_ranks(3, fn)):
        assert buffer[:, ::2].eq(2).all()
        assert buffer[:, 1::2].eq(rank).all()


def exchange(group: Group, sends: dict[int, torch.Tensor], receive_shapes: dict[int, tuple[int, ...]]) -> object:
    return group.exchange(sends, receive_shapes, dtype=torch.float32, op="x")


MISUSES: dict[str, tuple[Callable[[Group], Any], str]] = {
    "op names": (lambda g: g.barrier(op="left" if g.rank == 0 else "right"), "'left'.*'right'|'right'.*'left'"),
    "kinds": (
        lambda g: g.barrier(op="same") if g.rank == 0 else g.broadcast(torch.zeros(1), 0, op="same"),
        "barrier 'same'.*broadcast 'same'|broadcast 'same'.*barrier 'same'",
    ),
    "counts": (
        lambda g: g.all_gather_rows(torch.zeros(1 + g.rank), [1, 1] if g.rank == 0 else [2, 2], op="gather"),
        r"counts \(\d, \d\) on rank \d but \(\d, \d\) on rank \d",
    ),
    "row shapes": (lambda g: g.all_gather_rows(torch.zeros(1, 2 + g.rank), [1, 1], op="gather"), r"row shape \(\d,\)"),
    "dtypes": (
        lambda g: g.all_gather_rows(torch.zeros(1, dtype=DTYPES[1 + g.rank]), [1, 1], op="gather"),
        "dtype torch",
    ),
    "roots": (lambda g: g.broadcast(torch.zeros(1), g.rank, op="broadcast"), "root . on rank . but . on rank"),
    "broadcast shapes": (lambda g: g.broadcast(torch.zeros(1 + g.rank), 0, op="broadcast"), r"shape \(\d,\) on rank"),
    "message shapes": (
        lambda g: exchange(g, {1: torch.zeros(2)} if g.rank == 0 else {}, {0: (3,)} if g.rank == 1 else {}),
        r"rank 0 sends shape \(2,\) to rank 1, which expects shape \(3,\)",
    ),
    "message nobody expects": (
        lambda g: exchange(g, {1: torch.zeros(2)} if g.rank == 0 else {}, {}),
        r"rank 0 sends shape \(2,\) to rank 1, which expects shape None",
    ),
    "message nobody sends": (
        lambda g: exchange(g, {}, {1: (2,)} if g.rank == 0 else {}),
        r"rank 1 sends shape None to rank 0, which expects shape \(2,\)",
    ),
    "one call fewer": (lambda g: g.barrier(op="b") if g.rank == 0 else None, "rank 1 will not enter call 0: it ended"),
    "result left": (
        lambda g: g.start_all_gather_rows(torch.zeros(1), [1, 1], op="forgotten") and None,
        "'forgotten'.*nobody waited",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_that_names_both_sides(name: str) -> None:
    fn, expected = MISUSES[name]
    with pytest.raises(GroupError, match=expected):
        run_ranks(2, fn, 20.0)


def test_an_input_changed_before_its_wait_is_an_error() -> None:
    def fn(group: ThreadGroup) -> None:
        local_L = torch.zeros(4)
        pending = group.start_all_gather_rows(local_L, [4, 4], op="gather")
        local_L[2] = 1
        pending.wait()

    assert "changed the input of op 'gather'" in group_error(2, fn)


def test_different_numbers_of_calls_are_an_error_even_when_nobody_waits() -> None:
    def fn(group: ThreadGroup) -> None:
        if group.rank == 0:
            group.exchange({}, {}, dtype=torch.uint8, op="alone")

    assert "different numbers of calls: [1, 0]" in group_error(2, fn)


def test_one_rank_s_own_error_reaches_the_caller_and_ends_the_others() -> None:
    seen = []

    def fn(group: ThreadGroup) -> None:
        if group.rank == 1:
            raise KeyError("broken kernel")
        try:
            group.barrier(op="meet")
        except GroupError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="broken kernel") as caught:
        run_ranks(3, fn, 20.0)
    assert caught.value.__notes__ == ["on rank 1 of 3"]
    assert len(seen) == 2
    assert all("op 'meet'" in message and "KeyError" in message for message in seen)


def test_a_rank_that_never_comes_is_an_error_at_the_deadline() -> None:
    release = threading.Event()

    def fn(group: ThreadGroup) -> None:
        if group.rank == 1:
            release.wait(20)
            return
        try:
            group.barrier(op="meet")
        finally:
            release.set()

    assert "ranks [1] did not enter call 0 within 0.05 s" in group_error(2, fn, timeout_s=0.05)


def test_a_closed_group_ends_its_peers_and_takes_no_more_calls() -> None:
    def fn(group: ThreadGroup) -> str:
        if group.rank == 0:
            group.close()
            group.close()
        with pytest.raises(GroupError) as caught:
            group.barrier(op="after")
        return str(caught.value)

    first, second = run_ranks(2, fn, 20.0)
    assert "this rank's group is over: it closed its group" in first
    assert "rank 0 will not enter call 0: it closed its group" in second


def test_gathers_may_be_waited_for_in_any_order_and_only_once() -> None:
    def fn(group: ThreadGroup) -> list[list[int]]:
        pending = [
            group.start_all_gather_rows(torch.tensor([10 * i + group.rank]), [1, 1], op=f"g{i}") for i in range(3)
        ]
        order = (2, 0, 1) if group.rank == 0 else (0, 1, 2)
        found = {i: pending[i].wait().tolist() for i in order}
        with pytest.raises(RuntimeError, match="already taken"):
            pending[0].wait()
        return [found[i] for i in range(3)]

    assert run_ranks(2, fn) == [[[0, 1], [10, 11], [20, 21]]] * 2


WRONG_ARGUMENTS: dict[str, Callable[[Group], Any]] = {
    "counts of another size": lambda g: g.all_gather_rows(torch.zeros(1), [1] * (g.size + 1), op="o"),
    "negative count": lambda g: g.all_gather_rows(torch.zeros(1), [1] * (g.size - 1) + [-1], op="o"),
    "rows that are not the count": lambda g: g.all_gather_rows(torch.zeros(2), [1] * g.size, op="o"),
    "scalar": lambda g: g.all_gather_rows(torch.tensor(1.0), [1] * g.size, op="o"),
    "peer outside": lambda g: g.exchange({g.size: torch.zeros(1)}, {}, dtype=torch.float32, op="o"),
    "another dtype": lambda g: g.exchange({0: torch.zeros(1)}, {0: (1,)}, dtype=torch.int64, op="o"),
    "own message not received": lambda g: g.exchange({g.rank: torch.zeros(1)}, {}, dtype=torch.float32, op="o"),
    "root outside": lambda g: g.broadcast(torch.zeros(1), g.size, op="o"),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused_before_anything_moves(name: str, size: int) -> None:
    def fn(group: Group) -> bool:
        with pytest.raises(ValueError, match="op 'o'"):
            WRONG_ARGUMENTS[name](group)
        return "o" not in group.ledger.ops

    assert all(run_ranks(size, fn))
    assert fn(SoloGroup())


def test_the_solo_group_copies_counts_and_closes() -> None:
    group = SoloGroup()
    local_LX = torch.arange(6.0).reshape(2, 3)
    pending = group.start_all_gather_rows(local_LX[:, ::2], [2], op="gather")
    gathered_LX = pending.wait()
    gathered_LX.fill_(-1)
    received = group.exchange({0: local_LX}, {0: (2, 3)}, dtype=torch.float32, op="exchange")[0]
    received.fill_(-1)
    assert local_LX.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert group.broadcast(local_LX, 0, op="broadcast") is local_LX
    group.barrier(op="barrier")
    with pytest.raises(RuntimeError, match="already taken"):
        pending.wait()
    counted = {op: (count.calls, count.bytes) for op, count in group.ledger.ops.items()}
    assert counted == dict.fromkeys(("gather", "exchange", "broadcast", "barrier"), (1, 0))
    late = group.start_all_gather_rows(local_LX, [2], op="late")
    group.close()
    with pytest.raises(GroupError, match="closed"):
        late.wait()
    with pytest.raises(GroupError, match="closed"):
        group.barrier(op="barrier")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_poison_reads_as_nan(dtype: torch.dtype) -> None:
    assert poisoned((3, 2), dtype, torch.device("cpu")).float().isnan().all()


def test_group_errors_pickle() -> None:
    error = GroupError("rank 1 of 4: op 'kda_summaries': connection closed")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
