"""What a hand-off says of the bytes it moves: every page and state, by layer, with owner, size and checksum.

One `Manifest` goes out as each step finishes and lists the pages of that step; the one of the last step also has the
boundary state and the logits. `check_complete` is what the decode side asks before it acknowledges: together the
manifests of a transfer must hold every page, state and the logits exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .fields import (
    MAX_BYTES,
    MAX_CHECKSUM,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_TOKENS,
    MessageError,
    check_choice,
    check_int,
    check_name,
    check_tuple,
)

PAGE_KINDS = ("latent", "index_key")
STATE_KINDS = ("kda_state", "conv_tail", "pool_key", "pool_gate")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
MAX_DIMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """How many layers of each kind the model has: a side that forgets a kind is found out before it decodes."""

    kda: int
    mla: int
    """Dense MLA: latent pages, no index keys."""
    dsa: int
    """Latent and index key pages."""

    def __post_init__(self) -> None:
        for name in ("kda", "mla", "dsa"):
            check_int(getattr(self, name), f"layers.{name}", 0, MAX_LAYERS)
        check_int(self.kda + self.mla + self.dsa, "layers in all", 1, MAX_LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageEntry:
    """One page of one layer's cache."""

    layer: int
    kind: str
    """`latent` or `index_key`."""
    index: int
    """Logical page of the job in that layer and kind, from 0."""
    owner: int
    """Prefill rank that sends it."""
    num_bytes: int
    checksum: int
    """xxh3_64 of those bytes."""

    def __post_init__(self) -> None:
        check_int(self.layer, "page.layer", 0, MAX_LAYERS - 1)
        check_choice(self.kind, "page.kind", PAGE_KINDS)
        check_int(self.index, "page.index", 0, MAX_TOKENS)
        check_int(self.owner, "page.owner", 0, MAX_RANKS - 1)
        check_int(self.num_bytes, "page.num_bytes", 1, MAX_BYTES)
        check_int(self.checksum, "page.checksum", 0, MAX_CHECKSUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One layer's piece of the boundary state. Under TP a state comes in `num_parts` shards by heads, in TP order."""

    layer: int
    kind: str
    """`kda_state`, `conv_tail`, or the rows of an incomplete pool: `pool_key`, `pool_gate`."""
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    checksum: int
    owner: int = 0
    part: int = 0
    num_parts: int = 1

    def __post_init__(self) -> None:
        check_int(self.layer, "state.layer", 0, MAX_LAYERS - 1)
        check_choice(self.kind, "state.kind", STATE_KINDS)
        check_tensor_fields("state", self.shape, self.dtype, self.num_bytes)
        check_int(self.checksum, "state.checksum", 0, MAX_CHECKSUM)
        check_int(self.owner, "state.owner", 0, MAX_RANKS - 1)
        check_int(self.num_parts, "state.num_parts", 1, MAX_RANKS)
        check_int(self.part, "state.part", 0, self.num_parts - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsEntry:
    """The fp32 logits of token T - 1, from which the decode side samples the first token."""

    vocab_size: int
    num_bytes: int
    checksum: int
    owner: int = 0

    def __post_init__(self) -> None:
        check_int(self.vocab_size, "logits.vocab_size", 1, 1 << 32)
        check_int(self.num_bytes, "logits.num_bytes", 4 * self.vocab_size, 4 * self.vocab_size)
        check_int(self.checksum, "logits.checksum", 0, MAX_CHECKSUM)
        check_int(self.owner, "logits.owner", 0, MAX_RANKS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The pages of one finished step (or of the whole job), with states and logits when it is the last."""

    transfer_id: str
    """Chosen by the controller, the same on both sides, never reused."""
    attempt: int
    job: str
    model_fingerprint: str
    latent_format: str
    """Name of the row format: `bf16`, `fp8`, `fp32`."""
    index_format: str | None
    """None: the model has no index keys."""
    layers: LayerCounts
    position: int
    """T: tokens whose caches are complete with this manifest."""
    pages: tuple[PageEntry, ...]
    states: tuple[StateEntry, ...]
    """The boundary state at `position`; empty before the last step."""
    logits: LogitsEntry | None
    part: int = 0
    """Number of this manifest in the transfer, from 0."""

    def __post_init__(self) -> None:
        check_identity(self)
        check_name(self.model_fingerprint, "model_fingerprint")
        check_name(self.latent_format, "latent_format")
        if self.index_format is not None:
            check_name(self.index_format, "index_format")
        check_tuple((self.layers,), "layers", LayerCounts)
        check_int(self.position, "position", 1, MAX_TOKENS)
        check_tuple(self.pages, "pages", PageEntry)
        check_tuple(self.states, "states", StateEntry)
        if self.logits is not None:
            check_tuple((self.logits,), "logits", LogitsEntry)
        check_int(self.part, "part", 0, MAX_TOKENS)
        check_unique("page", [(page.layer, page.kind, page.index) for page in self.pages])
        check_unique("state", [(state.layer, state.kind, state.part) for state in self.states])
        if (self.index_format is None) != (self.layers.dsa == 0):
            raise MessageError(
                f"index_format={self.index_format} with {self.layers.dsa} DSA layers: one needs the other"
            )

    @property
    def num_bytes(self) -> int:
        """Payload: pages, states and logits."""
        entries = [*self.pages, *self.states, *([] if self.logits is None else [self.logits])]
        return sum(entry.num_bytes for entry in entries)


def check_complete(manifests: Sequence[Manifest], *, page_tokens: int) -> None:
    """Refuses a transfer that lacks or repeats anything: pages per layer, kind and index, states per layer and part.

    `manifests` in order of `part`. A ragged last page need not have an index key page: with pooled keys it may hold no
    complete pool. The layers agree about that.

    Raises:
        MessageError: names what is missing, surplus or contradictory.
    """
    if not manifests:
        raise MessageError("a transfer without a manifest: nothing was handed over")
    last = manifests[-1]
    for part, manifest in enumerate(manifests):
        if manifest.part != part:
            raise MessageError(f"manifest {manifest.part} in place {part}: they must come in order, without gaps")
        for name in ("transfer_id", "attempt", "job", "model_fingerprint", "latent_format", "index_format", "layers"):
            if getattr(manifest, name) != getattr(last, name):
                raise MessageError(
                    f"{name} is {getattr(manifest, name)} in part {part}, {getattr(last, name)} in the last"
                )
        if manifest is not last and (manifest.states or manifest.logits or manifest.position >= last.position):
            raise MessageError(f"part {part} of {len(manifests)} reads like the last: states, logits and T come last")
    if last.logits is None:
        raise MessageError(f"the last manifest has no logits of token {last.position - 1}")
    counts = last.layers
    num_pages = -(-last.position // page_tokens)
    pages = [(page.layer, page.kind, page.index) for manifest in manifests for page in manifest.pages]
    check_unique("page", pages)
    check_runs("latent", pages, num_layers=counts.mla + counts.dsa, low=num_pages, high=num_pages)
    num_whole = last.position // page_tokens
    check_runs("index_key", pages, num_layers=counts.dsa, low=num_whole, high=num_pages)
    check_states(last)


def check_runs(kind: str, pages: Sequence[tuple[int, str, int]], *, num_layers: int, low: int, high: int) -> None:
    """Every layer of a kind has the pages 0 to n - 1, with one n in [low, high] for all of them."""
    indices: dict[int, list[int]] = {}
    for layer, page_kind, index in pages:
        if page_kind == kind:
            indices.setdefault(layer, []).append(index)
    if not indices and low == 0:
        return
    if len(indices) != num_layers:
        raise MessageError(f"{kind} pages of {len(indices)} layers, the model has {num_layers} such layers")
    expected = min(max(low, max((len(found) for found in indices.values()), default=0)), high)
    for layer, found in indices.items():
        missing = sorted(set(range(expected)) - set(found))
        surplus = sorted(set(found) - set(range(expected)))
        if missing or surplus:
            raise MessageError(
                f"{kind} pages of layer {layer}: {len(found)} of {expected}, lacks {missing[:4]}, surplus {surplus[:4]}"
            )


def check_states(manifest: Manifest) -> None:
    """Every KDA layer has its state and its conv tail, in all parts; every pool tail is whole."""
    parts: dict[tuple[str, int], list[StateEntry]] = {}
    for state in manifest.states:
        parts.setdefault((state.kind, state.layer), []).append(state)
    for (kind, layer), states in parts.items():
        if len(states) != states[0].num_parts or any(state.num_parts != len(states) for state in states):
            raise MessageError(f"{kind} of layer {layer}: {len(states)} parts of {states[0].num_parts}")
    for kind, num_layers in (("kda_state", manifest.layers.kda), ("conv_tail", manifest.layers.kda)):
        found = sum(1 for state_kind, _ in parts if state_kind == kind)
        if found != num_layers:
            raise MessageError(f"{kind} of {found} layers, the model has {num_layers} KDA layers")
    tails = [sum(1 for kind, _ in parts if kind == wanted) for wanted in ("pool_key", "pool_gate")]
    if tails not in ([0, 0], [manifest.layers.dsa] * 2):
        raise MessageError(f"pool keys and gates of {tails} layers, the model has {manifest.layers.dsa} DSA layers")


def check_identity(message: object) -> None:
    """The three fields every message has: which transfer, which attempt, which job."""
    check_name(getattr(message, "transfer_id"), "transfer_id")  # noqa: B009 - any of four message classes
    check_int(getattr(message, "attempt"), "attempt", 0, 1 << 31)  # noqa: B009
    check_name(getattr(message, "job"), "job")  # noqa: B009


def check_tensor_fields(name: str, shape: object, dtype: object, num_bytes: object) -> None:
    """Shape, dtype and size must be legal and agree."""
    check_tuple(shape, f"{name}.shape", int)
    assert isinstance(shape, tuple)
    if not 1 <= len(shape) <= MAX_DIMS:
        raise MessageError(f"{name}.shape={shape}: needs 1 to {MAX_DIMS} dims")
    for extent in shape:
        check_int(extent, f"{name}.shape", 0, MAX_BYTES)
    check_choice(dtype, f"{name}.dtype", DTYPE_BYTES)
    expected = math.prod(shape) * DTYPE_BYTES[str(dtype)]
    check_int(expected, f"{name} size by shape", 0, MAX_BYTES)
    check_int(num_bytes, f"{name}.num_bytes", expected, expected)


def check_unique(name: str, keys: Sequence[tuple[int, str, int]]) -> None:
    """No (layer, kind, number) twice."""
    if len(set(keys)) != len(keys):
        seen: set[tuple[int, str, int]] = set()
        twice = next(key for key in keys if key in seen or seen.add(key))
        raise MessageError(f"{name} {twice} is listed twice")
