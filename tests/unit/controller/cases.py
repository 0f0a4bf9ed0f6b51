"""Controllers over host doubles: started, killed and started again on the same journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from longprefill.orchestrator.config import DecodePool, ModelSection, PrefillPool, ServiceConfig, ServiceSection
from longprefill.orchestrator.controller.service import ControllerService
from longprefill.orchestrator.job import JobRequest, JobView, TokenRecord
from longprefill.workers.model.sizes import RAW_CONFIGS

from .cluster_double import ClusterDouble
from .decode_double import token_at

DEADLINE_S = 30.0


def make_model(folder: Path) -> Path:
    """A model without weights: all that a controller reads."""
    folder.mkdir()
    raw = RAW_CONFIGS["longprefill_hybrid", "tiny"]
    (folder / "config.json").write_text(json.dumps(raw))
    # bytes and nothing merged, beginning at id 10: made in no time
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = Tokenizer(models.BPE(vocab={letter: 10 + place for place, letter in enumerate(alphabet)}, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    pieces.save(str(folder / "tokenizer.json"))
    return folder


def make_config(model: Path, state: Path, **service: Any) -> ServiceConfig:
    pool = service.pop("pool", {})
    return ServiceConfig(
        model=ModelSection(dir=str(model)),
        service=ServiceSection(state_dir=str(state), **service),
        prefill=(PrefillPool(**{"count": 2, "dtype": "fp32", "step_tokens": 64, "max_tokens": 1024} | pool),),
        decode=(DecodePool(max_tokens=4096),),
    )


def request(num_tokens: int = 4, **fields: Any) -> JobRequest:
    return JobRequest(tenant=fields.pop("tenant", "a"), max_new_tokens=num_tokens, **fields)


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(8, 500, num_tokens)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, DEADLINE_S))


async def until(condition: Callable[[], Any], what: str = "") -> None:
    """Waits for a condition; `run` bounds it."""
    while not condition():
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def controller(config: ServiceConfig, cluster: ClusterDouble) -> AsyncIterator[ControllerService]:
    """A controller that dies at the block's end, as by a signal; its hosts go on."""
    service = ControllerService(config, cluster.linked)
    await service.start()
    ending = asyncio.create_task(service.run())
    try:
        yield service
        if ending.done():
            ending.result()
    finally:
        await service.stop(end_hosts=False)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)


async def ended(service: ControllerService, job: str) -> JobView:
    """The job when it has ended."""
    while not (view := await service.inspect(job, None)).state.is_final:
        await service.events(job, None, after=len(await service.events(job, None)), timeout_s=1.0)
    return view


async def stream(service: ControllerService, job: str, after: int = 0) -> list[TokenRecord]:
    """All tokens of a job from a cursor to its end."""
    records: list[TokenRecord] = []
    while True:
        batch = await service.tokens(job, None, after=after, timeout_s=1.0)
        records += batch.records
        after = batch.cursor
        if not batch.records and batch.state.is_final:
            return records


def ids_of(records: list[TokenRecord], sample: int = 0) -> list[int]:
    own = [record for record in records if record.sample == sample]
    assert [record.index for record in own] == list(range(len(own)))
    return [record.token for record in own]


def expected(tokens_T: np.ndarray, num: int, seed: int = 0, sample: int = 0) -> list[int]:
    return [token_at(tokens_T, seed, sample, index) for index in range(num)]


def with_prefill(config: ServiceConfig, **fields: Any) -> ServiceConfig:
    return replace(config, prefill=(replace(config.prefill[0], **fields),))
