"""The indexer over a million keys: its memory does not grow with queries times keys."""

from __future__ import annotations

import subprocess
import sys

import pytest

from longprefill.kernels.native.library import refusal

REFUSAL = refusal("cpu")
"""Asked while tests are collected, which builds the library: no test's time limit should have to cover a compiler."""
LIMIT_BYTES = 1 << 30
NUM_KEYS, NUM_QUERIES, TOPK = 1 << 20, 256, 2048
PROGRAM = f"""
import ctypes
import sys
from pathlib import Path
import torch
from longprefill.kernels.dsa import cpu
from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.formats import make_format

def status_bytes(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10

torch.set_num_threads(1)
heads, dim = 16, 64
generator = torch.Generator().manual_seed(0)
row_format = make_format("index_key", sys.argv[1], width=dim)
pages = torch.empty({NUM_KEYS} // 64, 64, row_format.row_bytes, dtype=torch.uint8)
for page in range(0, len(pages), 1024):
    keys = torch.randn(1024 * 64, dim, generator=generator)
    pages[page : page + 1024] = row_format.encode(keys).view(1024, 64, -1)
rows = PagedRows(pages_NPB=pages, table=tuple(range(len(pages))), num_rows={NUM_KEYS}, format=row_format)
q = torch.randn({NUM_QUERIES}, heads, dim, generator=generator).bfloat16()
w = torch.rand({NUM_QUERIES}, heads, generator=generator)
# Nothing of the set-up may hide the call's memory: neither what the allocator kept nor the peak until now.
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
before, cleared_peak = status_bytes("VmRSS"), status_bytes("VmHWM")
chosen = cpu.select(q, w, rows, start={NUM_KEYS} - {NUM_QUERIES}, topk={TOPK})
after_peak = status_bytes("VmHWM")
assert chosen.shape == ({NUM_QUERIES}, {TOPK}) and int(chosen.min()) >= 0
assert bool((chosen[:, 1:] > chosen[:, :-1]).all())
print(cleared_peak - before, after_peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(REFUSAL is not None, reason=f"the compiled kernel is what is measured: {REFUSAL}")
@pytest.mark.parametrize("row_format", ["bf16", "mxfp8"])
def test_a_million_keys_need_no_score_matrix(row_format: str) -> None:
    command = [sys.executable, "-c", PROGRAM, row_format]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    cleared, used = (int(part) for part in done.stdout.split())
    assert abs(cleared) < 1 << 20, "the peak before the call was not forgotten"
    # the chosen positions alone take 2 MiB: a peak that saw nothing would be no measurement
    assert NUM_QUERIES * TOPK * 4 <= used < LIMIT_BYTES, f"{used:,} bytes beyond the keys"
