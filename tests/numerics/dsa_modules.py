"""A small DeepSeek-V3.2 attention module of transformers as the oracle, and the comparison that every test uses.

Legend: T tokens, D hidden, S places, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

from longprefill.kernels.quant.formats import Fp32Rows

from .dsa_cases import DsaLayer, make_generator, randomize
from .tolerances_dsa import assert_close

NUM_TOKENS = 150
TOPK = 12
HIDDEN = 64


@dataclass(frozen=True, kw_only=True)
class Oracle:
    layer: DsaLayer
    """Our layer with the module's parameters."""
    hidden_TD: torch.Tensor
    output_TD: torch.Tensor
    """The module's output."""
    is_chosen_TL: torch.Tensor
    """The module's choice of keys, as a mask."""


def dsa_oracle(seed: int) -> Oracle:
    config = DeepseekV32Config(
        hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=40,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, index_n_heads=16, index_head_dim=32, index_topk=TOPK,
        num_hidden_layers=1, max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 1024,
        },
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = DeepseekV32Attention(config, 0).eval().requires_grad_(False)
    randomize(module, seed)
    rotary = DeepseekV32RotaryEmbedding(config)
    hidden_TD = torch.randn(NUM_TOKENS, HIDDEN, generator=make_generator(seed + 100))
    mask_TL = torch.full((NUM_TOKENS, NUM_TOKENS), -torch.inf).triu(1)
    choices: list[torch.Tensor] = []
    hook = module.indexer.register_forward_hook(lambda _module, _inputs, output: choices.append(output[0]))
    with torch.no_grad():
        angles = rotary(hidden_TD[None], torch.arange(NUM_TOKENS)[None])
        output_TD = module(hidden_TD[None], angles, mask_TL[None, None])[0][0]
    hook.remove()
    is_chosen_TL = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    is_chosen_TL.scatter_(1, choices[0].long(), True).tril_()
    layer = DsaLayer(
        module=module,
        inv_freq=rotary.inv_freq,
        topk=TOPK,
        latent_format=Fp32Rows(48),
        key_format=Fp32Rows(32),
    )
    return Oracle(layer=layer, hidden_TD=hidden_TD, output_TD=output_TD, is_chosen_TL=is_chosen_TL)


def compare(oracle: Oracle, layer: DsaLayer, cuts: tuple[int, ...]) -> None:
    """Fails unless the layer chooses the module's keys and returns its output, prefilled in fragments between cuts."""
    output_TD, chosen_TS = layer.run(oracle.hidden_TD, cuts)
    is_chosen_TL = torch.zeros(NUM_TOKENS, NUM_TOKENS + 1, dtype=torch.bool)
    is_chosen_TL.scatter_(1, chosen_TS.long() % (NUM_TOKENS + 1), True)  # -1 falls into the last column
    assert torch.equal(is_chosen_TL[:, :-1], oracle.is_chosen_TL), "other keys were chosen"
    assert_close(output_TD, oracle.output_TD.double(), op="layer")
