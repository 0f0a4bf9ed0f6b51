"""Kimi-Linear as transformers runs it: logits, KDA states, conv tails, latents and greedy tokens of ours agree.

The weights are random, with gates spread over slow and fast decays per head and channel and projections of unit gain,
so that every layer matters. Where the two runs would send a token to different experts, it must be a near tie, and ours
follows the class.

Legend: T tokens, A experts a token.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from longprefill.workers.choices import Record
from longprefill.workers.model.config import KdaConfig
from tests.distributed.engine_support import (
    TOLERANCE,
    WHOLE,
    Engine,
    Job,
    Outcome,
    assert_equal_outcomes,
    generate,
    load_engine,
    prompt,
    run,
    steps_of,
)

transformers = pytest.importorskip("transformers")

KDA, MLA = "linear_attention", "full_attention"
VOCABULARY = 97
NUM_NEW = 12

SHAPES: dict[str, dict[str, Any]] = {
    "published pattern": {},
    "query latent, attention first and last": {
        "q_lora_rank": 10,
        "layer_types": [MLA, KDA, KDA, MLA],
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    },
    "grouped experts, odd heads, short convolution": {
        "linear_num_heads": 3, "linear_head_dim": 13, "linear_conv_kernel_dim": 3, "num_local_experts": 6, "n_group": 3,
        "topk_group": 2, "n_shared_experts": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 7,
        "kv_lora_rank": 11, "qk_nope_head_dim": 9, "qk_rope_head_dim": 5, "hidden_size": 36,
        "layer_types": [KDA, MLA, KDA, MLA],
    },
    "one head, all dense, wide epsilon": {
        "linear_num_heads": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "linear_head_dim": 20,
        "mlp_layer_types": ["dense"] * 4, "rms_norm_eps": 1e-3, "layer_types": [KDA, KDA, MLA, KDA],
    },
}  # fmt: skip
MESHES = [(1, 64), (2, WHOLE), (3, 256), (3, WHOLE)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """transformers' model and ours, from one directory."""

    oracle: Any
    engine: Engine


@pytest.fixture(scope="module", params=SHAPES.values(), ids=list(SHAPES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("kimi")
    random_model(**request.param).save_pretrained(directory)
    oracle = transformers.KimiLinearForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return Pair(oracle=oracle.eval(), engine=load_engine(directory))


def random_model(**fields: Any) -> Any:
    """transformers' class with weights under which every part counts."""
    raw = {
        "vocab_size": VOCABULARY, "hidden_size": 40, "intermediate_size": 56, "moe_intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 24,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "qk_nope_head_dim": 16, "num_experts_per_tok": 2,
        "num_local_experts": 5, "linear_head_dim": 16, "linear_num_heads": 2, "layer_types": [KDA, KDA, KDA, MLA],
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096,
    }  # fmt: skip
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**(raw | fields)))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(random_parameter(name, tensor.shape, generator))
    return model


def random_parameter(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("A_log"):
        return (1 + 15 * torch.rand(shape, generator=generator)).log()
    if name.endswith("dt_bias"):
        step = torch.exp(math.log(1e-3) + math.log(1e2) * torch.rand(shape, generator=generator))
        return step + torch.log(-torch.expm1(-step))
    normal = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * normal
    if name.endswith("e_score_correction_bias"):
        return 0.2 * normal
    if name.endswith("conv1d.weight"):
        return 0.5 * normal
    if "embed_tokens" in name:
        return normal
    gain = {"lm_head.weight": 3.0, "o_proj.weight": 2.0, "q_proj.weight": 2.0, "q_b_proj.weight": 2.0}
    return next((g for end, g in gain.items() if name.endswith(end)), 1.0) / math.sqrt(shape[-1]) * normal


@functools.cache
def expected(pair: Pair, num_tokens: int) -> tuple[Outcome, Record]:
    """What transformers' model leaves after the prompt, by our names, and its experts."""
    record: Record = {}
    hooks = []
    for layer, block in enumerate(pair.oracle.model.layers):
        if hasattr(block.mlp, "gate"):

            def keep(module: Any, args: Any, output: Any, layer: int = layer) -> None:
                record["experts", layer, 0, 0] = output[2].clone()

            hooks.append(block.mlp.gate.register_forward_hook(keep))
    cache = transformers.DynamicCache(config=pair.oracle.config)
    with torch.no_grad():
        logits = pair.oracle(prompt(num_tokens, 0, VOCABULARY)[None], past_key_values=cache).logits
    for hook in hooks:
        hook.remove()
    outcome: Outcome = {"logits": logits[0, -1]}
    for layer, spec in enumerate(pair.engine.config.layers):
        if isinstance(spec.mixer, KdaConfig):
            width = spec.mixer.conv_width - 1
            outcome[f"layers.{layer}.state"] = cache.get_recurrent_state(layer, state_idx=0)[0]
            outcome[f"layers.{layer}.conv"] = cache.get_conv_state(layer, state_idx=0)[0, :, -width:].T
        else:
            entry = cache.layers[layer]
            outcome[f"layers.{layer}.latent"] = torch.cat((entry.keys[0, 0], entry.values[0, 0]), dim=1)
    return outcome, record


@pytest.mark.parametrize(("cp", "step_tokens"), MESHES)
@pytest.mark.parametrize("num_tokens", [65, 777, 1500])
def test_prefill_leaves_what_transformers_does(pair: Pair, num_tokens: int, cp: int, step_tokens: int) -> None:
    outcome, record = expected(pair, num_tokens)
    job = Job(number=0, tokens=prompt(num_tokens, 0, VOCABULARY))
    found = run(pair.engine, [job], steps_of([job], step_tokens), cp=cp, record=record)
    assert found.worst <= TOLERANCE
    assert_equal_outcomes(found.outcomes[0], outcome)


@pytest.mark.parametrize(("cp", "step_tokens"), [(1, WHOLE), (2, 64), (3, WHOLE)])
def test_greedy_tokens(pair: Pair, cp: int, step_tokens: int, tmp_path: Path) -> None:
    tokens = prompt(200, 5, VOCABULARY)
    with torch.no_grad():
        theirs = pair.oracle.generate(
            tokens[None], max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        )  # fmt: skip
    ours, _ = generate(pair.engine, Job(number=0, tokens=tokens), step_tokens, cp, NUM_NEW, tmp_path)
    assert ours == theirs[0, len(tokens) :].tolist()
    assert len(set(ours)) > 2, "a model that repeats itself shows nothing"


def test_every_part_counts(pair: Pair) -> None:
    """Each parameter of the oracle, negated, changes what it leaves by far more than the tolerance."""
    outcome, _ = expected(pair, 65)
    tokens = prompt(65, 0, VOCABULARY)[None]
    for name, parameter in pair.oracle.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.neg_()
            changed = pair.oracle(tokens, use_cache=False).logits[0, -1]
            parameter.copy_(kept)
        difference = (changed - outcome["logits"]).square().mean().sqrt() / outcome["logits"].square().mean().sqrt()
        assert difference > 100 * TOLERANCE, f"{name}: {difference:.1e}"
