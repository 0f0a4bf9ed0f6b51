"""From a request to a plan that every worker can follow: settings checked against the model and the machine.

Nothing here imports torch or ray, so a wrong call is refused before anything heavy starts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field

from longprefill.orchestrator.memory import (
    KERNEL_BYTES,
    PROCESS_BYTES,
    RankMemory,
    available_bytes,
    check_memory,
    step_bytes_per_token,
    weight_bytes,
)
from longprefill.partition.errors import PromptError, UserError
from longprefill.partition.generators import GENERATORS, LayoutKind
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.partition.steps import check_step_tokens, choose_step_tokens
from longprefill.workers.model.config import MlaConfig, ModelConfig
from longprefill.workers.model.sharding import MeshPlace, check_tp
from longprefill.workers.spec import DTYPES

NUM_SLOTS = 8
"""Jobs that can be on their way to the decode worker at once."""
STEP_BUDGET_BYTES = 256 << 20
"""Working memory of a rank's step when nothing else limits it."""
FORMATS = {"latent": ("fp32", "bf16", "fp8"), "index": ("fp32", "bf16", "mxfp8")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What a cluster is asked for. Formats default to the compute dtype, the step size to one chosen by memory.

    Raises:
        UserError: a value that cannot be, with what is allowed.
    """

    model_dir: str
    cp: int = 1
    tp: int = 1
    expert_parallel: bool = False
    """Spread the experts over all ranks; else each has all of them."""
    dtype: str = "bf16"
    latent_format: str | None = None
    index_format: str | None = None
    step_tokens: int | None = None
    max_tokens: int = 65536
    """Most tokens, prompt and generated, that all open jobs together may hold."""
    layout: LayoutKind = "zigzag"
    device: str = "cpu"
    backends: dict[str, str] = field(default_factory=dict)
    trace: bool = False
    keep_unpooled_keys: bool = False
    """Lets `dump` give index keys before k-pooling."""
    collective_timeout_s: float = 120.0
    heartbeat_timeout_s: float = 20.0
    threads_per_rank: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.cp <= 1024:
            raise UserError(f"--cp {self.cp}: use 1 to 1024 context-parallel ranks")
        if not 1 <= self.tp <= 64:
            raise UserError(f"--tp {self.tp}: use 1 to 64 tensor-parallel ranks")
        if self.dtype not in DTYPES:
            raise UserError(f"--dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        for kind, value in (("latent", self.latent_format), ("index", self.index_format)):
            if value is not None and value not in FORMATS[kind]:
                raise UserError(f"--{kind}-format {value!r} is not one of {', '.join(FORMATS[kind])}")
        if self.step_tokens is not None:
            check_step_tokens(self.step_tokens)
        if self.max_tokens < 1:
            raise UserError(f"max_tokens={self.max_tokens}: a cluster holds at least 1 token")
        if self.layout not in GENERATORS:
            raise UserError(f"--layout {self.layout!r} is not one of {', '.join(GENERATORS)}")
        for name in ("collective_timeout_s", "heartbeat_timeout_s"):
            if not 1 <= getattr(self, name) <= 86400:
                raise UserError(f"{name}={getattr(self, name)}: use 1 to 86400 seconds")
        if self.threads_per_rank < 1:
            raise UserError(f"threads_per_rank={self.threads_per_rank}: a rank needs at least 1 thread")

    @property
    def num_ranks(self) -> int:
        """Prefill ranks: the CP x TP mesh."""
        return self.cp * self.tp

    def place(self, rank: int) -> MeshPlace:
        """Where a prefill rank is in the mesh."""
        return MeshPlace.of(rank, num_cp=self.cp, num_tp=self.tp, expert_parallel=self.expert_parallel)

    @property
    def item_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    @property
    def latent(self) -> str:
        return self.latent_format or self.dtype

    @property
    def index(self) -> str:
        return self.index_format or self.dtype


def check_prompt_length(config: ModelConfig, num_tokens: int, max_new_tokens: int) -> None:
    """Refuses a prompt that the model cannot take.

    Raises:
        PromptError: empty, or too long together with what it shall generate.
    """
    if num_tokens == 0:
        raise PromptError("the prompt is empty: give at least one token")
    if num_tokens + max_new_tokens > config.max_tokens:
        raise PromptError(
            f"the prompt's {num_tokens} tokens and max_new_tokens={max_new_tokens} exceed the model's maximum of "
            f"{config.max_tokens} tokens: shorten the prompt or generate less"
        )


def step_tokens_for(settings: ClusterSettings, config: ModelConfig, num_tokens: int) -> int:
    """The step size asked for, or one chosen by memory."""
    if settings.step_tokens is not None:
        return settings.step_tokens
    return choose_step_tokens(
        num_tokens,
        settings.cp,
        bytes_per_token=step_bytes_per_token(config, settings.item_bytes, settings.num_ranks),
        budget_bytes=STEP_BUDGET_BYTES,
    )


def cache_bytes_per_page(config: ModelConfig, settings: ClusterSettings) -> int:
    """Cache bytes of one page (64 tokens) over all layers."""
    total = 0
    for layer in config.layers:
        mla = layer.mixer
        if not isinstance(mla, MlaConfig):
            continue
        total += PAGE_TOKENS * latent_row_bytes(settings.latent, mla.kv_lora_rank, mla.rope_dim)
        if mla.indexer is not None:
            total += PAGE_TOKENS // mla.indexer.pool * key_row_bytes(settings.index, mla.indexer.head_dim)
    return total


def check_fits(settings: ClusterSettings, config: ModelConfig, step_tokens: int, *, num_decode: int) -> RankMemory:
    """Estimates a rank's memory and refuses what the machine cannot hold.

    Raises:
        UserError: with the estimate and the largest --cp that fits.
    """
    check_tp(config, settings.tp)
    num_pages = -(-settings.max_tokens // PAGE_TOKENS)
    step_tokens = min(step_tokens, num_pages * PAGE_TOKENS)
    places = (
        [settings.place(0)] if settings.place(0).is_alone else [settings.place(r) for r in range(settings.num_ranks)]
    )
    whole = weight_bytes(config, settings.item_bytes)
    cache = num_pages * cache_bytes_per_page(config, settings)
    rank = RankMemory(
        process=PROCESS_BYTES,
        weights=max(weight_bytes(config, settings.item_bytes, place) for place in places),
        cache=cache,
        step=KERNEL_BYTES + step_tokens * step_bytes_per_token(config, settings.item_bytes, settings.num_ranks),
    )
    decode = RankMemory(process=PROCESS_BYTES, weights=whole, cache=cache, step=KERNEL_BYTES)
    check_memory(
        rank, decode, num_cp=settings.cp, num_tp=settings.tp, num_decode=num_decode, available=available_bytes()
    )
    return rank


def check_pool_room(settings: ClusterSettings, config: ModelConfig, *, num_ranks: int) -> None:
    """Refuses cache pools that neither shared memory nor the directory for temporary files can hold.

    Raises:
        UserError: with the bytes needed and those that are free.
    """
    num_pages = -(-settings.max_tokens // PAGE_TOKENS) + NUM_SLOTS
    needed = num_ranks * num_pages * cache_bytes_per_page(config, settings)
    free = {path: shutil.disk_usage(path).free for path in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(path)}
    if needed > max(free.values()):
        places = ", ".join(f"{path} has {size / (1 << 30):.2f} GiB free" for path, size in free.items())
        raise UserError(
            f"the cache pages of {num_ranks} ranks need {needed / (1 << 30):.2f} GiB and {places}: use a shorter "
            "prompt, a smaller --cp, or --latent-format fp8 and --index-format mxfp8"
        )


def latent_row_bytes(name: str, rank: int, rope_dim: int) -> int:
    """Bytes of a latent cache row [c (rank) | k_R (rope_dim)] in a format."""
    return {
        "fp32": 4 * (rank + rope_dim),
        "bf16": 2 * (rank + rope_dim),
        "fp8": rank + 4 * -(-rank // 128) + 2 * rope_dim,
    }[name]


def key_row_bytes(name: str, width: int) -> int:
    """Bytes of an index key row in a format."""
    return {"fp32": 4 * width, "bf16": 2 * width, "mxfp8": width + -(-width // 32)}[name]
