"""The shape of a model as the engine sees it, whatever family it came from. Torch-free, so that planning can read it.

`workers/model/families/` turns a published `config.json` into a `ModelConfig`; `parameters.py` says which tensors it
has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float
    pairing: Literal["interleaved", "half"]
    """Which dims rotate together: (0, 1), (2, 3), ... or (i, i + dim / 2)."""
    inv_freq_scale: tuple[float, ...] | None = None
    """Per-frequency factors (yarn and linear scaling come to this); None: all 1."""
    magnitude: float = 1.0
    """Factor on rotated pairs: yarn's attention factor where mscale and mscale_all_dim differ; 1: a pure rotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaConfig:
    num_heads: int
    """q/k heads."""
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    gate_rank: int
    lower_bound: float | None
    """None: softplus gate; else the bounded gate's bound, in [-5, 0)."""
    output_gate_rank: int | None
    """None: full-rank output gate."""
    norm_eps: float
    allow_neg_eigval: bool = False

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    num_heads: int
    head_dim: int
    topk: int
    pool: int
    """Keys pooled in groups of this many tokens; 1: no pooling."""
    rope_dim: int
    """The FIRST rope_dim dims of query and key rotate; 0: none."""
    rope: RopeConfig | None
    norm_eps: float = 1e-6
    is_reused: bool = False
    """A later layer attends to this selection too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeConfig | None
    """None: NoPE; the rope_dim channels exist and are not rotated."""
    scale: float
    q_norm_eps: float
    kv_norm_eps: float
    gated: bool
    """Kimi K3's gated MLA: the attention output times sigmoid(x W_g) before o_proj."""
    indexer: IndexerConfig | None
    """None: dense MLA, or a layer that has no selection of its own; else DSA."""
    shared_selection: IndexerConfig | None = None
    """The indexer of the last DSA layer that has one, whose selection this layer attends to; None: nothing shared. Such
    a layer has no indexer weights and caches no index keys."""

    @property
    def selection(self) -> IndexerConfig | None:
        """The indexer, own or shared, that says which keys a query attends to; None: all of them."""
        return self.indexer or self.shared_selection


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    intermediate: int
    activation: str
    activation_clamp: float | None = None
    """Clamped SwiGLU: the gate is cut above this, up on both sides, before the activation; None: not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    num_experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    """Width of all shared experts together; 0: none."""
    latent_dim: int | None
    """Kimi K3's latent MoE: experts work on x W_in of this width, and W_out brings their sum back."""
    scoring: Literal["sigmoid", "softmax"]
    has_bias: bool
    num_groups: int
    topk_groups: int
    normalize_weights: bool
    weight_scale: float
    activation: str
    activation_clamp: float | None = None
    """As in DenseConfig, for routed and shared experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    mixer: KdaConfig | MlaConfig
    ffn: DenseConfig | MoeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnResConfig:
    block_layers: int
    """A new block starts at layers 0, block_layers, 2 block_layers, ..."""
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnectionConfig:
    """Manifold-constrained hyper-connections (mHC): several residual streams, mixed token by token."""

    num_streams: int
    sinkhorn_iterations: int
    """Normalisations over columns; those over rows are one less."""
    eps: float
    norm_eps: float
    """Of the norm of a token's streams together, which has no weight."""

    @property
    def num_weights(self) -> int:
        """Mixing weights of one sublayer: into it, out of it, and from stream to stream."""
        return (2 + self.num_streams) * self.num_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    residual: AttnResConfig | HyperConnectionConfig | None
    """None: plain residual stream."""
    tie_embeddings: bool
    max_tokens: int
    """Longest sequence the model takes (max_position_embeddings / model_max_length)."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    fp8_block: tuple[int, int] | None = None
    """Rows and columns that share a scale where the checkpoint's weights are FP8; None: none are."""
