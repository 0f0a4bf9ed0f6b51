"""Faults of quantized cache rows, each put into one layer of the engine. The error of the whole run hardly grows by
some of them: the rows of their layer show them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.formats import Fp8LatentRows, Mxfp8Rows

from .mesh_faults import KERNELS, Fault, OnlyIn
from .mesh_support import Mesh, mesh_config, whole_model

# rows of more than one group and tile, the last ones shorter
QUANTIZED = whole_model(mesh_config(kv_lora_rank=152, index_head_dim=72), latent="fp8", index_key="mxfp8")
Encode = Callable[[Any, torch.Tensor], torch.Tensor]
"""(format, rows) to bytes."""


def encoding(owner: type, make: Callable[[Encode], Encode]) -> Callable[[OnlyIn], None]:
    return lambda only: only.wrap(owner, "encode", make)


def floor_scale(_: Encode) -> Encode:
    return lambda form, rows: Mxfp8Rows(form.width, "floor").encode_plain(rows)


def toward_zero(encode: Encode) -> Encode:
    """Codes are the next smaller ones, by magnitude, wherever a number lies between two."""

    def broken(form: Any, rows: torch.Tensor) -> torch.Tensor:
        stored = encode(form, rows)
        is_larger = (form.decode(stored, torch.float32).abs() > rows.abs())[:, : getattr(form, "latent_rank", None)]
        stored[:, : is_larger.shape[1]] -= is_larger.to(torch.uint8)
        return stored

    return broken


def groups_of_16(_: Encode) -> Encode:
    """Halves of a group share the scale of the first half, as far as it reaches."""

    def broken(form: Any, rows: torch.Tensor) -> torch.Tensor:
        first_half = (torch.arange(form.width) % 32 < 16).float()
        scales = form.encode_plain(rows * first_half)[:, form.width :]
        power = (scales.int() - 127).repeat_interleave(32, dim=1)[:, : form.width]
        codes = torch.ldexp(rows, -power).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat((codes, scales), dim=1)

    return broken


def scales_of_the_next_group(encode: Encode) -> Encode:
    def broken(form: Any, rows: torch.Tensor) -> torch.Tensor:
        stored = encode(form, rows)
        first, size = (form.latent_rank, 4) if isinstance(form, Fp8LatentRows) else (form.width, 1)
        last = first + size * (form.num_tiles if isinstance(form, Fp8LatentRows) else form.num_groups)
        stored[:, first:last] = stored[:, first:last].roll(size, dims=1)
        return stored

    return broken


def one_scale_a_row(encode: Encode) -> Encode:
    """The first tile's scale for all."""

    def broken(form: Any, rows: torch.Tensor) -> torch.Tensor:
        first_tile = rows[:, :128].repeat(1, 2)[:, : form.latent_rank]
        return encode(form, torch.cat((first_tile, rows[:, form.latent_rank :]), dim=1))

    return broken


def swapped_bytes(encode: Encode) -> Encode:
    """Neighbours change places, as when 16-bit words are read in the other order."""
    return lambda form, rows: encode(form, rows).unflatten(1, (-1, 2)).flip(-1).flatten(1)


def swapped_codes(encode: Encode) -> Encode:
    def broken(form: Any, rows: torch.Tensor) -> torch.Tensor:
        stored = encode(form, rows)
        stored[:, : form.width] = stored[:, : form.width].unflatten(1, (-1, 2)).flip(-1).flatten(1)
        return stored

    return broken


def scale_one_step_up(encode: Encode) -> Encode:
    """Half of the range is lost, and every number is nearly right."""

    def broken(form: Any, rows: torch.Tensor) -> torch.Tensor:
        stored = encode(form, rows)
        power = (stored[:, form.width :].int() - 126).repeat_interleave(32, dim=1)[:, : form.width]
        codes = torch.ldexp(rows, -power).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat((codes, stored[:, form.width :] + 1), dim=1)

    return broken


def keys_read_with_other_scales(only: OnlyIn) -> None:
    """The selection alone reads keys wrongly; what pages hold is right."""

    def make(select: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def broken(q: torch.Tensor, w: torch.Tensor, keys: PagedRows, **options: Any) -> torch.Tensor:
            pages = keys.pages_NPB.clone()
            pages[..., keys.format.width :] = pages[..., keys.format.width :].roll(1, dims=-1)
            return select(q, w, replace(keys, pages_NPB=pages), **options)

        return broken

    only.wrap(KERNELS.indexer, "select", make)


QUANTIZED_FAULTS = {
    name: Fault(place=f"layer {layer} (dsa) {what}", layer=layer, apply=apply, whole=QUANTIZED, mesh=Mesh(cp=2))
    for name, layer, what, apply in (
        ("floor scale", 1, "index key codes", encoding(Mxfp8Rows, floor_scale)),
        ("floor scale in the last layer", 3, "index key codes", encoding(Mxfp8Rows, floor_scale)),
        ("keys rounded toward zero", 3, "index key codes", encoding(Mxfp8Rows, toward_zero)),
        ("groups of 16", 1, "index key codes", encoding(Mxfp8Rows, groups_of_16)),
        ("scales of the next group", 3, "index key codes", encoding(Mxfp8Rows, scales_of_the_next_group)),
        ("swapped codes", 3, "index key codes", encoding(Mxfp8Rows, swapped_codes)),
        ("scale one step up", 1, "index key codes", encoding(Mxfp8Rows, scale_one_step_up)),
        ("keys read with other scales", 3, "index choices", keys_read_with_other_scales),
        ("latents rounded toward zero", 1, "latent codes", encoding(Fp8LatentRows, toward_zero)),
        ("scales of the next tile", 3, "latent codes", encoding(Fp8LatentRows, scales_of_the_next_group)),
        ("one scale a row", 1, "latent codes", encoding(Fp8LatentRows, one_scale_a_row)),
        ("swapped bytes", 3, "latent codes", encoding(Fp8LatentRows, swapped_bytes)),
    )
}
