"""Clusters for tests: small ones, what they generate, and that nothing stays of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from longprefill.orchestrator import LocalCluster
from longprefill.workers.sampling import Sampling

from .models import random_tokens
from .processes import marked, pool_files, wait_for

GREEDY = Sampling(max_new_tokens=6)
SHORT = random_tokens(200, seed=1)
LONG = random_tokens(900, seed=2)
MAX_TOKENS = 1024


def start(model: Path, **settings: Any) -> LocalCluster:
    return LocalCluster(model, dtype="fp32", step_tokens=256, max_tokens=MAX_TOKENS, **settings)


def tokens_of(cluster: LocalCluster, job: int, sampling: Sampling = GREEDY) -> list[int]:
    return [token.id for token in cluster.generate(job, sampling)]


def generated(cluster: LocalCluster, prompt: np.ndarray, sampling: Sampling = GREEDY) -> list[int]:
    """Prefill, generate, close."""
    result = cluster.prefill(prompt, max_new_tokens=sampling.max_new_tokens)
    try:
        return tokens_of(cluster, result.job, sampling)
    finally:
        cluster.close_job(result.job)


def assert_cluster_left_nothing(mark: str) -> None:
    wait_for(lambda: not marked(mark), lambda: f"processes left: {marked(mark)}", deadline_s=15)
    assert pool_files(os.getpid()) == []
