"""The model under training: longprefill_hybrid in plain torch operators with autograd, tile by tile.

It computes what the engine computes (a test compares logits), on whole sequences side by side and from the canonical
parameters of `workers/model/parameters.py`. Two differences of form, none of result: attention is dense (the indexer
learns from it, `kernels/dsa` selects with it), and the last layer is evaluated only at the rows whose logits are asked
for, so that a step's cost is linear in its tokens where only that layer attends.

    B sequences, T tokens of each, N = B T rows, D hidden, C conv channels, H heads, K key dim, V value dim, F tiles of
    S tokens, R asked rows of each sequence, L latent rank, I indexer heads, X indexer dim
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from longprefill.workers.model.config import AttnResConfig, KdaConfig, MlaConfig, ModelConfig

Parameters = dict[str, torch.Tensor]
TILE_TOKENS = 32
"""With gates of at least -5 a tile's decays around its middle lie within exp(+-80), which fp32 holds."""
L2_EPS = 1e-6
MAX_CONV_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    logits_BRV: torch.Tensor
    index_loss: torch.Tensor
    """Mean over DSA layers of KL(attention || softmax of index scores) at the asked rows, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Rows whose logits are wanted."""

    rows_BR: torch.Tensor
    """int64 positions."""
    weight_BR: torch.Tensor
    """Share of each row in the index loss; all together sum to 1."""


class Trainee:
    """A model of this config as a function of its parameters.

    Args:
        product_dtype: of the projections' products, whose results are fp32 again. The engine's default is bf16 too.
        compiled: torch.compile fuses what lies between the products; needs a C++ compiler and a minute at first use.
            What is compiled depends on N only, so sequences of any length share it.
    """

    def __init__(
        self, config: ModelConfig, *, product_dtype: torch.dtype = torch.float32, compiled: bool = False
    ) -> None:
        self.config = config

        def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.linear(x.to(product_dtype), weight.to(product_dtype)).float()

        def fused(function):
            bound = functools.partial(function, linear)
            return torch.compile(bound, dynamic=False) if compiled else bound

        self._linear = linear
        self._tiles, self._outputs, self._feed_forward = fused(kda_tiles), fused(kda_outputs), fused(feed_forward)

    def __call__(
        self, parameters: Parameters, ids_BT: torch.Tensor, asked: Asked, *, with_index: bool = True
    ) -> Outputs:
        """Logits of the asked rows, and the index loss or 0. T must be a multiple of the tile."""
        config = self.config
        batch, length = ids_BT.shape
        stream = Stream(F.embedding(ids_BT.reshape(-1), parameters["embed"]), parameters, config)
        flat_rows = (asked.rows_BR + torch.arange(batch)[:, None] * length).reshape(-1)
        # 1 where the row `back` tokens earlier is of the same sequence
        positions_N = torch.arange(length).repeat(batch)
        same_NW = torch.stack([(positions_N >= back).float() for back in range(1, MAX_CONV_WIDTH)], dim=1)
        index_losses: list[torch.Tensor] = []
        last = len(config.layers) - 1
        for index, layer in enumerate(config.layers):
            weights = {
                name.split(".", 2)[2]: p for name, p in parameters.items() if name.startswith(f"layers.{index}.")
            }
            x_ND = rms_norm(stream.mixer_input(index), weights["mixer_norm"], config.norm_eps)
            if isinstance(layer.mixer, KdaConfig):
                stream.add(self._kda(x_ND, weights, layer.mixer, batch, same_NW))
            else:
                mixed, index_loss = attention(
                    x_ND, weights, layer.mixer, asked, self._linear, only_asked=index == last, with_index=with_index
                )
                if index == last:
                    stream.keep_rows(flat_rows)
                stream.add(mixed)
                if index_loss is not None:
                    index_losses.append(index_loss)
            x_ND = rms_norm(stream.ffn_input(index), weights["ffn_norm"], config.norm_eps)
            run = functools.partial(feed_forward, self._linear) if index == last else self._feed_forward
            stream.add(run(x_ND, weights["ffn.gate_up"], weights["ffn.down"]))
        final_ND = rms_norm(stream.final(), parameters["final_norm"], config.norm_eps)
        if isinstance(config.layers[last].mixer, KdaConfig):
            final_ND = final_ND[flat_rows]
        logits_NV = F.linear(final_ND, parameters["embed" if config.tie_embeddings else "head"])
        index_loss = torch.stack(index_losses).mean() if index_losses else logits_NV.new_zeros(())
        return Outputs(logits_BRV=logits_NV.view(batch, -1, config.vocab_size), index_loss=index_loss)

    def _kda(
        self, x_ND: torch.Tensor, weights: Parameters, config: KdaConfig, batch: int, same_NW: torch.Tensor
    ) -> torch.Tensor:
        """The KDA mixer of sequences that all start from a zero state."""
        own = {name.removeprefix("kda."): p for name, p in weights.items() if name.startswith("kda.")}
        transition, extra, *tiles = self._tiles(x_ND, own, config, same_NW)
        chains = (batch, -1, config.num_value_heads)
        states = states_before(transition.unflatten(0, chains), extra.unflatten(0, chains)).flatten(0, 2)
        return self._outputs(x_ND, own, config, states, *tiles)


Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def feed_forward(linear: Linear, x_ND: torch.Tensor, gate_up_FD: torch.Tensor, down_DF: torch.Tensor) -> torch.Tensor:
    """SwiGLU."""
    gate_NF, up_NF = linear(x_ND, gate_up_FD).chunk(2, dim=-1)
    return linear(F.silu(gate_NF) * up_NF, down_DF)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dim."""
    return F.rms_norm(x, weight.shape, weight, eps)


class Stream:
    """The residual stream, plain or Block Attention Residuals. With queries of zero the latter is the mean of all
    sources, which the norm behind it makes the same as their sum: training starts as a plain stream."""

    def __init__(self, embedding_ND: torch.Tensor, parameters: Parameters, config: ModelConfig) -> None:
        if config.residual is not None and not isinstance(config.residual, AttnResConfig):
            raise ValueError("hyper-connections cannot be trained here: use attn_res_block_size or a plain stream")
        self.parameters = parameters
        self.config = config.residual
        self.blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.partial: torch.Tensor | None = embedding_ND

    def mixer_input(self, layer: int) -> torch.Tensor:
        mixed = self._mix(f"layers.{layer}.mixer_res")
        if self.config is not None and layer % self.config.block_layers == 0:
            assert self.partial is not None
            self.blocks.append((self.partial, self._inverse_rms(self.partial)))
            self.partial = None
        return mixed

    def ffn_input(self, layer: int) -> torch.Tensor:
        return self._mix(f"layers.{layer}.ffn_res")

    def add(self, output_ND: torch.Tensor) -> None:
        self.partial = output_ND if self.partial is None else self.partial + output_ND

    def final(self) -> torch.Tensor:
        return self._mix("final_res")

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Forgets all other rows."""
        self.blocks = [(block[rows], inverse[rows]) for block, inverse in self.blocks]
        if self.partial is not None:
            self.partial = self.partial[rows]

    def _inverse_rms(self, value_ND: torch.Tensor) -> torch.Tensor:
        assert self.config is not None
        return torch.rsqrt(value_ND.square().mean(-1) + self.config.eps)

    def _mix(self, site: str) -> torch.Tensor:
        if self.config is None:
            assert self.partial is not None
            return self.partial
        sources = [*self.blocks]
        if self.partial is not None:
            sources.append((self.partial, self._inverse_rms(self.partial)))
        if len(sources) == 1:
            return sources[0][0]
        query_D = self.parameters[site + ".query"] * self.parameters[site + ".norm"]
        share_NJ = torch.stack([(value @ query_D) * inverse for value, inverse in sources], dim=1).softmax(1)
        mixed = share_NJ[:, :1] * sources[0][0]
        for number, (value, _) in enumerate(sources[1:], start=1):
            mixed = torch.addcmul(mixed, share_NJ[:, number : number + 1], value)
        return mixed


def kda_tiles(
    linear: Linear, x_ND: torch.Tensor, weights: Parameters, config: KdaConfig, same_NW: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """All of a KDA layer that does not depend on states, for Y = B F G tiles of S tokens. In a tile (kernels/kda):

    Delta = (I + L)^-1 beta (V - (P K) S),  O = scale (P Q) S + B Delta,  S' = diag(P_end) S + (R K)^T Delta

    Returns (M, E, W, U, scale P Q, B): S' = M S + E and Delta = U - W S. Decays are factorised around the tile's
    middle, D_ij = exp(G_i - a) exp(a - G_j).
    """
    heads, values, key_dim, value_dim = config.num_heads, config.num_value_heads, config.key_dim, config.value_dim
    raw_NC = linear(x_ND, torch.cat((weights["q_proj"], weights["k_proj"], weights["v_proj"])))
    conv_CW, width = weights["conv"], config.conv_width
    mixed_NC = raw_NC * conv_CW[:, width - 1]
    padded_NC = F.pad(raw_NC, (0, 0, width - 1, 0))
    for back in range(1, width):
        earlier_NC = padded_NC[width - 1 - back : padded_NC.shape[0] - back]
        mixed_NC = mixed_NC + earlier_NC * same_NW[:, back - 1 : back] * conv_CW[:, width - 1 - back]
    q_NC, k_NC, v_NC = F.silu(mixed_NC).split((heads * key_dim, heads * key_dim, values * value_dim), dim=-1)
    raw_NC = linear(linear(x_ND, weights["f_a"]), weights["f_b"]) + weights["dt_bias"]
    slope_C = weights["a_log"].exp().repeat_interleave(key_dim)
    assert config.lower_bound is not None  # the bounded gate is what keeps a tile's decays within fp32
    g_NC = config.lower_bound * torch.sigmoid(raw_NC * slope_C)
    beta_NG = torch.sigmoid(linear(x_ND, weights["b_proj"])) * (2.0 if config.allow_neg_eigval else 1.0)

    def tiles(stream: torch.Tensor, dim: int) -> torch.Tensor:
        """[Y, S, dim]"""
        tiled = stream.reshape(-1, TILE_TOKENS, stream.shape[-1] // dim, dim).transpose(1, 2)
        if tiled.shape[1] != values:
            tiled = tiled.repeat_interleave(values // tiled.shape[1], dim=1)
        return tiled.reshape(-1, TILE_TOKENS, dim)

    q, k, v = l2_normalize(tiles(q_NC, key_dim)), l2_normalize(tiles(k_NC, key_dim)), tiles(v_NC, value_dim)
    beta = tiles(beta_NG, 1)
    log_P = tiles(g_NC, key_dim).cumsum(1, dtype=torch.float64)
    middle = log_P[:, TILE_TOKENS // 2 - 1 : TILE_TOKENS // 2]
    log_rise, anchor = (log_P - middle).float(), middle.float()
    # two exponentials: the gradient of a quotient would square what is near the end of fp32's range
    rise, fall = log_rise.exp(), (-log_rise).exp()
    k_rise, q_rise, k_fall = k * rise, q * (rise * key_dim**-0.5), k * fall
    start, end = anchor.exp(), rise[:, -1:]
    products = torch.bmm(torch.cat((k_rise, q_rise), dim=1), k_fall.transpose(1, 2))
    lower, attention = products.split(TILE_TOKENS, dim=1)
    # masked before anything else: above the diagonal a product may be infinite
    above = torch.ones(TILE_TOKENS, TILE_TOKENS, dtype=torch.bool).triu()
    lower = lower.masked_fill(above, 0.0) * beta
    attention = attention.masked_fill(above.triu(1), 0.0)
    right = torch.cat((k_rise * start, v), dim=-1) * beta
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    w, u = solved.split((key_dim, value_dim), dim=-1)
    folded = torch.bmm((k_fall * end).transpose(1, 2), solved)
    transition = torch.diag_embed((start * end)[:, 0]) - folded[..., :key_dim]
    return transition, folded[..., key_dim:], w, u, q_rise * start, attention


def kda_outputs(
    linear: Linear, x_ND: torch.Tensor, weights: Parameters, config: KdaConfig, states: torch.Tensor,
    w: torch.Tensor, u: torch.Tensor, query: torch.Tensor, attention: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The mixer's output [N, D] from the state before each tile [Y, K, V] and what `kda_tiles` gave."""
    delta = torch.baddbmm(u, w, states, alpha=-1)
    out = torch.baddbmm(torch.bmm(query, states), attention, delta)
    values, value_dim = config.num_value_heads, config.value_dim
    out_NGV = out.view(-1, values, TILE_TOKENS, value_dim).transpose(1, 2).reshape(-1, values, value_dim)
    gate_NF = linear(linear(x_ND, weights["g_a"]), weights["g_b"])
    normed_NF = rms_norm(out_NGV, weights["o_norm"], config.norm_eps).flatten(1)
    return linear(normed_NF * torch.sigmoid(gate_NF), weights["o_proj"])


def states_before(transition_BFGKK: torch.Tensor, extra_BFGKV: torch.Tensor) -> torch.Tensor:
    """The state before each tile [B, F, G, K, V], from zero."""
    batch, num_tiles, heads = extra_BFGKV.shape[:3]
    state = extra_BFGKV.new_zeros(batch * heads, *extra_BFGKV.shape[3:])
    before = [state]
    transitions = transition_BFGKK.transpose(0, 1).flatten(1, 2).unbind(0)
    extras = extra_BFGKV.transpose(0, 1).flatten(1, 2).unbind(0)
    for number in range(num_tiles - 1):
        state = torch.baddbmm(extras[number], transitions[number], state)
        before.append(state)
    return torch.stack(before).unflatten(1, (batch, heads)).transpose(0, 1)


def l2_normalize(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def attention(
    x_ND: torch.Tensor,
    weights: Parameters,
    config: MlaConfig,
    asked: Asked,
    linear: Linear,
    *,
    only_asked: bool,
    with_index: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """MLA without positions over all earlier rows, and the indexer's loss at the asked rows. With `only_asked` the
    output has only those rows, [B R, D]."""
    if config.rope is not None or config.rope_dim or config.q_lora_rank is not None or config.gated:
        raise ValueError("only MLA without positions, query latent and output gate is trained here")
    batch = asked.rows_BR.shape[0]
    heads = config.num_heads
    latent_NL = rms_norm(linear(x_ND, weights["mla.kv_a"]), weights["mla.kv_a_norm"], config.kv_norm_eps)
    expanded = linear(latent_NL, weights["mla.kv_b"]).view(batch, -1, heads, config.nope_dim + config.value_dim)
    key_BHTN, value_BHTV = expanded.transpose(1, 2).split((config.nope_dim, config.value_dim), dim=-1)
    length = key_BHTN.shape[2]
    x_BTD = x_ND.view(batch, length, -1)
    asked_BRD = x_BTD.gather(1, asked.rows_BR[..., None].expand(-1, -1, x_BTD.shape[-1]))

    def queries(x_BSD: torch.Tensor) -> torch.Tensor:
        return linear(x_BSD, weights["mla.q_proj"]).unflatten(-1, (heads, config.nope_dim)).transpose(1, 2)

    hidden_BRT = torch.arange(length) > asked.rows_BR[..., None]
    learns_index = with_index and config.indexer is not None
    share_BHRT = None
    if only_asked or learns_index:
        with torch.set_grad_enabled(only_asked and torch.is_grad_enabled()):
            scores_BHRT = torch.matmul(queries(asked_BRD), key_BHTN.transpose(2, 3)) * config.scale
            share_BHRT = scores_BHRT.masked_fill(hidden_BRT[:, None], -torch.inf).softmax(-1)
    if only_asked:
        assert share_BHRT is not None
        mixed_BHSV = torch.matmul(share_BHRT, value_BHTV)
    else:
        mixed_BHSV = F.scaled_dot_product_attention(
            queries(x_BTD), key_BHTN, value_BHTV, is_causal=True, scale=config.scale
        )
    mixed_NF = mixed_BHSV.transpose(1, 2).reshape(-1, heads * config.value_dim)
    out_ND = linear(mixed_NF, weights["mla.o_proj"])
    if not learns_index or share_BHRT is None:
        return out_ND, None
    target_BRT = share_BHRT.detach().mean(1)
    logits_BRT = index_scores(x_BTD.detach(), asked_BRD.detach(), weights, config)
    logits_BRT = logits_BRT.masked_fill(hidden_BRT, -torch.inf)
    log_ratio_BRT = target_BRT.clamp_min(1e-20).log() - logits_BRT.log_softmax(-1).clamp_min(-1e4)
    return out_ND, ((target_BRT * log_ratio_BRT).sum(-1) * asked.weight_BR).sum()


def index_scores(x_BTD: torch.Tensor, asked_BRD: torch.Tensor, weights: Parameters, config: MlaConfig) -> torch.Tensor:
    """[B, R, T]: sum over heads of weight * relu(query . key)."""
    indexer = config.indexer
    assert indexer is not None
    key_BTX = F.layer_norm(
        F.linear(x_BTD, weights["indexer.wk"]),
        (indexer.head_dim,),
        weights["indexer.k_norm.weight"],
        weights["indexer.k_norm.bias"],
        indexer.norm_eps,
    )
    query_BRIX = F.linear(asked_BRD, weights["indexer.wq_b"]).unflatten(-1, (indexer.num_heads, indexer.head_dim))
    weight_BRI = F.linear(asked_BRD, weights["indexer.weights_proj"]) * (indexer.num_heads * indexer.head_dim) ** -0.5
    products_BIRT = torch.matmul(query_BRIX.transpose(1, 2), key_BTX.transpose(1, 2)[:, None]).relu()
    return torch.einsum("birt,bri->brt", products_BIRT, weight_BRI)
