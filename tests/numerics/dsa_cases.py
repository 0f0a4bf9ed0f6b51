"""Inputs of the attention-side tests: poisoned caches, and a whole DSA layer made of the kernels.

Legend: T rows or queries, W numbers a row, H heads, I indexer heads, X indexer dim, D hidden, R latent rank,
P rope dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from longprefill.kernels.dsa import plain as plain_indexer
from longprefill.kernels.mla import plain as plain_mla
from longprefill.kernels.norm import plain as norm
from longprefill.kernels.paged import PagedRows, RowFormat
from longprefill.kernels.quant.formats import Fp32Rows
from longprefill.kernels.rope import plain as rope

PAGE_ROWS = 64
SPARE_PAGES = 3


def make_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def paged(rows_TW: torch.Tensor, row_format: RowFormat | None = None, *, page_rows: int = PAGE_ROWS) -> PagedRows:
    """The rows in pages scattered over a pool; every byte that holds no row is 0xFF, which is NaN in all formats."""
    row_format = row_format or Fp32Rows(rows_TW.shape[1])
    num_pages = -(-len(rows_TW) // page_rows)
    pool_NPB = torch.full((num_pages + SPARE_PAGES, page_rows, row_format.row_bytes), 0xFF, dtype=torch.uint8)
    table = torch.randperm(len(pool_NPB), generator=make_generator(num_pages))[:num_pages].tolist()
    encoded_TB = row_format.encode(rows_TW)
    for page, physical in enumerate(table):
        rows_PB = encoded_TB[page * page_rows : (page + 1) * page_rows]
        pool_NPB[physical, : len(rows_PB)] = rows_PB
    return PagedRows(pages_NPB=pool_NPB, table=tuple(table), num_rows=len(rows_TW), format=row_format)


def true_scores(q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows) -> torch.Tensor:
    """fp64 [T, L] index scores, NaN as -inf, written without our kernels."""
    k_LX = keys.read(0, keys.num_rows, torch.float64)
    products_TIL = torch.einsum("tix,lx->til", q_TIX.double(), k_LX).relu()
    return torch.einsum("ti,til->tl", w_TI.double(), products_TIL).nan_to_num(nan=-torch.inf, posinf=torch.inf)


@dataclass(frozen=True, kw_only=True)
class DsaLayer:
    """One DSA attention module of DeepSeek-V3.2, run by our kernels with the parameters of a transformers module.

    The defaults are right; the tests of the tests make one of them wrong.
    """

    module: Any
    """transformers' DeepseekV32Attention."""
    inv_freq: torch.Tensor
    topk: int
    latent_format: RowFormat
    key_format: RowFormat
    indexer: ModuleType | Any = plain_indexer
    attention: ModuleType | Any = plain_mla
    index_pairing: Any = "half"
    latent_pairing: Any = "interleaved"
    index_start_shift: int = 0
    has_key_bias: bool = True
    scale: float | None = None

    def run(self, hidden_TD: torch.Tensor, cuts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, D] and chosen positions [T, topk], computed fragment by fragment between the cuts, from pages."""
        positions_T = torch.arange(len(hidden_TD))
        rows_TL, keys_TX = self.cache_rows(hidden_TD, positions_T)
        outputs, choices = [], []
        for start, end in zip((0, *cuts), (*cuts, len(hidden_TD)), strict=True):
            rows = paged(rows_TL[:end], self.latent_format)
            keys = paged(keys_TX[:end], self.key_format)
            out_TD, chosen_TS = self.attend(hidden_TD[start:end], positions_T[start:end], rows, keys, start)
            outputs.append(out_TD)
            choices.append(chosen_TS)
        return torch.cat(outputs), torch.cat(choices)

    def cache_rows(self, hidden_TD: torch.Tensor, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        module, indexer = self.module, self.module.indexer
        latent_TL = hidden_TD @ module.kv_a_proj_with_mqa.weight.T
        c_TR = norm.rms_norm(latent_TL[:, : module.kv_lora_rank], module.kv_a_layernorm.weight, 1e-6)
        rope_TP = self._rotate(latent_TL[:, None, module.kv_lora_rank :], positions_T, self.latent_pairing)[:, 0]
        bias_X = indexer.k_norm.bias if self.has_key_bias else torch.zeros_like(indexer.k_norm.bias)
        key_TX = norm.layer_norm(hidden_TD @ indexer.wk.weight.T, indexer.k_norm.weight, bias_X, 1e-6)
        return torch.cat([c_TR, rope_TP], dim=1), self._rotate_first(key_TX[:, None], positions_T)[:, 0]

    def attend(
        self, hidden_TD: torch.Tensor, positions_T: torch.Tensor, rows: PagedRows, keys: PagedRows, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        module, indexer = self.module, self.module.indexer
        num_tokens, nope = len(hidden_TD), module.qk_nope_head_dim
        c_TQ = norm.rms_norm(hidden_TD @ module.q_a_proj.weight.T, module.q_a_layernorm.weight, 1e-6)
        index_q_TIX = (c_TQ @ indexer.wq_b.weight.T).view(num_tokens, indexer.n_heads, indexer.head_dim)
        w_TI = hidden_TD @ indexer.weights_proj.weight.T * (indexer.n_heads * indexer.head_dim) ** -0.5
        chosen_TS = self.indexer.select(
            self._rotate_first(index_q_TIX, positions_T),
            w_TI,
            keys,
            start=start + self.index_start_shift,
            topk=self.topk,
        )
        q_THQ = (c_TQ @ module.q_b_proj.weight.T).view(num_tokens, module.num_heads, module.qk_head_dim)
        w_uk_HNR, w_uv_HVR = expansion_weights(module)
        q_THL = torch.cat(
            [
                torch.einsum("thn,hnr->thr", q_THQ[..., :nope], w_uk_HNR),
                self._rotate(q_THQ[..., nope:], positions_T, self.latent_pairing),
            ],
            dim=-1,
        )
        scale = module.scaling if self.scale is None else self.scale
        latent_THR = self.attention.sparse(q_THL, rows, chosen_TS, scale=scale, latent_rank=module.kv_lora_rank)
        values_TH = torch.einsum("thr,hvr->thv", latent_THR, w_uv_HVR).reshape(num_tokens, -1)
        return values_TH @ module.o_proj.weight.T, chosen_TS

    def _rotate(self, x_THP: torch.Tensor, positions_T: torch.Tensor, pairing: Any) -> torch.Tensor:
        return rope.rotate(x_THP, positions_T, self.inv_freq, pairing)

    def _rotate_first(self, x_THX: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        rotated = self.module.qk_rope_head_dim
        first = self._rotate(x_THX[..., :rotated], positions_T, self.index_pairing)
        return torch.cat([first, x_THX[..., rotated:]], dim=-1)


def expansion_weights(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(w_uk [H, nope, R], w_uv [H, V, R]) of an MLA module's kv_b_proj."""
    weight_HXR = module.kv_b_proj.weight.view(module.num_heads, -1, module.kv_lora_rank)
    return weight_HXR[:, : module.qk_nope_head_dim], weight_HXR[:, module.qk_nope_head_dim :]


def randomize(module: torch.nn.Module, seed: int) -> None:
    """Random parameters with means and spreads that make a missing norm weight, bias or gate visible."""
    generator = make_generator(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise if name.endswith("weight") else noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
