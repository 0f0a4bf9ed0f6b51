"""What every kernel backend offers: one Protocol an op folder. A backend is a module with these function names.

Legend: T tokens, H q/k heads, G value heads (G = n H; value head g uses q/k head g * H // G), K key dim, V value dim,
N segments, C channels, W conv width, D hidden, I indexer heads, X indexer dim, S selected keys, L visible rows,
R latent rank (kv_lora_rank), P rope dim, E experts, A experts a token, B blocks (AttnRes), M residual streams (mHC).

Segments of one call are given by `offsets`, N+1 row numbers from 0 to T; empty segments and T = 0 are legal everywhere.
Inputs are never changed; outputs may be any dtype that the docstring names. Everything that the docstring calls fp32 is
computed in fp32 (fp64 when the inputs are fp64: the references double as oracles).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

from longprefill.kernels.paged import PagedRows


class Summary(NamedTuple):
    """The affine map of a fragment, `S_out = transition @ S_in + state`. `transition` None means exactly zero."""

    state_GKV: torch.Tensor
    transition_GKK: torch.Tensor | None


class KdaInputs(NamedTuple):
    """What `prepare` and `step` take, in their order."""

    q_THK: torch.Tensor
    k_THK: torch.Tensor
    v_TGV: torch.Tensor
    g_TGK: torch.Tensor
    beta_TG: torch.Tensor


class KdaScan(NamedTuple):
    out_TGV: torch.Tensor
    state_NGKV: torch.Tensor
    """fp32 state after each segment; an empty segment hands on its initial state."""
    interior_BGKV: torch.Tensor
    """fp32 states inside of segments, those that were asked for, in that order."""


class KdaStep(NamedTuple):
    out_NGV: torch.Tensor
    states_GKV: list[torch.Tensor]
    """fp32 states after the token, one tensor a request: each lives and dies with its own job."""


class KdaKernels(Protocol):
    """Kimi Delta Attention (spec: arXiv 2510.26692; README in kernels/kda). State [G, K, V] fp32, decay first, output
    read after the update. Valid for every gate in [-inf, 0]; strictly causal."""

    def gate(
        self, x_TGK: torch.Tensor, a_log_G: torch.Tensor, dt_bias_GK: torch.Tensor, lower_bound: float | None
    ) -> torch.Tensor:
        """Log decay g, fp32. `lower_bound` None: -exp(A_log) softplus(x + dt_bias); else lower_bound
        sigmoid(exp(A_log)(x + dt_bias))."""
        ...

    def l2_normalize(self, x_THK: torch.Tensor) -> torch.Tensor:
        """x / sqrt(sum x^2 + 1e-6) over the last dim, in fp32, result fp32."""
        ...

    def make_inputs(
        self,
        raw_TC: torch.Tensor,
        weight_CW: torch.Tensor,
        decay_TGK: torch.Tensor,
        beta_TG: torch.Tensor,
        *,
        offsets: Sequence[int],
        history_NWC: torch.Tensor,
        num_heads: int,
        a_log_G: torch.Tensor,
        dt_bias_GK: torch.Tensor,
        lower_bound: float | None,
        largest_beta: float,
    ) -> KdaInputs:
        """All that lies between the projections and the recurrence. `raw` holds the projected channels of q, k (H =
        `num_heads` each) and v; they go through `causal_conv_silu` (`weight`, `offsets` and `history` as there), q and
        k through `l2_normalize`, `decay` through `gate`; beta is `largest_beta` sigmoid(logits). v in raw's dtype, the
        rest fp32 and nowhere rounded to less on the way."""
        ...

    def prepare(
        self,
        q_THK: torch.Tensor,
        k_THK: torch.Tensor,
        v_TGV: torch.Tensor,
        g_TGK: torch.Tensor,
        beta_TG: torch.Tensor,
        *,
        offsets: Sequence[int],
        scale: float,
    ) -> Any:
        """The state-independent part of every tile of every segment, shared by `summarize` and `scan` (opaque to
        callers).
        q, k are already normalized; g is the fp32 log decay, beta in [0, 2]; `scale` multiplies the output (K **
        -0.5)."""
        ...

    def summarize(self, prepared: Any, segment: int, *, initial_state_GKV: torch.Tensor | None = None) -> Summary:
        """[E | M] of one segment, fp32. With an initial state given, E is the true final state and transition is
        None."""
        ...

    def scan(
        self,
        prepared: Any,
        initial_state_NGKV: torch.Tensor | None,
        *,
        interior: Sequence[tuple[int, int]] = (),
    ) -> KdaScan:
        """Outputs (dtype of v) and final states of all segments from their initial states (None: zeros). `interior`
        asks for B states on the way, as a cache of prefixes wants them at page borders: (segment, number of its rows
        that they come after), a multiple of 64 and at most its length."""
        ...

    def step(
        self,
        q_NHK: torch.Tensor,
        k_NHK: torch.Tensor,
        v_NGV: torch.Tensor,
        g_NGK: torch.Tensor,
        beta_NG: torch.Tensor,
        states_GKV: Sequence[torch.Tensor],
        *,
        scale: float,
        in_place: bool = False,
    ) -> KdaStep:
        """One token of each of N requests, outputs in v's dtype: `scan` over segments of one row. Each state is read
        and written once. `in_place` writes the new states over the given ones and returns those."""
        ...


class ConvKernels(Protocol):
    def causal_conv_silu(
        self, x_TC: torch.Tensor, weight_CW: torch.Tensor, *, offsets: Sequence[int], history_NWC: torch.Tensor
    ) -> torch.Tensor:
        """Depthwise causal conv then SiLU, [T, C] in x's dtype, computed in fp32. `history_NWC` is [N, W-1, C], the raw
        projected rows before each segment (zeros at a job's start); tap W-1 multiplies the current row."""
        ...


class IndexerKernels(Protocol):
    """Lightning indexer. Score I[t, s] = sum_i w[t, i] relu(q[t, i] . k[s]), fp32. Order: score descending, then index
    ascending; NaN counts as -inf, -0 as 0. Never more score memory than one block."""

    def select(
        self, q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, *, start: int, topk: int
    ) -> torch.Tensor:
        """Query t is at position start + t and sees keys [0, start + t]. int32 [T, topk]: the min(topk, visible) best
        positions, ascending by position, then -1."""
        ...

    def scores(
        self, q_TIX: torch.Tensor, w_TI: torch.Tensor, keys: PagedRows, positions_TS: torch.Tensor
    ) -> torch.Tensor:
        """fp32 scores of given positions ([T, S] int, -1 gives -inf): to prove near ties."""
        ...

    def pool_keys(self, k_TX: torch.Tensor, gate_TX: torch.Tensor, pool_bias_QX: torch.Tensor) -> torch.Tensor:
        """k-pool (glm5_next): groups of Q consecutive rows (T is a multiple of Q) to one key each, a per-channel
        softmax over gate + bias. [T/Q, X] fp32."""
        ...

    def select_pooled(
        self, q_TIX: torch.Tensor, w_TI: torch.Tensor, pooled: PagedRows, *, start: int, topk: int, pool: int
    ) -> torch.Tensor:
        """Pools whose last token is visible compete for topk // pool places; their tokens and the incomplete tail (up
        to pool - 1 tokens, the query's own included) are selected. int32 [T, topk + pool - 1], ascending, then -1."""
        ...


class MlaKernels(Protocol):
    """Multi-head latent attention over cached rows [c (R) | k_R (P)]; softmax in fp32. `scale` is always passed."""

    def sparse(
        self, q_THL: torch.Tensor, rows: PagedRows, indices_TS: torch.Tensor, *, scale: float, latent_rank: int
    ) -> torch.Tensor:
        """Absorbed form: q [T, H, R + P], indices int32 with -1 for no key; [T, H, R] in q's dtype. A row without a
        key gives zeros; duplicates are not allowed. Masked lanes contribute exactly 0 even where the page holds NaN."""
        ...

    def dense(
        self,
        q_THQ: torch.Tensor,
        rows: PagedRows,
        w_uk_HNR: torch.Tensor,
        w_uv_HVR: torch.Tensor,
        *,
        start: int,
        scale: float,
    ) -> torch.Tensor:
        """Expanded form, block by block: q [T, H, nope + P] (rope last), query t sees rows [0, start + t]; [T, H,
        V]."""
        ...

    def selected(
        self,
        q_THQ: torch.Tensor,
        rows: PagedRows,
        indices_TS: torch.Tensor,
        w_uk_HNR: torch.Tensor,
        w_uv_HVR: torch.Tensor,
        *,
        start: int,
        scale: float,
    ) -> torch.Tensor:
        """q and result as of `dense`, keys as of `sparse`, none behind the query's own position; the backend takes the
        faster form."""
        ...


class Routing(NamedTuple):
    expert_TA: torch.Tensor
    """int64 [T, A]."""
    weight_TA: torch.Tensor
    """fp32 [T, A]."""


class MoeKernels(Protocol):
    def route(
        self,
        logits_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
        *,
        topk: int,
        scoring: str,
        num_groups: int,
        topk_groups: int,
        normalize: bool,
        scale: float,
    ) -> Routing:
        """`scoring` "sigmoid" or "softmax", fp32. The bias steers the choice only, never the weight. With groups, a
        group's
        score is the sum of its two best experts and only the best `topk_groups` groups compete. Ties: lower expert
        first."""
        ...

    def experts(
        self,
        x_TD: torch.Tensor,
        routing: Routing,
        gate_up_EJD: torch.Tensor,
        down_EDF: torch.Tensor,
        *,
        activation: str,
        clamp: float | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """sum over chosen experts of weight * down(act(gate) * up), J = 2F with gate rows first. fp32 accumulation over
        experts, in ascending expert order; result in `out_dtype` (None: x's). Expert -1 adds nothing. `activation`
        "silu" or "gelu". With `clamp`, gate is
        cut above it and up beyond it on both sides, before the activation."""
        ...


class LinearKernels(Protocol):
    """Products with weights, and what a feed-forward does between them."""

    def linear(
        self, x_TD: torch.Tensor, weight_ED: torch.Tensor, *, out_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x weight^T, [T, E] in x's dtype; fp32 sums for bf16. Written to `out_TE`, and that returned, where it is
        given."""
        ...

    def gated(self, gate_up_TJ: torch.Tensor, *, activation: str, clamp: float | None = None) -> torch.Tensor:
        """act(gate) * up, [T, F] in the operand's dtype, computed in fp32 with one rounding at the end. J = 2F, gate
        first; `activation` and `clamp` as of `MoeKernels.experts`."""
        ...

    def linear_fp32(self, x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        """x weight^T, fp32 [T, E]: both operands as they are, products and sums in fp32."""
        ...


class AttnResPhase1(NamedTuple):
    max_QT: torch.Tensor
    sum_QT: torch.Tensor
    weighted_QTD: torch.Tensor


class HyperMix(NamedTuple):
    input_TD: torch.Tensor
    """What the sublayer reads, in the streams' dtype."""
    post_TM: torch.Tensor
    """fp32 weights of the sublayer's output in each stream."""
    comb_TMM: torch.Tensor
    """fp32 weights from stream (first M) to stream (second M), columns and rows near sum 1."""


class ResidualKernels(Protocol):
    """Attention Residuals (arXiv 2603.15031): logit_i = query . rmsnorm(v_i), softmax over sources, values NOT
    normalised. `query_D` here already contains the norm's weight (query * norm.weight). All fp32."""

    def mix(self, sources_BTD: Sequence[torch.Tensor], query_D: torch.Tensor, *, eps: float) -> torch.Tensor:
        """One-phase form over all sources; result in the sources' dtype."""
        ...

    def prepare(self, blocks_BTD: Sequence[torch.Tensor], queries_QD: torch.Tensor, *, eps: float) -> AttnResPhase1:
        """Phase 1, once per block for all its queries, fp32."""
        ...

    def update(
        self, partial_TD: torch.Tensor | None, phase1: AttnResPhase1, query: int, query_D: torch.Tensor, *, eps: float
    ) -> torch.Tensor:
        """Phase 2 for query number `query` of phase 1: adds the running partial (None: nothing yet). Result in the
        partial's dtype, or fp32 without one."""
        ...

    def hyper_mix(
        self,
        streams_TMD: torch.Tensor,
        projection_WF: torch.Tensor,
        base_W: torch.Tensor,
        scale_3: torch.Tensor,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
        input_norm_D: torch.Tensor | None = None,
        input_eps: float = 0.0,
    ) -> HyperMix:
        """Hyper-connections (mHC) before a sublayer: mixing weights of W = 2M + M M numbers a token from its M streams
        (F = M D), and the sublayer's input. fp32. With `input_norm_D` the input has gone through `rms_norm`."""
        ...

    def hyper_update(
        self, streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
    ) -> torch.Tensor:
        """After it: stream j becomes sum_i comb[i, j] stream i + post[j] output. [T, M, D] in the streams' dtype, a new
        tensor."""
        ...

    def hyper_update_mix(
        self,
        streams_TMD: torch.Tensor,
        output_TD: torch.Tensor,
        post_TM: torch.Tensor,
        comb_TMM: torch.Tensor,
        projection_WF: torch.Tensor,
        base_W: torch.Tensor,
        scale_3: torch.Tensor,
        *,
        iterations: int,
        eps: float,
        norm_eps: float,
        input_norm_D: torch.Tensor | None = None,
        input_eps: float = 0.0,
    ) -> HyperMix:
        """Between two sublayers: `hyper_update` written over the streams (the one input that changes), then `hyper_mix`
        of them for the next."""
        ...

    def hyper_final(
        self, streams_TMD: torch.Tensor, output_TD: torch.Tensor, post_TM: torch.Tensor, comb_TMM: torch.Tensor
    ) -> torch.Tensor:
        """Behind the last sublayer: the mean of what `hyper_update` gives, [T, D] in the streams' dtype."""
        ...


class NormKernels(Protocol):
    """Normalisations over the last dim, computed in fp32; result in x's shape and dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x), cast to x's dtype, then times weight in that dtype (Hugging Face's order)."""
        ...

    def add_rms_norm(
        self, sum_TD: torch.Tensor, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds x to `sum_TD`, which is written over (the one input that changes), and returns `rms_norm` of it."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias, one cast at the end."""
        ...

    def gated_rms_norm(
        self, x_TGV: torch.Tensor, gate_TGV: torch.Tensor, weight_V: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """x / rms(x) * weight * sigmoid(gate), one cast at the end: KDA's output norm."""
        ...


class RopeKernels(Protocol):
    def rotate(
        self,
        x_THP: torch.Tensor,
        positions_T: torch.Tensor,
        inv_freq_P2: torch.Tensor,
        pairing: Literal["interleaved", "half"],
    ) -> torch.Tensor:
        """Pairs of dims ((0, 1), (2, 3), ... or (i, i + P / 2)) turned by position * frequency, order kept. Angles in
        fp64 (give fp64 frequencies: kernels/rope/frequencies.py), the rotation in fp32, result in x's dtype."""
        ...


class LogProbs(NamedTuple):
    token: float
    """Natural logarithm of the token's probability."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), best first."""


class SamplingKernels(Protocol):
    def sample(
        self, logits_V: torch.Tensor, *, temperature: float, top_p: float, seed: int, sample: int, position: int
    ) -> int:
        """temperature 0: argmax, lowest id on ties. Else counter-based: the uniform number depends on (seed, sample,
        position) only, never on call order."""
        ...

    def logprobs(self, logits_V: torch.Tensor, *, token: int, num_top: int) -> LogProbs:
        """fp32 log-softmax of the logits as they are (no temperature, no nucleus): the token's, and the `num_top` best
        (log-probability descending, then id ascending; forbidden tokens left out)."""
        ...
