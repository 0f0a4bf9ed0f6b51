"""deepseek_v32: DSA in every layer, yarn, grouped routing (DeepSeek-V3.2).

Fields and tensors are read as published and as transformers' DeepseekV32Config (5.23) has them. The indexer rotates the
first dims by halves, the attention its last dims in pairs.
"""

from __future__ import annotations

from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.base import Family, Location
from longprefill.workers.model.families.indexed_attention import IndexedFamily
from longprefill.workers.model.families.naming import PROJECTIONS, locate

TRAITS = IndexedFamily(
    model_type="deepseek_v32",
    indexer_interleaves=False,
    shares_selections=False,
    defaults={
        "first_k_dense_replace": 3,
        "n_group": 8,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
)


def locate_weights(config: ModelConfig) -> dict[str, Location]:
    """Where each canonical parameter is in a deepseek_v32 checkpoint."""
    return locate(config, PROJECTIONS)


FAMILY = Family(model_type="deepseek_v32", read_config=TRAITS.read_config, locate=locate_weights)
