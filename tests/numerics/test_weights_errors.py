"""Every way in which a model directory can be broken, and the words that name it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from longprefill.partition.errors import ModelError
from longprefill.workers.model.families.base import Part
from longprefill.workers.model.families.registry import config_from, read_config
from longprefill.workers.model.stored import StoredTensor
from longprefill.workers.model.weights import Piece, TensorReader, check_weights, load_weights

from .weights_cases import FULL_RAW, FULL_TENSORS, L0, L1, copy_model, hand_made, save_model, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy of `tiny` to break."""
    return copy_model(tiny, tmp_path / "model")


def test_a_missing_file_of_the_index_is_named(broken: Path) -> None:
    (broken / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"model-00002-of-00003.safetensors is missing and model.safetensors.index.json"
    ):
        check_weights(broken, read_config(broken))


@pytest.mark.parametrize("keep", [3, 100, -1])
def test_a_truncated_file_is_named(keep: int, broken: Path) -> None:
    path = broken / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model-00001-of-00003.safetensors is truncated: it"):
        check_weights(broken, read_config(broken))


def corrupt_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a file's header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_corrupt_headers_are_named(broken: Path) -> None:
    path, config = broken / "model-00001-of-00003.safetensors", read_config(broken)
    whole = path.read_bytes()

    corrupt_header(path, lambda header: header["model.embed_tokens.weight"].update(shape=[512, 65]))
    with pytest.raises(ModelError, match=r"is corrupt: .*model.embed_tokens.weight 65536 bytes, and shape \[512, 65\]"):
        check_weights(broken, config)

    path.write_bytes(whole)
    corrupt_header(path, lambda header: header["model.embed_tokens.weight"].pop("dtype"))
    with pytest.raises(ModelError, match=r"is corrupt: its header's entry for model.embed_tokens.weight"):
        check_weights(broken, config)

    path.write_bytes(b"<!doctype html>" * 1000)
    with pytest.raises(ModelError, match=r"00001-of-00003.safetensors is not a safetensors file"):
        check_weights(broken, config)

    path.write_bytes(whole + b"tail")
    with pytest.raises(ModelError, match=r"is corrupt: its header promises \d+ bytes, it has \d+"):
        check_weights(broken, config)


def test_index_errors(broken: Path) -> None:
    index, config = broken / "model.safetensors.index.json", read_config(broken)
    good = json.loads(index.read_text())

    def with_entry(name: str, file_name: object) -> None:
        bad = copy.deepcopy(good)
        bad["weight_map"][name] = file_name
        index.write_text(json.dumps(bad))

    with_entry("model.norm.weight", "../model-00001-of-00003.safetensors")
    with pytest.raises(ModelError, match="must be a plain file name"):
        check_weights(broken, config)
    with_entry("model.norm.weight", "model-00001-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"model-00001-of-00003.safetensors has no tensor model.norm.weight"):
        check_weights(broken, config)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"weight_map=None is not allowed"):
        check_weights(broken, config)


def test_without_files_or_with_doubled_tensors(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "m", FULL_RAW, hand_made())
    save_file({"model.norm.weight": torch.ones(10)}, directory / "second.safetensors")
    with pytest.raises(ModelError, match=r"tensor model.norm.weight is in model.safetensors and in second.safetensors"):
        check_weights(directory, config_from(FULL_RAW))
    for path in directory.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match=r"holds no \*.safetensors file"):
        check_weights(directory, config_from(FULL_RAW))


@pytest.mark.parametrize("name", sorted(FULL_TENSORS))
def test_every_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    tensors = hand_made()
    del tensors[name]
    directory = save_model(tmp_path / "m", FULL_RAW, tensors)
    with pytest.raises(ModelError, match=r"parameter \S+ is missing: the checkpoint has no tensor ") as caught:
        check_weights(directory, config_from(FULL_RAW))
    assert name in str(caught.value)


@pytest.mark.parametrize("name", sorted(FULL_TENSORS))
def test_every_wrong_shape_is_named(name: str, tmp_path: Path) -> None:
    tensors = hand_made()
    tensors[name] = torch.zeros([*tensors[name].shape[:-1], tensors[name].shape[-1] + 1])
    if name.endswith("A_log"):
        tensors[name] = torch.zeros(3)
    directory = save_model(tmp_path / "m", FULL_RAW, tensors)
    with pytest.raises(ModelError, match=r"has shape \[.*\], and \S+ needs \[.*\]: config.json and weights") as caught:
        load_weights(directory, config_from(FULL_RAW), dtype=torch.float32)
    assert f"tensor {name} has shape {list(tensors[name].shape)}" in str(caught.value)


def test_a_transposed_tensor_is_refused(tmp_path: Path) -> None:
    tensors = hand_made()
    name = L0 + "self_attn.q_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    directory = save_model(tmp_path / "m", FULL_RAW, tensors)
    with pytest.raises(ModelError, match=r"has shape \[10, 12\], and layers.0.kda.q_proj needs \[12, 10\]"):
        check_weights(directory, config_from(FULL_RAW))


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    tensors = hand_made()
    name = L1 + "self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    directory = save_model(tmp_path / "m", FULL_RAW, tensors)
    with pytest.raises(ModelError, match=rf"tensor {name} has dtype F8_E4M3, and config.json no quantization_config"):
        check_weights(directory, config_from(FULL_RAW))


def test_unknown_tensors_are_refused_except_harmless_ones(tmp_path: Path) -> None:
    config = config_from(FULL_RAW)
    harmless = hand_made() | {
        "model.layers.2.self_attn.q_proj.weight": torch.ones(3),
        L1 + "self_attn.rotary_emb.inv_freq": torch.ones(1),
    }
    check_weights(save_model(tmp_path / "a", FULL_RAW, harmless), config)
    biased = hand_made() | {L0 + "self_attn.q_proj.bias": torch.ones(12)}
    with pytest.raises(
        ModelError, match=r"layers.0.self_attn.q_proj.bias \[12\] is unknown to family longprefill_hybrid"
    ):
        check_weights(save_model(tmp_path / "b", FULL_RAW, biased), config)


def test_a_file_that_vanishes_after_the_check(tmp_path: Path) -> None:
    gone = StoredTensor(tmp_path / "gone.safetensors", "F32", (2,))
    piece = Piece("embed", Part(names=("x",), shape=(2,), row=0), "x", gone)
    with TensorReader() as reader, pytest.raises(ModelError, match=r"gone.safetensors cannot be read: tensor x"):
        reader.read_block(piece, (slice(0, 2),))
