"""The indexer over a million keys: its memory does not grow with queries times keys."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT_BYTES = 1 << 30
NUM_KEYS, NUM_QUERIES, TOPK = 1 << 20, 256, 2048
PROGRAM = f"""
import torch
from longprefill.kernels.dsa import cpu
from longprefill.kernels.paged import PagedRows
from longprefill.kernels.quant.formats import Bf16Rows

def peak_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10

torch.set_num_threads(1)
heads, dim = 16, 64
generator = torch.Generator().manual_seed(0)
row_format = Bf16Rows(dim)
pages = torch.empty({NUM_KEYS} // 64, 64, row_format.row_bytes, dtype=torch.uint8)
for page in range(0, len(pages), 1024):  # in pieces, so that making the keys is no peak of its own
    keys = torch.randn(1024 * 64, dim, generator=generator)
    pages[page : page + 1024] = row_format.encode(keys).view(1024, 64, -1)
rows = PagedRows(pages_NPB=pages, table=tuple(range(len(pages))), num_rows={NUM_KEYS}, format=row_format)
q = torch.randn({NUM_QUERIES}, heads, dim, generator=generator).bfloat16()
w = torch.rand({NUM_QUERIES}, heads, generator=generator)
before = peak_bytes()
chosen = cpu.select(q, w, rows, start={NUM_KEYS} - {NUM_QUERIES}, topk={TOPK})
assert chosen.shape == ({NUM_QUERIES}, {TOPK}) and int(chosen.min()) >= 0
assert bool((chosen[:, 1:] > chosen[:, :-1]).all())
print(peak_bytes() - before)
"""


@pytest.mark.slow
def test_a_million_keys_need_no_score_matrix() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 <= int(done.stdout) < LIMIT_BYTES, f"{int(done.stdout):,} bytes beyond the keys"
