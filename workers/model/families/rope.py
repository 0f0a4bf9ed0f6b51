"""Position encodings of a config.json: theta, and linear or yarn scaling as one factor a frequency."""

from __future__ import annotations

from typing import NamedTuple

from longprefill.kernels.rope.frequencies import yarn_factors, yarn_magnitude
from longprefill.workers.model.families.fields import Fields


class Rotation(NamedTuple):
    theta: float
    inv_freq_scale: tuple[float, ...] | None
    attention_scale: float
    """Multiplies the softmax scale (yarn's mscale squared); 1 without yarn."""
    magnitude: float = 1.0
    """Multiplies cosines and sines (yarn's attention factor)."""


def read_published_rotation(fields: Fields, dim: int) -> Rotation:
    """Rotations over `dim` channels as published DSA models spell them: `rope_parameters`, or `rope_scaling` beside
    `rope_theta`; neither: plain rotations. Yarn's factors follow transformers, which the published checkpoints agree
    with: the softmax scale gets `mscale_all_dim`'s, cosines the ratio of `mscale`'s to it.

    Raises:
        ModelError: a missing field or a value out of range.
    """
    theta = fields.number("rope_theta", default=10000.0)
    name = next((name for name in ("rope_parameters", "rope_scaling") if fields.has(name)), None)
    if name is None:
        return Rotation(theta, None, 1.0)
    section = fields.section(name)
    theta = section.number("rope_theta", default=theta)
    kind = section.choice("rope_type", "type", among=("default", "linear", "yarn"), default="default")
    if kind != "yarn":
        scale = 1.0 / section.number("factor") if kind == "linear" else None
        rotation = Rotation(theta, None if scale is None else (scale,) * (dim // 2), 1.0)
        section.refuse_unread()
        return rotation
    factor = section.number("factor")
    original = section.integer("original_max_position_embeddings")
    scales = yarn_scales(section, theta, dim, factor, original)
    mscale = section.number("mscale", default=0.0, above=-1.0)
    mscale_all = section.number("mscale_all_dim", default=0.0, above=-1.0)
    softmax = yarn_magnitude(factor, mscale_all) ** 2 if mscale_all else 1.0
    if section.has("attention_factor"):
        magnitude = section.number("attention_factor")
    elif mscale and mscale_all:
        magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    else:
        magnitude = yarn_magnitude(factor, 1.0)
    section.refuse_unread()
    return Rotation(theta, scales, softmax, magnitude)


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
    scales = yarn_scales(fields, theta, dim, factor, original)
    mscale = fields.number("mscale", default=1.0, above=-1.0)
    mscale_all = fields.number("mscale_all_dim", default=mscale, above=-1.0)
    if mscale != mscale_all:
        raise fields.error("mscale", mscale, f"mscale_all_dim={mscale_all:g}: cosines without a factor of their own")
    magnitude = yarn_magnitude(factor, mscale_all)
    return Rotation(theta, scales, magnitude * magnitude)


def yarn_scales(fields: Fields, theta: float, dim: int, factor: float, original: int) -> tuple[float, ...]:
    """The factor of every frequency; `beta_fast` and `beta_slow` say where the ramp lies, `truncate` whether on whole
    numbers of channels."""
    fast, slow = fields.number("beta_fast", default=32.0), fields.number("beta_slow", default=1.0)
    if fast < slow:
        raise fields.error("beta_fast", fast, f"at least beta_slow={slow:g}")
    return yarn_factors(
        theta,
        dim,
        factor=factor,
        original_max_tokens=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=fields.flag("truncate", default=True),
    )
