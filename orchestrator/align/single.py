"""The yardstick without transformers: our engine on one rank, in this process, the whole prompt as one step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from longprefill.comms.solo import SoloGroup
from longprefill.kernels.backends import resolve
from longprefill.orchestrator.align.observation import LOGIT_ROWS, Numbers, Observation, from_ranks
from longprefill.partition.layout import PAGE_TOKENS, Slice
from longprefill.workers.cache.pages import CacheFormats, CachePool, cache_kinds, pool_bytes
from longprefill.workers.choices import Record, Recorder, Replayer
from longprefill.workers.engine import TORCH_DTYPES
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.model import Model
from longprefill.workers.model.weights import load_weights
from longprefill.workers.prefill import PrefillRank, StepPlan
from longprefill.workers.probe import ActivationProbe, observe
from longprefill.workers.trace import Tracer


class SingleRank:
    """A model on one rank in this process, kept between prompts."""

    def __init__(self, model_dir: str | Path, numbers: Numbers) -> None:
        self.config = read_config(model_dir)
        self.numbers = numbers
        self.dtype = TORCH_DTYPES[numbers.dtype]
        self.model = Model(self.config, load_weights(model_dir, self.config, dtype=self.dtype))

    def run(self, tokens: np.ndarray, record: Record | None = None, numbers: Numbers | None = None) -> Observation:
        """Records the run's own choices, or replays those of `record`. `numbers` of the same dtype may keep rows in
        other formats."""
        numbers = numbers or self.numbers
        assert numbers.dtype == self.numbers.dtype
        kinds = cache_kinds(self.config, CacheFormats(latent=numbers.latent, index_key=numbers.index))
        num_pages = -(-len(tokens) // PAGE_TOKENS)
        pool = CachePool(torch.zeros(pool_bytes(kinds, num_pages), dtype=torch.uint8), kinds, num_pages)
        rank = PrefillRank(self.model, SoloGroup(), pool, resolve("cpu"), dtype=self.dtype, tracer=Tracer(False))
        rank.choices = choices = Recorder() if record is None else Replayer(record)
        rank.probe = probe = ActivationProbe(logit_rows=LOGIT_ROWS)
        rank.open_job(0, torch.from_numpy(tokens.astype(np.int64)), tuple(range(num_pages)))
        whole = (Slice(job=0, start=0, end=len(tokens)),)
        rank.run_step(StepPlan(slices=whole, layout="zigzag", exchange="all_gather", logits_of=()))
        seen = [observe(rank, probe, 0)]
        if isinstance(choices, Recorder):
            return from_ranks(seen, len(tokens), record=choices.record, numbers=numbers)
        return from_ranks(seen, len(tokens), num_choices=choices.rows, swapped=choices.swapped, numbers=numbers)
