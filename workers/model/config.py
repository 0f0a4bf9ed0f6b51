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
    """None: dense MLA; else DSA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    intermediate: int
    activation: str


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
class ModelConfig:
    family: str
    vocab_size: int
    hidden: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    residual: AttnResConfig | None
    """None: plain residual stream."""
    tie_embeddings: bool
    max_tokens: int
    """Longest sequence the model takes (max_position_embeddings / model_max_length)."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
