"""What a checkpoint on disk holds, read from safetensors headers alone. Torch-free.

Layout of a safetensors file: 8 bytes, the header's length as a little-endian integer; the header, a JSON object from
tensor names to dtype, shape and byte range; then the bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from longprefill.partition.errors import ModelError
from longprefill.workers.model.families.registry import read_object
from longprefill.workers.model.parameters import Shape

INDEX_NAME = "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U64": 8, "U32": 4, "U16": 2}
MAX_HEADER_BYTES = 100_000_000
SAMPLE_BYTES = 4096
"""A fingerprint reads this much at the beginning, the middle and the end of each file's data."""


class StoredTensor(NamedTuple):
    path: Path
    dtype: str
    """As in the header: BF16, F32, ..."""
    shape: Shape


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises:
        ModelError: the file is missing, shorter than its header says, or its header is not one.
    """
    header, data_start, size = _raw_header(path)
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            expected_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        except (KeyError, TypeError, ValueError):
            raise ModelError(f"{path} is corrupt: its header's entry for {name} is {entry!r}: copy it again") from None
        if last - first != expected_bytes:
            raise ModelError(
                f"{path} is corrupt: its header gives {name} {last - first} bytes, "
                f"and shape {list(shape)} of {dtype} needs {expected_bytes}: copy it again"
            )
        end = max(end, last)
        tensors[name] = StoredTensor(path, dtype, shape)
    if data_start + end != size:
        state = "truncated" if data_start + end > size else "corrupt"
        raise ModelError(
            f"{path} is {state}: its header promises {data_start + end} bytes, it has {size}: copy it again"
        )
    return tensors


def read_stored_tensors(model_dir: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a model directory: of the files that its index names, or of all `*.safetensors`.

    Raises:
        ModelError: no safetensors file is there, one of the index is missing, one is truncated or corrupt, a tensor is
            not where the index says, or two files hold a tensor of one name.
    """
    directory = Path(model_dir)
    if (directory / INDEX_NAME).exists():
        return _read_indexed(directory)
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        for name, stored in read_header(path).items():
            if name in tensors:
                other = tensors[name].path.name
                raise ModelError(
                    f"{directory}: tensor {name} is in {other} and in {path.name}: remove one of the files"
                )
            tensors[name] = stored
    return tensors


def weight_files(model_dir: str | Path) -> list[Path]:
    """The safetensors files that make up the checkpoint, sorted by name.

    Raises:
        ModelError: there is none, or the index is not one.
    """
    directory = Path(model_dir)
    if (directory / INDEX_NAME).exists():
        return [directory / name for name in sorted(set(_read_weight_map(directory).values()))]
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{directory} holds no *.safetensors file: give the directory of a whole checkpoint")
    return paths


def fingerprint(model_dir: str | Path) -> str:
    """16 hexadecimal digits that change with config.json, with any tensor's name, shape, dtype or place, and (by
    samples of the data) with the weights. Reads a few kilobytes a file.

    Raises:
        ModelError: config.json or a safetensors file is missing or corrupt.
    """
    directory = Path(model_dir)
    digest = hashlib.blake2b(digest_size=8)
    config = json.dumps(read_object(directory / "config.json"), sort_keys=True)
    digest.update(config.encode())
    for path in weight_files(directory):
        header, data_start, size = _raw_header(path)
        digest.update(json.dumps([path.name, size, header], sort_keys=True).encode())
        with path.open("rb") as file:
            for start in (data_start, (data_start + size) // 2, size - SAMPLE_BYTES):
                file.seek(max(start, data_start))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _read_indexed(directory: Path) -> dict[str, StoredTensor]:
    weight_map = _read_weight_map(directory)
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file_name in sorted(set(weight_map.values())):
        path = directory / file_name
        if not path.is_file():
            raise ModelError(f"{path} is missing and {INDEX_NAME} names it: copy the whole checkpoint")
        headers[file_name] = read_header(path)
    tensors: dict[str, StoredTensor] = {}
    for name, file_name in weight_map.items():
        if name not in headers[file_name]:
            raise ModelError(f"{directory / file_name} has no tensor {name} and {INDEX_NAME} says so: copy both again")
        tensors[name] = headers[file_name][name]
    return tensors


def _read_weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX_NAME
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{path}: field weight_map={weight_map!r} is not allowed: it must map tensor names to file names"
        )
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelError(f"{path}: weight_map[{name!r}]={file_name!r} is not allowed: it must be a plain file name")
    return weight_map


def _raw_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The parsed header, where the data begins, and the file's size."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            text = file.read(length) if length <= MAX_HEADER_BYTES else b""
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: copy the whole checkpoint") from None
    size = path.stat().st_size
    if len(prefix) < 8 or (length <= MAX_HEADER_BYTES and len(text) < length):
        raise ModelError(f"{path} is truncated: it ends at byte {size}, inside its header: copy it again")
    try:
        header = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        header = None
    if not isinstance(header, dict):
        raise ModelError(f"{path} is not a safetensors file: it does not begin with a header: copy it again")
    return header, 8 + length, size
