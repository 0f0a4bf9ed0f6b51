"""FP8 checkpoints: equal to their dequantized twins, read by any range of blocks, refused when they are incomplete.

Legend: R rows, C columns of a stored matrix.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from longprefill.partition.errors import ModelError
from longprefill.workers.model.checkpoint import make_checkpoint, quantize_fp8, write_checkpoint
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.pieces import locate_pieces
from longprefill.workers.model.sharding import MeshPlace, parameter_ranges
from longprefill.workers.model.sizes import RAW_CONFIGS
from longprefill.workers.model.weights import TensorReader, check_weights, dequantize_block, load_weights

FAMILIES = sorted({family for family, _ in RAW_CONFIGS})
SUFFIX = "_scale_inv"


def dequantized(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """fp32, block by block, by plain loops; leading dimensions are separate matrices."""
    values = codes.float()
    for index in range(scales.shape[-2]):
        for column in range(scales.shape[-1]):
            rows = slice(index * block[0], (index + 1) * block[0])
            columns = slice(column * block[1], (column + 1) * block[1])
            values[..., rows, columns] *= scales[..., index, column][..., None, None]
    return values


def write_twin(directory: Path, twin: Path, block: tuple[int, int]) -> None:
    """The fp32 checkpoint that an FP8 one stands for."""
    twin.mkdir()
    raw = json.loads((directory / "config.json").read_text())
    del raw["quantization_config"]
    (twin / "config.json").write_text(json.dumps(raw))
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    plain = {name: value.float() for name, value in tensors.items() if not name.endswith(SUFFIX)}
    for name in list(plain):
        if name + SUFFIX in tensors:
            plain[name] = dequantized(tensors[name], tensors[name + SUFFIX], block)
    save_file(plain, twin / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block", "num_files"), [((128, 128), 1), ((24, 40), 3)])
def test_fp8_equals_its_twin(family: str, block: tuple[int, int], num_files: int, tmp_path: Path) -> None:
    """Blocks larger than the matrices, and blocks that end ragged; scales may lie in another file."""
    raw = RAW_CONFIGS[family, "tiny"]
    config = write_checkpoint(tmp_path / "fp8", raw, 0, torch.bfloat16, num_files=num_files, fp8_block=block)
    assert config.fp8_block == block
    write_twin(tmp_path / "fp8", tmp_path / "twin", block)
    check_weights(tmp_path / "fp8", config)
    loaded = load_weights(tmp_path / "fp8", config, dtype=torch.float32)
    expected = load_weights(tmp_path / "twin", read_config(tmp_path / "twin"), dtype=torch.float32)
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-6, atol=0, msg=name)
    original = write_checkpoint(tmp_path / "bf16", raw, 0, torch.bfloat16)
    exact = load_weights(tmp_path / "bf16", original, dtype=torch.float32)
    changed = [name for name, value in exact.items() if not torch.equal(value, loaded[name])]
    assert any(name.endswith("o_proj") for name in changed)
    assert not any("norm" in name or name in ("embed", "head") for name in changed)
    for name in changed:
        error = (loaded[name] - exact[name]).square().mean().sqrt() / exact[name].square().mean().sqrt()
        assert error < 0.04, name


@pytest.mark.parametrize("family", ["deepseek_v32", "glm5_next"])
def test_a_share_of_the_weights_is_a_slice_of_the_whole(family: str, tmp_path: Path) -> None:
    """Ranges of a tensor-parallel rank start and end inside blocks."""
    raw = RAW_CONFIGS[family, "tiny"]
    config = write_checkpoint(tmp_path / "fp8", raw, 0, torch.bfloat16, fp8_block=(24, 40))
    whole = load_weights(tmp_path / "fp8", config, dtype=torch.float32)
    for rank in range(2):
        place = MeshPlace.of(rank, num_cp=1, num_tp=2, expert_parallel=True)
        ranges = parameter_ranges(config, place)
        share = load_weights(tmp_path / "fp8", config, dtype=torch.float32, ranges=ranges)
        for name, value in whole.items():
            for dim, runs in enumerate(ranges[name]):
                value = value.index_select(dim, torch.tensor([i for run in runs for i in run], dtype=torch.int64))
            assert torch.equal(share[name], value), name


def test_fused_fp8_experts_load(tmp_path: Path) -> None:
    """Three dimensions: every expert has scales of its own, and a block may span gate and up."""
    block = (24, 40)
    raw = RAW_CONFIGS["glm_moe_dsa", "tiny"]
    config = write_checkpoint(tmp_path / "m", raw, 0, torch.bfloat16, fp8_block=block)
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    prefix = "model.layers.1.mlp.experts."
    expected: list[torch.Tensor] = []
    codes, scales = [], []
    for expert in range(6):
        gate, up = (
            dequantized(tensors.pop(name), tensors.pop(name + SUFFIX), block)
            for name in (f"{prefix}{expert}.{word}.weight" for word in ("gate_proj", "up_proj"))
        )
        quantized = quantize_fp8(torch.cat((gate, up)), block)
        codes.append(quantized[0].view(torch.uint8))
        scales.append(quantized[1])
        expected.append(dequantized(*quantized, block))
    tensors[prefix + "gate_up_proj"] = torch.stack(codes).view(torch.float8_e4m3fn)
    tensors[prefix + "gate_up_proj" + SUFFIX] = torch.stack(scales)
    save_file(tensors, path)
    loaded = load_weights(tmp_path / "m", config, dtype=torch.float32)["layers.1.moe.gate_up"]
    torch.testing.assert_close(loaded, torch.stack(expected), rtol=1e-6, atol=0)


@given(
    rows=st.integers(1, 70), columns=st.integers(1, 70), block=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=60)
def test_any_range_dequantizes_alike(rows: int, columns: int, block: tuple[int, int], data: st.DataObject) -> None:
    matrix_RC = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    codes_RC, scales = quantize_fp8(matrix_RC, block)
    assert scales.shape == tuple(-(-size // extent) for size, extent in zip((rows, columns), block, strict=True))
    whole_RC = dequantized(codes_RC, scales, block)
    assert ((whole_RC - matrix_RC).abs() <= matrix_RC.abs() / 16 + scales.max() * 2**-9).all()
    ranges = []
    for size in (rows, columns):
        start = data.draw(st.integers(0, size - 1))
        ranges.append(slice(start, data.draw(st.integers(start, size))))
    part = dequantize_block(codes_RC[tuple(ranges)], scales, ranges, block)
    assert torch.equal(part, whole_RC[tuple(ranges)])


def test_blocks_of_zeros_stay_zero() -> None:
    codes_RC, scales = quantize_fp8(torch.zeros(5, 3), (2, 2))
    assert torch.equal(dequantized(codes_RC, scales, (2, 2)), torch.zeros(5, 3))


def test_reading_is_by_range(tmp_path: Path) -> None:
    """A rank's share is read without the rest of the tensor."""
    config = write_checkpoint(
        tmp_path / "m", RAW_CONFIGS["deepseek_v32", "tiny"], 0, torch.bfloat16, fp8_block=(24, 40)
    )
    piece = next(p for p in locate_pieces(tmp_path / "m", config) if p.parameter == "layers.0.mla.o_proj")
    whole = load_weights(tmp_path / "m", config, dtype=torch.float32)["layers.0.mla.o_proj"]
    with TensorReader(config.fp8_block) as reader:
        part = reader.read_block(piece, (slice(5, 31), slice(39, 41)))
        assert torch.equal(part, whole[5:31, 39:41])
        assert piece.scales is not None
        assert reader._bytes_read == part.numel() + 4 * math.prod(piece.scales.shape)


NAME = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop(NAME + SUFFIX), rf"{NAME} has dtype F8_E4M3 and its scales {NAME}{SUFFIX} are missing"),
        (lambda t: t.update({NAME + SUFFIX: t[NAME + SUFFIX][:1]}), r"is F32 \[1, 2\]: it must be F32 .* \[3, 2\]"),
        (lambda t: t.update({NAME + SUFFIX: t[NAME + SUFFIX].int()}), r"is I32 \[3, 2\]: it must be F32"),
        (lambda t: t.update({NAME: t[NAME].to(torch.float8_e5m2)}), r"has dtype F8_E5M2: it must be one of BF16"),
        (lambda t: t.update({NAME[:-6] + "input_scale": torch.ones(1)}), r"input_scale \[1\] is unknown to family"),
    ],
)
def test_what_is_refused(spoil: Any, message: str, tmp_path: Path) -> None:
    config = write_checkpoint(
        tmp_path / "m", RAW_CONFIGS["deepseek_v32", "tiny"], 0, torch.bfloat16, fp8_block=(24, 40)
    )
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        check_weights(tmp_path / "m", config)


def test_make_checkpoint_writes_fp8(tmp_path: Path) -> None:
    config = make_checkpoint("glm5_next", "tiny", tmp_path / "m", dtype="fp8")
    assert config.fp8_block == (128, 128)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.language_model.layers.0.self_attn.o_proj.weight"
    assert tensors[name].dtype == torch.float8_e4m3fn
    assert tensors["model.language_model.layers.0.hc_attn_fn"].dtype == torch.float32
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    check_weights(tmp_path / "m", config)


def test_the_tests_can_fail_by_scales_of_another_block(tmp_path: Path) -> None:
    """Scales transposed between rows and columns of blocks are another matrix."""
    matrix_RC = torch.randn(48, 48, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 49.0)
    codes_RC, scales = quantize_fp8(matrix_RC, (24, 24))
    right = dequantize_block(codes_RC, scales, (slice(0, 48), slice(0, 48)), (24, 24))
    wrong = dequantize_block(codes_RC, scales.T.contiguous(), (slice(0, 48), slice(0, 48)), (24, 24))
    assert (right - matrix_RC).square().mean() < 0.01 * (wrong - matrix_RC).square().mean()
