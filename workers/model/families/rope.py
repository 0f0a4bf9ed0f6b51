"""`rope_parameters` of a config.json: theta, and linear or yarn scaling as one factor a frequency."""

from __future__ import annotations

import math
from typing import NamedTuple

from longprefill.workers.model.families.fields import Fields


class Rotation(NamedTuple):
    theta: float
    inv_freq_scale: tuple[float, ...] | None
    attention_scale: float
    """Multiplies the softmax scale (yarn's mscale squared); 1 without yarn."""


def read_rotation(fields: Fields, dim: int) -> Rotation:
    """From the object `rope_parameters` for rotations over `dim` channels.

    Raises:
        ModelError: a missing field, a value out of range, or a yarn whose cosines would need a factor of their own.
    """
    theta = fields.number("rope_theta", default=10000.0)
    kind = fields.choice("rope_type", among=("default", "linear", "yarn"), default="default")
    if kind == "default":
        scale = fields.numbers("inv_freq_scale", length=dim // 2) if fields.has("inv_freq_scale") else None
        rotation = Rotation(theta, scale, 1.0)
    elif kind == "linear":
        rotation = Rotation(theta, (1.0 / fields.number("factor"),) * (dim // 2), 1.0)
    else:
        rotation = read_yarn(fields, theta, dim)
    fields.refuse_unread()
    return rotation


def read_yarn(fields: Fields, theta: float, dim: int) -> Rotation:
    """Yarn (arXiv 2309.00071), DeepSeek's form: low frequencies divided by `factor`, high ones kept, between a ramp."""
    factor = fields.number("factor")
    original = fields.integer("original_max_position_embeddings")
    fast, slow = fields.number("beta_fast", default=32.0), fields.number("beta_slow", default=1.0)
    mscale = fields.number("mscale", default=1.0, above=-1.0)
    mscale_all = fields.number("mscale_all_dim", default=mscale, above=-1.0)
    if mscale != mscale_all:
        raise fields.error("mscale", mscale, f"mscale_all_dim={mscale_all:g}: cosines without a factor of their own")

    def frequency_turning(turns: float) -> float:
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(frequency_turning(fast)), 0)
    high = min(math.ceil(frequency_turning(slow)), dim - 1)
    width = max(high - low, 1e-3)
    ramps = [min(max((index - low) / width, 0.0), 1.0) for index in range(dim // 2)]
    scale = tuple(ramp / factor + (1.0 - ramp) for ramp in ramps)
    magnitude = 0.1 * mscale_all * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return Rotation(theta, scale, magnitude * magnitude)
