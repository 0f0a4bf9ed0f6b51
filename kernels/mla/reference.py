"""Latent attention by its formulas, one query at a time. Runs in fp64 when the queries are fp64.

Legend: T queries, H heads, L = R + P latent row (c | k_R), R latent rank, P rope dim, S places, Q = nope + P query dim,
N nope dim, V value dim, K visible rows.
"""

from __future__ import annotations

import torch

from longprefill.kernels.paged import PagedRows


def sparse(
    q_THL: torch.Tensor, rows: PagedRows, indices_TS: torch.Tensor, *, scale: float, latent_rank: int
) -> torch.Tensor:
    """[T, H, R] in q's dtype: softmax(scale * q . row) over the selected rows, applied to their first R numbers."""
    precision = _precision(q_THL)
    out_THR = torch.zeros(*q_THL.shape[:2], latent_rank, dtype=precision, device=q_THL.device)
    for t, indices_S in enumerate(indices_TS):
        valid_S = indices_S[indices_S >= 0].long()
        if len(valid_S):
            rows_SL = rows.gather(valid_S, precision)
            weights_HS = (q_THL[t].to(precision) @ rows_SL.T * scale).softmax(dim=-1)
            out_THR[t] = weights_HS @ rows_SL[:, :latent_rank]
    return out_THR.to(q_THL.dtype)


def dense(
    q_THQ: torch.Tensor, rows: PagedRows, w_uk_HNR: torch.Tensor, w_uv_HVR: torch.Tensor, *, start: int, scale: float
) -> torch.Tensor:
    """[T, H, V] in q's dtype: keys and values of every head expanded, query t over rows [0, start + t]."""
    precision = _precision(q_THQ)
    num_heads, nope, rank = w_uk_HNR.shape
    out_THV = torch.zeros(len(q_THQ), num_heads, w_uv_HVR.shape[1], dtype=precision, device=q_THQ.device)
    for t, q_HQ in enumerate(q_THQ.to(precision)):
        rows_KL = rows.read(0, start + t + 1, precision)
        c_KR, rope_KP = rows_KL[:, :rank], rows_KL[:, rank:]
        keys_HKN = torch.einsum("kr,hnr->hkn", c_KR, w_uk_HNR.to(precision))
        values_HKV = torch.einsum("kr,hvr->hkv", c_KR, w_uv_HVR.to(precision))
        logits_HK = torch.einsum("hn,hkn->hk", q_HQ[:, :nope], keys_HKN) + q_HQ[:, nope:] @ rope_KP.T
        out_THV[t] = torch.einsum("hk,hkv->hv", (logits_HK * scale).softmax(dim=-1), values_HKV)
    return out_THV.to(q_THQ.dtype)


def selected(
    q_THQ: torch.Tensor,
    rows: PagedRows,
    indices_TS: torch.Tensor,
    w_uk_HNR: torch.Tensor,
    w_uv_HVR: torch.Tensor,
    *,
    start: int,
    scale: float,
) -> torch.Tensor:
    """[T, H, V] in q's dtype: query t over the rows that it selected, their keys and values expanded."""
    precision = _precision(q_THQ)
    num_heads, nope, rank = w_uk_HNR.shape
    out_THV = torch.zeros(len(q_THQ), num_heads, w_uv_HVR.shape[1], dtype=precision, device=q_THQ.device)
    for t, indices_S in enumerate(indices_TS):
        valid_S = indices_S[indices_S >= 0].long()
        if len(valid_S):
            rows_SL = rows.gather(valid_S, precision)
            keys_HSN = torch.einsum("sr,hnr->hsn", rows_SL[:, :rank], w_uk_HNR.to(precision))
            values_HSV = torch.einsum("sr,hvr->hsv", rows_SL[:, :rank], w_uv_HVR.to(precision))
            q_HQ = q_THQ[t].to(precision)
            logits_HS = torch.einsum("hn,hsn->hs", q_HQ[:, :nope], keys_HSN) + q_HQ[:, nope:] @ rows_SL[:, rank:].T
            out_THV[t] = torch.einsum("hs,hsv->hv", (logits_HS * scale).softmax(dim=-1), values_HSV)
    return out_THV.to(q_THQ.dtype)


def _precision(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
