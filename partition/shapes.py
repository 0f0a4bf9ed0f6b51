"""Shapes of a model as the work model counts them: plain integers, independent of configs and checkpoints.

Every number is what ONE rank holds: heads, intermediate widths and experts after a split over tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaShape:
    """A KDA mixer."""

    num_heads: int
    """q/k heads."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Taps of the causal conv; the halo and the conv tail have one row less."""
    gate_rank: int
    output_gate_rank: int | None
    """None: full-rank output gate."""
    tile: int = 64
    """Tokens of a kernel tile: the C of the flop formula."""

    def __post_init__(self) -> None:
        _refuse_negative(self)

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """The fp32 state of all value heads: also the E of a summary."""
        return 4 * self.num_value_heads * self.key_dim * self.value_dim

    @property
    def transition_bytes(self) -> int:
        """The fp32 M of a summary."""
        return 4 * self.num_value_heads * self.key_dim * self.key_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerShape:
    """A lightning indexer."""

    num_heads: int
    head_dim: int
    topk: int
    pool: int = 1
    """Tokens of one pooled key; 1: every key is scored."""
    key_bytes: int = 0
    """Bytes of one key row, one a pool, where it travels beside `MlaShape.row_bytes`; 0: not, or counted there."""

    def __post_init__(self) -> None:
        if self.pool < 1:
            raise ValueError(f"IndexerShape.pool={self.pool}: need 1 or more")
        _refuse_negative(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """An MLA mixer: dense in the expanded form, or sparse (DSA) in the absorbed form when it has an indexer."""

    num_heads: int
    q_lora_rank: int | None
    """None: queries are projected from the hidden state at once."""
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    row_bytes: int
    """Bytes of what travels of every token: latent and rope key in their cache format, and index keys that
    `IndexerShape.key_bytes` does not count."""
    indexer: IndexerShape | None
    """None: dense MLA."""
    is_gated: bool = False

    def __post_init__(self) -> None:
        _refuse_negative(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaShape:
    """Dense grouped-query attention, which no family of the engine has: published systems are checked against it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    row_bytes: int
    """Bytes of one token's keys and values as they travel."""

    def __post_init__(self) -> None:
        _refuse_negative(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseShape:
    """A dense gated feed-forward."""

    intermediate: int

    def __post_init__(self) -> None:
        _refuse_negative(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """A mixture of experts with balanced routing: what a token costs does not depend on where its experts live."""

    num_experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    latent_dim: int | None
    """Width in which the routed experts work; None: the hidden width."""
    held_experts: int | None = None
    """Experts whose weights one rank holds when they are spread over the mesh; None: all."""

    def __post_init__(self) -> None:
        _refuse_negative(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    mixer: KdaShape | MlaShape | GqaShape
    ffn: DenseShape | MoeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All layers of a model, and the widths they share."""

    hidden: int
    layers: tuple[LayerShape, ...]
    element_bytes: int
    """Bytes of a number of the activations (2: bf16)."""
    attn_res_block: int | None
    """Layers of an Attention Residuals block; None: plain residual stream, or hyper-connections."""
    hyper_streams: int = 0
    """Residual streams of hyper-connections; 0: none."""
    vocab_size: int = 0
    """Rows of the head that one rank holds; 0: the head is not counted."""

    def __post_init__(self) -> None:
        if self.attn_res_block is not None and self.attn_res_block < 1:
            raise ValueError(f"ModelShape.attn_res_block={self.attn_res_block}: need 1 or more, or None")
        _refuse_negative(self)


def _refuse_negative(shape: object) -> None:
    """Raises ValueError for a negative integer in any field of a shape."""
    for field in fields(shape):  # pyright: ignore[reportArgumentType]
        value = getattr(shape, field.name)
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{type(shape).__name__}.{field.name}={value}: need 0 or more")
