"""Tiny models in fp32, and what one process without any workers computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from longprefill.comms.solo import SoloGroup
from longprefill.kernels.backends import resolve
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers.cache.pages import CacheFormats, CachePool, cache_kinds, pool_bytes
from longprefill.workers.dump import collect
from longprefill.workers.model.checkpoint import write_checkpoint, write_json, write_tokenizer
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.model import Model
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.weights import load_weights
from longprefill.workers.prefill import PrefillRank, StepPlan
from longprefill.workers.trace import Tracer


def make_model(directory: Path, family: str, *, eos: list[int] | None = None, **fields: Any) -> Path:
    """A tiny fp32 model of a family with some config fields changed, with its tokenizer. `eos`: end-of-text ids of its
    generation_config.json."""
    config = write_checkpoint(directory, RAW_CONFIGS[family, "tiny"] | fields, 3, torch.float32)
    write_tokenizer(directory, config.vocab_size)
    if eos is not None:
        write_json(directory / "generation_config.json", {"eos_token_id": eos})
    return directory


def random_tokens(num_tokens: int, seed: int = 0) -> np.ndarray:
    """Ids that every tiny model has, none of them special."""
    return np.random.default_rng(seed).integers(8, 500, num_tokens)


def single_process_tensors(model: Path, tokens: np.ndarray) -> dict[str, torch.Tensor]:
    """What `--dump` holds, from one rank in this process, in fp32 and in one step."""
    config = read_config(model)
    kinds = cache_kinds(config, CacheFormats(latent="fp32", index_key="fp32"))
    num_pages = -(-len(tokens) // PAGE_TOKENS)
    pool = CachePool(torch.zeros(pool_bytes(kinds, num_pages), dtype=torch.uint8), kinds, num_pages)
    rank = PrefillRank(
        Model(config, load_weights(model, config, dtype=torch.float32)),
        SoloGroup(),
        pool,
        resolve("cpu", {}),
        dtype=torch.float32,
        tracer=Tracer(False),
        keep_unpooled_keys=True,
    )
    rank.open_job(0, torch.from_numpy(tokens.astype(np.int64)), tuple(range(num_pages)))
    step = Slice(job=0, start=0, end=len(tokens))
    result = rank.run_step(StepPlan(slices=(step,), layout="zigzag", exchange="all_gather", logits_of=(0,)))
    return collect(rank, 0, result.logits[0], 0)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over the RMS of the reference."""
    difference = (value.float() - reference.float()).pow(2).mean().sqrt()
    return float(difference / reference.float().pow(2).mean().sqrt().clamp_min(1e-30))
