"""glm_moe_dsa: DSA in every layer, some of which reuse the selection of the layer before (GLM-5 and its successors).

Fields and tensors are read as published and as transformers' GlmMoeDsaConfig (5.23) has them. Unlike DeepSeek's, the
indexer rotates its first dims in pairs.
"""

from __future__ import annotations

from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.base import Family, Location
from longprefill.workers.model.families.indexed_attention import IndexedFamily
from longprefill.workers.model.families.naming import PROJECTIONS, locate

TRAITS = IndexedFamily(
    model_type="glm_moe_dsa",
    indexer_interleaves=True,
    shares_selections=True,
    defaults={
        "first_k_dense_replace": 3,
        "n_group": 1,
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
    },
)


def locate_weights(config: ModelConfig) -> dict[str, Location]:
    """Where each canonical parameter is in a glm_moe_dsa checkpoint."""
    return locate(config, PROJECTIONS)


FAMILY = Family(model_type="glm_moe_dsa", read_config=TRAITS.read_config, locate=locate_weights)
