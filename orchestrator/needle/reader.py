"""A model in this process that answers questions about documents which a cluster prefilled and exported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from longprefill.comms.solo import SoloGroup
from longprefill.kernels.backends import resolve
from longprefill.orchestrator.needle.answers import Prefilled, answer, pages_for
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers import device as devices
from longprefill.workers.cache.pages import CacheFormats, CachePool, JobCache, cache_kinds, pool_bytes
from longprefill.workers.engine import TORCH_DTYPES
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.model import Model
from longprefill.workers.model.stored import fingerprint
from longprefill.workers.model.weights import load_weights
from longprefill.workers.prefill import PrefillRank
from longprefill.workers.snapshot import SnapshotIdentity, read_header, restore
from longprefill.workers.trace import Tracer

MAX_NEW_TOKENS = 12
"""Of an answer: five digits or `unknown`, and some more to see a model that does not stop."""
QUESTIONS_TOGETHER = 48


class Reader:
    """One rank without actors. `settings` say the dtype and the cache formats of the snapshots."""

    def __init__(self, settings: ClusterSettings, *, max_tokens: int, longest_question: int) -> None:
        """Loads the model and makes room for a document of `max_tokens` and questions side by side."""
        devices.configure_threads(settings.threads_per_rank)
        directory = settings.model_dir
        self._config = read_config(directory)
        self._dtype = TORCH_DTYPES[settings.dtype]
        formats = CacheFormats(latent=settings.latent, index_key=settings.index)
        self._identity = SnapshotIdentity(fingerprint=fingerprint(directory), dtype=settings.dtype, formats=formats)
        kinds = cache_kinds(self._config, formats)
        self._num_pages = -(-max_tokens // PAGE_TOKENS)
        num_spare = QUESTIONS_TOGETHER * pages_for(longest_question, MAX_NEW_TOKENS)
        self._spare = range(self._num_pages, self._num_pages + num_spare)
        buffer = torch.zeros(pool_bytes(kinds, self._num_pages + num_spare), dtype=torch.uint8)
        self._pool = CachePool(buffer, kinds, self._num_pages + num_spare)
        model = Model(self._config, load_weights(directory, self._config, dtype=self._dtype))
        self._rank = PrefillRank(
            model, SoloGroup(), self._pool, resolve("cpu"), dtype=self._dtype, tracer=Tracer(False)
        )

    def answers(self, snapshot: Path, questions: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens that the model puts behind each question about the snapshot's document, up to a stop token.

        Raises:
            UserError: the snapshot is of another model, dtype or format.
        """
        header = read_header(str(snapshot), self._identity)
        table = tuple(range(-(-header.position // PAGE_TOKENS)))
        state = restore(str(snapshot), self._config, self._dtype, JobCache(self._pool, table))
        return answer(
            self._rank,
            Prefilled(state=state, table=table),
            questions,
            spare_pages=self._spare,
            max_new_tokens=MAX_NEW_TOKENS,
            stop_token_ids=self._config.eos_token_ids,
        )
