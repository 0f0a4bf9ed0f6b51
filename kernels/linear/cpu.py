"""Products with weights and gated activation by the compiled kernels (cpu_src/linear.cpp): bf16 products in fp32 where
torch's oneDNN has none, bf16 products that stay fp32, SiLU of fp32 and bf16 rows. What is left goes to `plain`.

Legend: T tokens, H heads, D hidden, E outputs, F intermediate, J = 2F.
"""

from __future__ import annotations

import functools
import math
import platform

import torch

from longprefill.kernels.native.library import COMPILED_DTYPES, ops

from . import plain

FEWEST_ROWS = 64
"""Of x in a compiled `linear_fp32`: packing the weights must pay."""
DEPTH_MULTIPLE = 32
"""Of its depth (cpu_src/linear.cpp)."""


def gated(gate_up_TJ: torch.Tensor, *, activation: str, clamp: float | None = None) -> torch.Tensor:
    """act(gate) * up, [T, F] in the operand's dtype, in one pass (see `plain.gated`).

    Raises:
        ValueError: unknown activation.
    """
    plain.check_activation(activation)
    if gate_up_TJ.dtype not in COMPILED_DTYPES or activation != "silu":
        return plain.gated(gate_up_TJ, activation=activation, clamp=clamp)
    rows_TJ = gate_up_TJ if gate_up_TJ.stride(1) == 1 else gate_up_TJ.contiguous()
    return ops().gated_silu(rows_TJ, math.inf if clamp is None else clamp)


def linear(x_TD: torch.Tensor, weight_ED: torch.Tensor, *, out_TE: torch.Tensor | None = None) -> torch.Tensor:
    """x weight^T, [T, E] in x's dtype (see `plain.linear`)."""
    if not has_products(x_TD, weight_ED):
        return plain.linear(x_TD, weight_ED, out_TE=out_TE)
    out_TE = x_TD.new_empty(len(x_TD), len(weight_ED)) if out_TE is None else out_TE
    multiply_heads(x_TD[:, None], weight_ED[None], out_TE[:, None])
    return out_TE


def linear_fp32(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """x weight^T, fp32 [T, E]; the products of bf16 operands are exact (see `plain.linear_fp32`)."""
    if has_products(x_TD, weight_ED):
        out_TE = torch.empty(len(x_TD), len(weight_ED))
        multiply_heads(x_TD[:, None], weight_ED[None], out_TE[:, None])
        return out_TE
    is_bf16 = x_TD.dtype == weight_ED.dtype == torch.bfloat16
    suits = len(x_TD) >= FEWEST_ROWS and x_TD.shape[1] % DEPTH_MULTIPLE == 0 and len(weight_ED) > 0
    if not is_bf16 or not suits or not ops().linear_has_fp32():
        return plain.linear_fp32(x_TD, weight_ED)
    rows_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    return ops().linear_fp32(rows_TD, weight_ED.contiguous())


def has_products(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `multiply_heads` is how to multiply them here: bf16, and no bf16 product of oneDNN's."""
    return x.dtype == weight.dtype == torch.bfloat16 and ops().linear_has_products() and not _has_arm_products()


@functools.cache
def _has_arm_products() -> bool:
    """oneDNN multiplies bf16 on some 64-bit Arm processors; the compiled vectors do not tell those apart."""
    is_possible = platform.machine() == "aarch64" and torch.backends.mkldnn.is_available()
    return is_possible and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def multiply_heads(
    x_THD: torch.Tensor, weight_HED: torch.Tensor, out_THE: torch.Tensor, *, is_transposed: bool = False
) -> None:
    """Each head's product with its own weight into `out_THE`, of any dtype that is compiled; sums in fp32.

    Args:
        x_THD: rows of a head may lie any distance apart.
        weight_HED: [H, D, E] if `is_transposed`.
        out_THE: rows of a head may lie any distance apart.
        is_transposed: whether the weights are stored by input instead of output.
    """
    ops().linear_products(_by_rows(x_THD), _by_rows(weight_HED), is_transposed, out_THE)


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
