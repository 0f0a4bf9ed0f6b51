"""`quantization_config` of a config.json: FP8 weights with one scale a block, as DeepSeek and GLM publish them."""

from __future__ import annotations

from longprefill.partition.errors import ModelError
from longprefill.workers.model.families.fields import Fields

IGNORED_FIELDS = (
    "scale_fmt", "dequantize", "modules_to_convert", "modules_to_not_convert", "ignored_layers", "expert_dtype",
)  # fmt: skip
"""How other engines quantize activations, and which tensors are not FP8: every tensor's own dtype says that."""


def read_fp8_block(fields: Fields) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None without a `quantization_config`.

    Raises:
        ModelError: any other quantization.
    """
    if not fields.has("quantization_config"):
        return None
    section = fields.section("quantization_config")
    method = section.choice("quant_method", among=("fp8",))
    section.choice("fmt", among=("e4m3", "float8_e4m3fn"), default="e4m3")
    if section.choice("activation_scheme", among=("dynamic", "static"), default="dynamic") == "static":
        raise section.error("activation_scheme", "static", "dynamic: activations are not quantized here")
    if not section.has("weight_block_size"):
        raise ModelError(
            f"config.json: quantization_config has quant_method={method!r} without weight_block_size: "
            "only FP8 with a scale for each block of weights is read, or give the bf16 model"
        )
    block = section.integers("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise section.error("weight_block_size", block, "two integers from 1 on, as [128, 128]")
    section.refuse_unread(IGNORED_FIELDS)
    return block[0], block[1]
