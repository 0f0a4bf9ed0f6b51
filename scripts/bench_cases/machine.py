"""What a benchmark's numbers were measured on and with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from longprefill.kernels.native.library import active_isa

from .measure import bf16_product_dtype


def machine() -> dict[str, str]:
    """Processor, load, instruction set, versions, commit; what the fastest product of bf16 operands runs in."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((row.partition(":")[2].strip() for row in cpuinfo if row.startswith("model name")), platform.machine())
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
        "isa": active_isa(),
        "bf16 product": str(bf16_product_dtype()).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit or "not a checkout",
    }
