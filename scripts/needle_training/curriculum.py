"""The stages of training, each from the last one's weights, and how a model of four layers grows to eight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longprefill.orchestrator.needle.words import Phrasing
from longprefill.workers.model.config import ModelConfig
from longprefill.workers.model.families.registry import config_from
from longprefill.workers.model.parameters import parameter_shapes

from .data import BOS_ID, EOS_ID, VOCAB_SIZE, Mix

BLOCK_LAYERS = 4
BLOCK = ["kda", "kda", "kda", "dsa"]
MAX_TOKENS = 4 << 20
WARM_UP_STEPS = 20
DENSE = (0.75, 0.98)
"""Share of a sequence that facts and questions take where as many answers a step as possible count."""
DECAY_SHARE = 0.4
"""Of a stage: the rate falls linearly over this last part. The first digits become right as it falls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    num_blocks: int
    """Blocks of four layers. The first stage with more than the last one grows the model."""
    length: int
    batch: int
    steps: int
    mix: Callable[[float], Mix]
    """By the share of the stage that is done."""
    text_rows: int
    index_loss: bool
    muon_rate: float
    adam_rate: float
    final_rate: float
    """Share of the rates that is left at the end."""
    is_averaged: bool = False
    """The stage leaves the mean of the weights that it began with and those that it ended with."""

    def rate(self, step: int) -> float:
        """Factor on both rates at a step from 0."""
        done = step / self.steps
        falling = 1.0 if done < 1 - DECAY_SHARE else 1 - (1 - self.final_rate) * (done - 1 + DECAY_SHARE) / DECAY_SHARE
        return min(falling, (step + 1) / WARM_UP_STEPS)


def _between(first: float, last: float, share: float) -> float:
    return first + (last - first) * min(1.0, share)


def _short_forms(done: float) -> Mix:
    phrasing = Phrasing(short=1.0, varied=0.0)
    return Mix(phrasing=phrasing, sections=0.0, absent=0.0, siblings=0.0, max_gap=8, fill=(0.6, 0.95))


def _sentences(done: float) -> Mix:
    phrasing = Phrasing(short=_between(0.6, 0.1, done * 2), varied=_between(0.2, 1.0, done * 1.5))
    return Mix(phrasing=phrasing, sections=0.0, absent=_between(0.0, 0.15, done), siblings=0.1, max_gap=8)


def _sections(done: float) -> Mix:
    phrasing = Phrasing(short=0.1, varied=_between(0.5, 1.0, done * 2))
    gap = int(12 * (400 / 12) ** min(1.0, done * 1.6))
    return Mix(phrasing=phrasing, sections=0.5, absent=0.3, siblings=0.15, max_gap=gap, fill=DENSE)


def _everything(done: float) -> Mix:
    return Mix(
        phrasing=Phrasing(short=0.05, varied=1.0), sections=0.5, absent=0.3, siblings=0.25, max_gap=400,
        fill=(0.5, 0.95),
    )  # fmt: skip


def _far_apart(done: float) -> Mix:
    return dataclasses.replace(_everything(done), fill=(0.25, 0.7))


def _many_absent(done: float) -> Mix:
    return dataclasses.replace(_far_apart(done), absent=0.6)


def _sparse(done: float) -> Mix:
    return dataclasses.replace(_everything(done), absent=0.45, fill=(0.15, 0.6))


def _sparse_absent(done: float) -> Mix:
    return dataclasses.replace(_everything(done), absent=0.7, fill=(0.1, 0.5))


def _balanced(done: float) -> Mix:
    return dataclasses.replace(_everything(done), absent=0.5, fill=(0.2, 0.9))


def _dense(done: float) -> Mix:
    return dataclasses.replace(_everything(done), absent=0.5, siblings=0.35, fill=(0.25, 0.95))


def _few_absent(done: float) -> Mix:
    """So rare that a doubtful name is rather answered with a number than with `unknown`."""
    return dataclasses.replace(_everything(done), absent=0.15, fill=(0.2, 0.9))


STAGES = (
    Stage(name="A", num_blocks=1, length=256, batch=16, steps=350, mix=_short_forms, text_rows=32, index_loss=False,
          muon_rate=0.015, adam_rate=3e-3, final_rate=0.2),
    Stage(name="B", num_blocks=1, length=512, batch=4, steps=320, mix=_sentences, text_rows=48, index_loss=True,
          muon_rate=0.015, adam_rate=3e-3, final_rate=0.3),
    Stage(name="C", num_blocks=1, length=1024, batch=2, steps=440, mix=_sections, text_rows=48, index_loss=True,
          muon_rate=0.012, adam_rate=2e-3, final_rate=0.3),
    Stage(name="D", num_blocks=1, length=4096, batch=1, steps=600, mix=_everything, text_rows=64, index_loss=True,
          muon_rate=0.010, adam_rate=2e-3, final_rate=0.05),
    Stage(name="E", num_blocks=1, length=8192, batch=1, steps=200, mix=_far_apart, text_rows=64, index_loss=True,
          muon_rate=0.008, adam_rate=1.5e-3, final_rate=0.05),
    Stage(name="F", num_blocks=1, length=8192, batch=1, steps=380, mix=_far_apart, text_rows=64, index_loss=True,
          muon_rate=0.010, adam_rate=2e-3, final_rate=0.02),
    Stage(name="G", num_blocks=1, length=8192, batch=1, steps=300, mix=_many_absent, text_rows=64, index_loss=True,
          muon_rate=0.010, adam_rate=2e-3, final_rate=0.02),
    Stage(name="H", num_blocks=1, length=8192, batch=1, steps=500, mix=_far_apart, text_rows=64, index_loss=True,
          muon_rate=0.010, adam_rate=2e-3, final_rate=0.01),
    Stage(name="I", num_blocks=2, length=4096, batch=2, steps=600, mix=_many_absent, text_rows=64, index_loss=True,
          muon_rate=0.010, adam_rate=2e-3, final_rate=0.05),
    Stage(name="J", num_blocks=2, length=8192, batch=1, steps=220, mix=_many_absent, text_rows=64, index_loss=True,
          muon_rate=0.008, adam_rate=1.5e-3, final_rate=0.02),
    Stage(name="K", num_blocks=2, length=8192, batch=1, steps=360, mix=_sparse, text_rows=64, index_loss=True,
          muon_rate=0.008, adam_rate=1.5e-3, final_rate=0.01),
    Stage(name="L", num_blocks=2, length=16384, batch=1, steps=140, mix=_sparse_absent, text_rows=64, index_loss=True,
          muon_rate=0.006, adam_rate=1e-3, final_rate=0.01),
    Stage(name="M", num_blocks=2, length=8192, batch=1, steps=80, mix=_balanced, text_rows=64, index_loss=True,
          muon_rate=0.003, adam_rate=5e-4, final_rate=0.02),
    Stage(name="N", num_blocks=2, length=8192, batch=1, steps=450, mix=_dense, text_rows=64, index_loss=True,
          muon_rate=0.010, adam_rate=2e-3, final_rate=0.01),
    Stage(name="O", num_blocks=2, length=16384, batch=1, steps=100, mix=_dense, text_rows=64, index_loss=True,
          muon_rate=0.005, adam_rate=8e-4, final_rate=0.01),
    Stage(name="P", num_blocks=2, length=8192, batch=1, steps=80, mix=_few_absent, text_rows=64, index_loss=True,
          muon_rate=0.003, adam_rate=5e-4, final_rate=0.02, is_averaged=True),
)  # fmt: skip


def raw_config(num_blocks: int, *, plain_residual: bool = False) -> dict[str, Any]:
    """config.json of the model with so many blocks of four layers, with Attention Residuals or without."""
    layers = BLOCK * num_blocks
    return {
        "model_type": "longprefill_hybrid",
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "hidden_size": 128,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-6,
        "linear_attn_config": {"num_heads": 4, "head_dim": 32, "gate_lower_bound": -5.0},
        "num_attention_heads": 4,
        "kv_lora_rank": 64,
        "v_head_dim": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 0,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "intermediate_size": 256,
        "attn_res_block_size": None if plain_residual else BLOCK_LAYERS,
    }


def config_of(stage: Stage, *, plain_residual: bool = False) -> ModelConfig:
    """The model that a stage trains."""
    return config_from(raw_config(stage.num_blocks, plain_residual=plain_residual))


def initial_parameters(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Fresh canonical parameters, fp32. Queries of Attention Residuals are zero: a plain residual stream."""
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith(("_norm", "_res.norm", "k_norm.weight")):
            value = torch.ones(shape)
        elif name.endswith(("_res.query", "k_norm.bias", "kda.a_log")):
            value = torch.zeros(shape)
        elif name.endswith("kda.dt_bias"):
            # -g = 5 sigmoid(dt) log-uniform in [0.005, 1]: states that last from a byte to some hundreds
            share = 0.005 * (1 / 0.005) ** torch.rand(shape, generator=generator) / 5
            value = torch.log(share / (1 - share))
        elif name == "embed":
            value = 0.5 * torch.randn(shape, generator=generator)
        else:
            value = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
            if name.endswith(("o_proj", "ffn.down", "f_b", "head")):
                value *= 0.5
        parameters[name] = value
    return parameters


def grown(parameters: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """The parameters of a deeper model that computes the same: each new block is a copy of the block before it whose
    output projections are zero."""
    result: dict[str, torch.Tensor] = {}
    for name in parameter_shapes(config):
        if name in parameters:
            result[name] = parameters[name]
            continue
        _, index, local = name.split(".", 2)
        value = result[f"layers.{int(index) - BLOCK_LAYERS}.{local}"]
        is_silent = local.endswith(("o_proj", "ffn.down", "_res.query"))
        result[name] = torch.zeros_like(value) if is_silent else value.clone()
    return result
