"""Whole attention modules made of our kernels against transformers: DeepSeek-V3.2 (DSA) and Kimi Linear (dense MLA).

Legend: T tokens, D hidden, S places, L keys.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention

from longprefill.kernels.dsa import reference as reference_indexer
from longprefill.kernels.mla import plain as plain_mla
from longprefill.kernels.mla import reference as reference_mla

from .dsa_cases import DsaLayer, expansion_weights, make_generator, paged, randomize
from .dsa_modules import TOPK, compare, dsa_oracle
from .tolerances_dsa import assert_close


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("cuts", [(), (1,), (63, 64, 65), (TOPK - 1, TOPK, TOPK + 1, 128)])
def test_dsa_layer(cuts: tuple[int, ...], seed: int) -> None:
    oracle = dsa_oracle(seed)
    compare(oracle, oracle.layer, cuts)


def test_dsa_layer_by_the_reference_kernels() -> None:
    oracle = dsa_oracle(3)
    layer = DsaLayer(**{**vars(oracle.layer), "indexer": reference_indexer, "attention": reference_mla})
    compare(oracle, layer, (64,))


def kimi_module(**sizes: Any) -> Any:
    config = KimiLinearConfig(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=24, qk_nope_head_dim=12,
        qk_rope_head_dim=8, v_head_dim=16, num_hidden_layers=1, layer_types=["full_attention"], **sizes,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = KimiLinearAttention(config, 0).eval()
    randomize(module, seed=5)
    return module


@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize("cuts", [(), (1, 63, 64, 65)])
def test_kimi_linear_mla(q_lora_rank: int | None, cuts: tuple[int, ...]) -> None:
    module = kimi_module(q_lora_rank=q_lora_rank)
    hidden_TD = torch.randn(150, 48, generator=make_generator(6))
    mask = torch.full((150, 150), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = module(hidden_TD[None], mask)[0][0]
        q_TX = module.q_proj(hidden_TD) if q_lora_rank is None else module.q_b_proj(
            module.q_a_layernorm(module.q_a_proj(hidden_TD))
        )  # fmt: skip
        latent_TL = module.kv_a_proj_with_mqa(hidden_TD)
        rows_TL = torch.cat([module.kv_a_layernorm(latent_TL[:, :24]), latent_TL[:, 24:]], dim=1)
        w_uk_HNR, w_uv_HVR = expansion_weights(module)
        outputs = []
        for start, end in zip((0, *cuts), (*cuts, 150), strict=True):
            heads_THV = plain_mla.dense(
                q_TX[start:end].view(end - start, 4, 20), paged(rows_TL[:end]), w_uk_HNR, w_uv_HVR,
                start=start, scale=module.scaling,
            )  # fmt: skip
            outputs.append(module.o_proj(heads_THV.flatten(1)))
    assert_close(torch.cat(outputs), expected.double(), op="layer")


def test_queries_that_see_no_more_than_topk_equal_dense_attention() -> None:
    oracle = dsa_oracle(4)
    hidden_TD = oracle.hidden_TD[:TOPK]
    sparse_TD, chosen_TS = oracle.layer.run(hidden_TD, ())
    assert [[s for s in row if s >= 0] for row in chosen_TS.tolist()] == [list(range(t + 1)) for t in range(TOPK)]
    assert_close(sparse_TD, oracle.output_TD[:TOPK].double(), op="layer")
