"""Weights by slice: what a rank reads is its part of the whole, and it holds little more than that while it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longprefill.workers.model.checkpoint import FP8_BLOCK, write_checkpoint
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.sharding import MeshPlace, parameter_ranges
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.weights import load_weights

from .mesh_support import mesh_config, take_slice

MODELS = {
    "hybrid": (mesh_config(index_kpool=4), None),
    "tied embedding, latent experts": (mesh_config(tie_word_embeddings=True, routed_expert_hidden_size=24), None),
    "kimi_linear": (dict(RAW_CONFIGS["kimi_linear", "tiny"]), None),
    "deepseek_v32": (dict(RAW_CONFIGS["deepseek_v32", "tiny"]), None),
    "deepseek_v32, FP8": (dict(RAW_CONFIGS["deepseek_v32", "tiny"]), FP8_BLOCK),
    "deepseek_v32, FP8 in small blocks": (dict(RAW_CONFIGS["deepseek_v32", "tiny"]), (16, 24)),
    "glm5_next": (dict(RAW_CONFIGS["glm5_next", "tiny"]), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_reads_its_slices(name: str, tmp_path: Path) -> None:
    raw, fp8_block = MODELS[name]
    write_checkpoint(tmp_path / "model", raw, 0, torch.float32, num_files=2, fp8_block=fp8_block)
    config = read_config(tmp_path / "model")
    whole = load_weights(tmp_path / "model", config, dtype=torch.float32)
    for rank in range(4):
        place = MeshPlace.of(rank, num_cp=2, num_tp=2, expert_parallel=True)
        ranges = parameter_ranges(config, place)
        share = load_weights(tmp_path / "model", config, dtype=torch.float32, ranges=ranges)
        assert list(share) == list(whole)
        for parameter, tensor in share.items():
            assert torch.equal(tensor, take_slice(whole[parameter], ranges[parameter])), parameter


PEAK = """
import resource, sys, torch
from pathlib import Path
from longprefill.workers.device import keep_freed_memory
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.sharding import MeshPlace, parameter_ranges
from longprefill.workers.model.weights import load_weights

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

torch.set_num_threads(1)
config = read_config(sys.argv[1])
place = MeshPlace.of(int(sys.argv[2]), num_cp=2, num_tp=2, expert_parallel=True)
ranges = parameter_ranges(config, place)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
before = resident("VmRSS:")
weights = load_weights(sys.argv[1], config, dtype=torch.bfloat16, ranges=ranges)
print(sum(tensor.nbytes for tensor in weights.values()), resident("VmHWM:") - before)
"""


@pytest.mark.parametrize("rank", [0, 3])
def test_loading_peaks_at_a_fifth_above_the_share(rank: int, large_model: Path) -> None:
    command = [sys.executable, "-c", PEAK, str(large_model), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    share, peak = map(int, done.stdout.split())
    assert share > 350e6
    assert share <= peak <= 1.2 * share, f"peak {peak / 1e6:.0f} MB, share {share / 1e6:.0f} MB"


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.8 GB of zeros in bf16 with the right names and shapes: large next to a slab and to what an allocator keeps."""
    from longprefill.workers.model import checkpoint

    raw = mesh_config(
        hidden_size=1024, vocab_size=20000, intermediate_size=8192, num_experts=60, moe_intermediate_size=1024,
        linear={"num_heads": 8, "num_value_heads": 8, "head_dim": 128, "value_head_dim": 128},
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("large") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "initial_parameter", lambda name, shape, config, seed: torch.zeros(shape))
        write_checkpoint(directory, raw, 0, torch.bfloat16, num_files=4)
    return directory
