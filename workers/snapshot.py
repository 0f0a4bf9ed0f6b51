"""A job between two steps as one safetensors file: pages, boundary state, prompt. A group of any size resumes from it.

    tokens                  int64 [T]            the whole prompt
    state                   uint8                packed boundary state at `position`
    logits                  fp32 [vocab]         of the last prompt token, once the job is done
    pages.<layer>.<kind>    uint8 [n, rows, B]   logical pages 0 .. n-1 of the rows that exist at `position`

Metadata: version, position, dtype, latent_format, index_format, fingerprint (of the model directory).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longprefill.partition.errors import UserError
from longprefill.partition.layout import PAGE_TOKENS
from longprefill.workers.cache.pages import CacheFormats, JobCache
from longprefill.workers.cache.states import BoundaryState
from longprefill.workers.model.config import ModelConfig

VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class SnapshotIdentity:
    """What must agree between the run that wrote a snapshot and the one that resumes from it."""

    fingerprint: str
    dtype: str
    formats: CacheFormats

    def metadata(self) -> dict[str, str]:
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "latent_format": self.formats.latent,
            "index_format": self.formats.index_key,
        }


def write_snapshot(
    path: str,
    identity: SnapshotIdentity,
    tokens_T: torch.Tensor,
    state: BoundaryState,
    cache: JobCache,
    logits_V: torch.Tensor | None,
) -> None:
    """Writes the file whole or not at all (a temporary name, then a rename)."""
    tensors = {"tokens": tokens_T.to(torch.int64), "state": state.pack()}
    if logits_V is not None:
        tensors["logits"] = logits_V.float().contiguous()
    num_pages = -(-state.position // PAGE_TOKENS)
    table = torch.tensor(cache.table[:num_pages], dtype=torch.int64)
    for kind in cache.pool.kinds:
        pages = cache.pool.pages(kind.layer, kind.kind)[table]
        tensors[f"pages.{kind.layer}.{kind.kind}"] = pages
    partial = Path(f"{path}.partial")
    try:
        save_file(tensors, partial, metadata=identity.metadata() | {"position": str(state.position)})
        partial.rename(path)
    except BaseException:  # a full disk is not left fuller
        partial.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, kw_only=True)
class SnapshotHeader:
    position: int
    tokens_T: torch.Tensor
    logits_V: torch.Tensor | None


def read_header(path: str, identity: SnapshotIdentity) -> SnapshotHeader:
    """Checks that the snapshot belongs to this model and these formats; reads its prompt.

    Raises:
        UserError: not a snapshot, or of another model, dtype or format (both values).
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            for name, expected in identity.metadata().items():
                if metadata.get(name) != expected:
                    raise UserError(f"snapshot {path}: {name} is {metadata.get(name)!r}, this cluster has {expected!r}")
            logits = file.get_tensor("logits") if "logits" in file.keys() else None  # noqa: SIM118 (not a dict)
            return SnapshotHeader(
                position=int(metadata["position"]), tokens_T=file.get_tensor("tokens"), logits_V=logits
            )
    except (OSError, SafetensorError) as error:
        raise UserError(f"snapshot {path} cannot be read: {error}") from error


def restore(path: str, config: ModelConfig, dtype: torch.dtype, cache: JobCache) -> BoundaryState:
    """Puts the snapshot's pages into the job's pages and returns its boundary state."""
    with safe_open(path, framework="pt") as file:
        position = int((file.metadata() or {})["position"])
        table = torch.tensor(cache.table[: -(-position // PAGE_TOKENS)], dtype=torch.int64)
        for kind in cache.pool.kinds:
            cache.pool.pages(kind.layer, kind.kind)[table] = file.get_tensor(f"pages.{kind.layer}.{kind.kind}")
        return BoundaryState.unpack(config, position, dtype, file.get_tensor("state"))
