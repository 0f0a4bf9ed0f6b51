"""Control messages: what goes in comes out, and nothing that is wrong in any way gets in."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longprefill.comms.checksum import checksum_bytes, checksum_tensor
from longprefill.comms.fields import MessageError
from longprefill.comms.manifest import (
    LayerCounts,
    LogitsEntry,
    Manifest,
    PageEntry,
    StateEntry,
    check_complete,
)
from longprefill.comms.messages import NACK_CODES, Ack, Commit, Message, Nack, decode, encode

KINDS = {0: "kda", 1: "dsa", 2: "kda", 3: "mla", 4: "dsa"}
"""The layers of the model in these tests."""
COUNTS = LayerCounts(kda=2, mla=1, dsa=2)
CHECKSUM = (1 << 64) - 1


def packed(value: object) -> bytes:
    return msgpack.packb(value)  # pyright: ignore[reportReturnType]


def page(layer: int, kind: str, index: int) -> PageEntry:
    return PageEntry(layer=layer, kind=kind, index=index, owner=index % 3, num_bytes=4096, checksum=CHECKSUM - index)


def pages(first: int, last: int) -> tuple[PageEntry, ...]:
    """All layers' pages [first, last)."""
    latent = [page(n, "latent", i) for n, kind in KINDS.items() if kind != "kda" for i in range(first, last)]
    return (
        *latent,
        *(page(n, "index_key", i) for n, kind in KINDS.items() if kind == "dsa" for i in range(first, last)),
    )


def state(layer: int, kind: str, part: int = 0, num_parts: int = 1) -> StateEntry:
    shape = (2, 4, 3) if kind == "kda_state" else (3, 10)
    num_bytes = 4 * 2 * 4 * 3 if kind == "kda_state" else 2 * 3 * 10
    dtype = "float32" if kind == "kda_state" else "bfloat16"
    return StateEntry(
        layer=layer,
        kind=kind,
        shape=shape,
        dtype=dtype,
        num_bytes=num_bytes,
        checksum=7,
        part=part,
        num_parts=num_parts,
    )


def states(num_parts: int = 1) -> tuple[StateEntry, ...]:
    kinds = ("kda_state", "conv_tail")
    layers = [n for n, kind in KINDS.items() if kind == "kda"]
    return tuple(state(n, kind, part, num_parts) for n in layers for kind in kinds for part in range(num_parts))


LOGITS = LogitsEntry(vocab_size=100, num_bytes=400, checksum=3)


def manifest(**changes: Any) -> Manifest:
    """A whole job of 130 tokens in one manifest, unless changed."""
    fields: dict[str, Any] = {
        "transfer_id": "transfer-1",
        "attempt": 0,
        "job": "job-7",
        "model_fingerprint": "sha256:0123abcd",
        "latent_format": "fp8",
        "index_format": "mxfp8",
        "layers": COUNTS,
        "position": 130,
        "pages": pages(0, 3),
        "states": states(),
        "logits": LOGITS,
    }
    return Manifest(**(fields | changes))


COMMIT = Commit(
    transfer_id="t",
    attempt=1,
    job="j",
    position=130,
    num_manifests=1,
    num_pages=15,
    num_states=4,
    num_bytes=9,
    checksum=5,
)
NACK = Nack(transfer_id="t", attempt=1, job="j", code="checksum", reason="page 3 of layer 1 — damaged", may_retry=True)
MESSAGES: list[Message] = [
    manifest(),
    manifest(pages=(), states=(), logits=None),
    manifest(index_format=None, layers=LayerCounts(kda=2, mla=3, dsa=0)),
    COMMIT,
    Ack(transfer_id="t", attempt=1, job="j", position=130, num_bytes=1 << 40),
    NACK,
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", fullmatch=True)
acks = st.builds(
    Ack,
    transfer_id=names,
    attempt=st.integers(0, 1 << 31),
    job=names,
    position=st.integers(1, 1 << 40),
    num_bytes=st.integers(0, 1 << 48),
)
nacks = st.builds(
    Nack,
    transfer_id=names,
    attempt=st.integers(0, 1 << 31),
    job=names,
    code=st.sampled_from(NACK_CODES),
    reason=st.text(max_size=4096),
    may_retry=st.booleans(),
)
page_entries = st.builds(
    PageEntry,
    layer=st.integers(0, 65535),
    kind=st.sampled_from(("latent", "index_key")),
    index=st.integers(0, 1 << 40),
    owner=st.integers(0, (1 << 20) - 1),
    num_bytes=st.integers(1, 1 << 48),
    checksum=st.integers(0, CHECKSUM),
)
manifests = st.builds(
    lambda entries, position: manifest(pages=tuple(entries), position=position),
    st.lists(page_entries, max_size=8, unique_by=lambda entry: (entry.layer, entry.kind, entry.index)),
    st.integers(1, 1 << 40),
)


@given(st.one_of(acks, nacks, manifests))
def test_any_legal_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=400))
def test_garbage_is_refused_in_our_own_words(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), CHECKSUM)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=12,
)


@given(values, st.sampled_from(["manifest", "commit", "ack", "nack"]))
def test_any_other_msgpack_value_is_refused_in_our_own_words(value: object, kind: str) -> None:
    for data in (value, {"version": 1, "kind": kind, "body": value}):
        with pytest.raises(MessageError):
            decode(packed(data))


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_one_field_of_another_value_is_refused_or_still_legal(
    message: Message, data: st.DataObject
) -> None:
    raw = msgpack.unpackb(encode(message))
    name = data.draw(st.sampled_from(sorted(raw["body"])))
    raw["body"][name] = data.draw(values)
    try:
        changed = decode(packed(raw))
    except MessageError:
        return
    assert decode(encode(changed)) == changed


@given(st.sampled_from(MESSAGES), st.data())
def test_a_cut_or_damaged_message_is_refused_or_still_legal(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(MessageError):
        decode(whole[:cut])
    with pytest.raises(MessageError):
        decode(whole + whole[:1])
    damaged = bytearray(whole)
    damaged[cut] ^= data.draw(st.integers(1, 255))
    try:
        changed = decode(bytes(damaged))
    except MessageError:
        return
    assert changed != message


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    raw = msgpack.unpackb(encode(COMMIT))
    change(raw)
    return packed(raw)


ENVELOPES: dict[str, tuple[bytes, str]] = {
    "next version": (edited(lambda raw: raw.update(version=2)), "version=2: this side speaks version 1"),
    "version that is a bool": (edited(lambda raw: raw.update(version=True)), "version=True"),
    "unknown kind": (edited(lambda raw: raw.update(kind="pickle")), "kind='pickle': known are"),
    "unknown envelope field": (edited(lambda raw: raw.update(extra=1)), "unknown fields"),
    "unknown field": (edited(lambda raw: raw["body"].update(extra=1)), "unknown fields"),
    "missing field": (edited(lambda raw: raw["body"].pop("checksum")), "missing fields"),
    "bool for an int": (edited(lambda raw: raw["body"].update(attempt=True)), "attempt=True: needs an int"),
    "float for an int": (edited(lambda raw: raw["body"].update(attempt=1.0)), "attempt=1.0"),
    "id with a newline": (edited(lambda raw: raw["body"].update(job="a\nb")), "job='a"),
    "id with a newline at its end": (edited(lambda raw: raw["body"].update(job="a\n")), "job='a"),
    "endless id": (edited(lambda raw: raw["body"].update(job="a" * 129)), "job='aaa"),
    "repeated field": (b"\x83" + packed("version") + b"\x01" + encode(COMMIT)[1:], "repeated"),
    "extension type": (packed(msgpack.ExtType(4, b"x")), "extension type 4"),
    "time stamp": (packed(msgpack.Timestamp(1)), "no msgpack|needs a map|extension"),
    "deep nesting": (b"\x91" * 100_000 + b"\x01", "no msgpack value"),
    "array that says it is huge": (b"\xdd\xff\xff\xff\xff", "no msgpack value"),
}


@pytest.mark.parametrize("name", ENVELOPES)
def test_a_wrong_envelope_or_field_is_named(name: str) -> None:
    data, expected = ENVELOPES[name]
    with pytest.raises(MessageError, match=expected):
        decode(data)


def test_nothing_is_unpickled() -> None:
    with pytest.raises(MessageError):
        decode(pickle.dumps(COMMIT))
    with pytest.raises(MessageError, match="is no message"):
        encode(page(0, "latent", 0))  # pyright: ignore[reportArgumentType]


def test_the_size_limit_holds_both_ways() -> None:
    data = encode(manifest())
    assert decode(data, limit_bytes=len(data)) == manifest()
    with pytest.raises(MessageError, match=f"{len(data)} bytes: at most {len(data) - 1}"):
        encode(manifest(), limit_bytes=len(data) - 1)
    with pytest.raises(MessageError, match=f"{len(data)} bytes: at most {len(data) - 1}"):
        decode(data, limit_bytes=len(data) - 1)


WRONG_ENTRIES: dict[str, tuple[Callable[[], object], str]] = {
    "page kind": (lambda: page(0, "scores", 0), "page.kind='scores'"),
    "page layer": (lambda: page(-1, "latent", 0), "page.layer=-1"),
    "state size": (lambda: dataclasses.replace(state(0, "kda_state"), num_bytes=95), "state.num_bytes=95"),
    "state dtype": (lambda: dataclasses.replace(state(0, "kda_state"), dtype="object"), "state.dtype='object'"),
    "state part": (lambda: dataclasses.replace(state(0, "kda_state"), part=1), "state.part=1"),
    "state without dims": (lambda: dataclasses.replace(state(0, "kda_state"), shape=()), "state.shape"),
    "state of yottabytes": (lambda: dataclasses.replace(state(0, "conv_tail"), shape=(1 << 40, 1 << 40)), "by shape"),
    "logits size": (lambda: dataclasses.replace(LOGITS, num_bytes=200), "logits.num_bytes=200"),
    "no layers": (lambda: LayerCounts(kda=0, mla=0, dsa=0), "layers in all=0"),
    "page twice": (lambda: manifest(pages=pages(0, 3) + pages(2, 3)), "is listed twice"),
    "state twice": (lambda: manifest(states=states() * 2), "is listed twice"),
    "index format without DSA": (lambda: manifest(layers=LayerCounts(kda=2, mla=3, dsa=0)), "one needs the other"),
    "DSA without index format": (lambda: manifest(index_format=None), "one needs the other"),
    "position 0": (lambda: manifest(position=0), "position=0"),
    "nack code": (lambda: dataclasses.replace(NACK, code="bad"), "code='bad'"),
    "text that UTF-8 cannot hold": (lambda: dataclasses.replace(NACK, reason="\ud800"), "reason="),
    "endless text": (lambda: dataclasses.replace(NACK, reason="a" * 4097), "reason="),
    "pages in a list": (lambda: manifest(pages=list(pages(0, 3))), "needs a tuple of PageEntry"),
}


@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_a_wrong_entry_cannot_be_built(name: str) -> None:
    build, expected = WRONG_ENTRIES[name]
    with pytest.raises(MessageError, match=expected):
        build()


def three_parts() -> list[Manifest]:
    """The job of 130 tokens in steps of 64."""
    middle = {"states": (), "logits": None}
    return [
        manifest(part=0, position=64, pages=pages(0, 1), **middle),
        manifest(part=1, position=128, pages=pages(1, 2), **middle),
        manifest(part=2, position=130, pages=pages(2, 3)),
    ]


def without(entries: tuple[Any, ...], **fields: object) -> tuple[Any, ...]:
    return tuple(e for e in entries if any(getattr(e, name) != value for name, value in fields.items()))


def test_a_complete_transfer_passes_in_one_part_or_many() -> None:
    check_complete([manifest()], page_tokens=64)
    check_complete(three_parts(), page_tokens=64)
    check_complete([manifest(states=states(num_parts=4))], page_tokens=64)
    # with pooled keys the ragged last page may hold no complete pool
    no_last = tuple(e for e in pages(0, 3) if (e.kind, e.index) != ("index_key", 2))
    tails = tuple(
        StateEntry(layer=n, kind=kind, shape=(2, 4), dtype="float32", num_bytes=32, checksum=1)
        for n in (1, 4)
        for kind in ("pool_key", "pool_gate")
    )
    check_complete([manifest(pages=no_last, states=states() + tails)], page_tokens=64)


def lacking(**fields: object) -> list[Manifest]:
    """The whole job without the pages that have these fields."""
    return [manifest(pages=without(pages(0, 3), **fields))]


POOL_KEY = StateEntry(layer=1, kind="pool_key", shape=(1,), dtype="float32", num_bytes=4, checksum=1)


def swapped(parts: list[Manifest], **changes: Any) -> list[Manifest]:
    return [dataclasses.replace(parts[0], **changes), *parts[1:]]


INCOMPLETE: dict[str, tuple[Callable[[], list[Manifest]], str]] = {
    "nothing": (list, "without a manifest"),
    "no logits": (lambda: [manifest(logits=None)], "no logits of token 129"),
    "a latent page": (lambda: lacking(layer=3, index=1), r"latent pages of layer 3: 2 of 3, lacks \[1\]"),
    "an index page": (lambda: lacking(layer=4, kind="index_key", index=0), "index_key pages of layer 4"),
    "one layer's last index page": (lambda: lacking(layer=4, kind="index_key", index=2), "index_key pages of layer 4"),
    "a layer's pages": (lambda: lacking(layer=1, kind="latent"), "latent pages of 2 layers, the model has 3"),
    "all index pages": (lambda: lacking(kind="index_key"), "index_key pages of 0 layers"),
    "a page too many": (lambda: [manifest(pages=pages(0, 4))], r"surplus \[3\]"),
    "the KDA states": (lambda: [manifest(states=())], "kda_state of 0 layers, the model has 2"),
    "one conv tail": (lambda: [manifest(states=without(states(), layer=2, kind="conv_tail"))], "conv_tail of 1 layers"),
    "a TP shard": (
        lambda: [manifest(states=without(states(4), layer=0, kind="kda_state", part=2))],
        "kda_state of layer 0: 3 parts of 4",
    ),
    "one pool tail": (
        lambda: [manifest(states=(*states(), POOL_KEY))],
        "pool keys and gates",
    ),
    "a part": (lambda: [three_parts()[0], three_parts()[2]], "manifest 2 in place 1"),
    "a part twice": (lambda: [three_parts()[0], *three_parts()], "manifest 0 in place 1"),
    "a page in two parts": (lambda: swapped(three_parts(), pages=pages(0, 2)), "is listed twice"),
    "another attempt": (lambda: swapped(three_parts(), attempt=1), "attempt is 1 in part 0, 0 in the last"),
    "another format": (
        lambda: swapped(three_parts(), latent_format="bf16"),
        "latent_format is bf16 in part 0, fp8 in the last",
    ),
    "states too early": (lambda: swapped(three_parts(), states=states()), "reads like the last"),
    "positions backwards": (lambda: swapped(three_parts(), position=130), "reads like the last"),
}


@pytest.mark.parametrize("name", INCOMPLETE)
def test_a_transfer_that_lacks_or_repeats_anything_is_refused(name: str) -> None:
    build, expected = INCOMPLETE[name]
    with pytest.raises(MessageError, match=expected):
        check_complete(build(), page_tokens=64)


def test_the_payload_of_a_manifest_is_counted() -> None:
    assert manifest().num_bytes == 15 * 4096 + 2 * (96 + 60) + 400


@given(st.binary(max_size=64))
def test_a_tensor_and_its_bytes_have_one_checksum(data: bytes) -> None:
    tensor = torch.tensor(list(data), dtype=torch.uint8)
    assert checksum_tensor(tensor) == checksum_bytes(data)
    if data:
        damaged = tensor.clone()
        damaged[len(data) // 2] ^= 1
        assert checksum_tensor(damaged) != checksum_tensor(tensor)


def test_a_checksum_is_of_the_elements_not_of_the_strides() -> None:
    values = torch.arange(24, dtype=torch.float32).reshape(4, 6).to(torch.bfloat16)
    assert checksum_tensor(values[:, ::2]) == checksum_tensor(values[:, ::2].clone())
    assert checksum_tensor(values.T) == checksum_tensor(values.T.contiguous()) != checksum_tensor(values)
    assert checksum_tensor(values[:1, :1]) == checksum_tensor(values[:1, :1].clone())
    assert checksum_bytes(b"") == 0x2D06800538D394C2  # the published value of XXH3_64 of nothing, seed 0
