"""Which classes of transformers can be the yardstick of `align`, and why others cannot. Imports no torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

CLASSES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
}
"""By the `model_type` of config.json."""


def yardstick_refusal(model_type: str) -> str | None:
    """Why transformers cannot be asked about a family, as a sentence; None: it can."""
    if model_type not in CLASSES:
        return f"it has no class for {model_type}"
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return "the package transformers is not installed (pip install transformers)"
    if not (Path(spec.submodule_search_locations[0]) / "models" / model_type).is_dir():
        return f"the installed transformers has no {CLASSES[model_type]}; install a newer one"
    return None
