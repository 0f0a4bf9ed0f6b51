"""Random parameters under which every part of a model matters, so that a defect in any of them shows in the logits.

Every projection turns inputs of variance 1 into outputs of variance 1 (the gains below undo what activations, gates and
averages take away), gates are spread over slow and fast decays, attention is peaked enough for a key to count, and no
norm weight, bias or tap is at its neutral value. Each parameter has its own generator, so its values depend on the seed
and its name alone.

Legend: G value heads, K key dim.
"""

from __future__ import annotations

import hashlib
import math

import torch

from longprefill.workers.model.config import KdaConfig, MlaConfig, ModelConfig
from longprefill.workers.model.parameters import Shape

NORM_SPREAD = 0.1
GATED_GAIN = 1.85
"""Undoes the output gate: a normed row times sigmoid of a unit normal has an rms of 0.54."""
FFN_GAIN = 1.68
"""Undoes silu(a) b of unit normals: rms 0.6."""
SPARSE_SCORE_STD = 2.0
DENSE_SCORE_STD = 3.0
"""Attention scores of this spread leave n / exp(std^2) keys of n in effect; dense layers see more of them."""
ATTENTION_GAIN = 2.0
"""Undoes the averaging over those few keys."""
HEAD_STD = 2.5
"""Spread of the logits in nats."""
RES_QUERY_STD = 1.5
HYPER_BASE_STD = 1.0
"""Of what mixing weights of hyper-connections start from: streams are read, written and mixed unequally."""
DECAY_GATE_STD = 0.5
TAP_STD = 0.5
"""Four taps make variance 1."""
SMALLEST_DECAY, LARGEST_DECAY = 0.005, 1.0
"""Of -g with the bounded gate, log-uniform over channels."""
SMALLEST_DT, LARGEST_DT = 1e-3, 1e-1
LARGEST_A = 16.0
LARGEST_SLOPE = 2.0
"""exp(A_log) of the bounded gate lies between 1 / this and this."""


def initial_parameter(name: str, shape: Shape, config: ModelConfig, seed: int) -> torch.Tensor:
    """The canonical parameter `name` of the given shape, fp32.

    Raises:
        KeyError: the name is not one of `parameter_shapes`.
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    local = name.split(".", 2)[2] if name.startswith("layers.") else name
    mixer = config.layers[int(name.split(".")[1])].mixer if name.startswith("layers.") else None
    if isinstance(mixer, KdaConfig) and local in ("kda.a_log", "kda.dt_bias"):
        return _decay_parameter(local, shape, mixer, config, seed, name, generator)
    normal = torch.randn(shape, generator=generator)
    if local.endswith(("norm", "hc.scale")) or local == "indexer.k_norm.weight":
        return 1.0 + NORM_SPREAD * normal
    if local in _PLAIN_STD:
        return _PLAIN_STD[local] * normal
    if local.endswith("hc.base"):
        return HYPER_BASE_STD * normal
    if local.endswith("res.query"):
        return RES_QUERY_STD / math.sqrt(shape[0]) * normal
    gain = _GAIN.get(local, 1.0)
    if isinstance(mixer, MlaConfig):
        if local in ("mla.q_b", "mla.q_proj"):
            gain = DENSE_SCORE_STD if mixer.selection is None else SPARSE_SCORE_STD
        elif local == "mla.o_proj" and mixer.gated:
            gain *= GATED_GAIN
    return gain / math.sqrt(shape[-1]) * normal


_PLAIN_STD = {
    "embed": 1.0,
    "kda.conv": TAP_STD,
    "indexer.k_norm.bias": 0.3,
    "indexer.pool_bias": 0.5,
    "moe.bias": 0.1,
}
"""Parameters whose scale does not follow from a number of inputs."""

_GAIN = {
    "kda.f_b": DECAY_GATE_STD,
    "kda.o_proj": GATED_GAIN,
    "mla.o_proj": ATTENTION_GAIN,
    "ffn.down": FFN_GAIN,
    "moe.down": FFN_GAIN,
    "moe.shared_down": FFN_GAIN,
    "head": HEAD_STD,
}
"""Output rms of a projection of unit inputs; 1 where not named."""


def _decay_parameter(
    local: str, shape: Shape, kda: KdaConfig, config: ModelConfig, seed: int, name: str, generator: torch.Generator
) -> torch.Tensor:
    """A_log and dt_bias, the latter solved for the decay at zero input: see the gates in `kernels/contracts.py`."""
    uniform = torch.rand(shape, generator=generator)
    if local == "kda.a_log":
        if kda.lower_bound is None:
            return (1.0 + (LARGEST_A - 1.0) * uniform).log()
        return (2.0 * uniform - 1.0) * math.log(LARGEST_SLOPE)
    if kda.lower_bound is None:
        dt = _log_uniform(uniform, SMALLEST_DT, LARGEST_DT)
        return dt + torch.log(-torch.expm1(-dt))
    bound = -kda.lower_bound
    share = _log_uniform(uniform, min(SMALLEST_DECAY, 0.01 * bound), min(LARGEST_DECAY, 0.9 * bound)) / bound
    a_log_name = name.removesuffix("dt_bias") + "a_log"
    slope_G = initial_parameter(a_log_name, (kda.num_value_heads,), config, seed).exp()
    return (torch.logit(share).view(kda.num_value_heads, kda.key_dim) / slope_G[:, None]).reshape(shape)


def _log_uniform(uniform: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.exp(math.log(low) + (math.log(high) - math.log(low)) * uniform)
