"""How a model's weights are split over the mesh: heads and columns over tensor parallelism, experts over all ranks.

A rank runs the same layers with a `local_config` (its heads, its columns) and its share of every tensor
(`parameter_ranges`). Context parallelism splits no weights. Torch-free.

    heads       KDA and MLA: divided evenly, so tp must divide their number
    columns     feed-forward and vocabulary: near-even runs, any number
    experts     runs over the whole mesh when `expert_parallel`, any number, some ranks may have none
    replicated  norms, low-rank down projections, latents, the indexer, routers, Attention Residuals, embedding
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from longprefill.partition.errors import UserError
from longprefill.partition.shards import even_ranges
from longprefill.workers.model.config import DenseConfig, KdaConfig, LayerConfig, MlaConfig, ModelConfig, MoeConfig
from longprefill.workers.model.parameters import Shape, parameter_shapes

Ranges = tuple[tuple[range, ...], ...]
"""For every dimension of a tensor the runs of it that a rank holds, one after another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlace:
    """Where a rank is: world rank = cp_rank * num_tp + tp_rank."""

    num_cp: int
    num_tp: int
    cp_rank: int
    tp_rank: int
    expert_parallel: bool
    """Experts are spread over the mesh; else every rank has all of them."""

    @staticmethod
    def of(world_rank: int, *, num_cp: int, num_tp: int, expert_parallel: bool) -> MeshPlace:
        """The place of a world rank."""
        cp_rank, tp_rank = divmod(world_rank, num_tp)
        return MeshPlace(
            num_cp=num_cp, num_tp=num_tp, cp_rank=cp_rank, tp_rank=tp_rank, expert_parallel=expert_parallel
        )

    @property
    def world_rank(self) -> int:
        return self.cp_rank * self.num_tp + self.tp_rank

    @property
    def num_world(self) -> int:
        return self.num_cp * self.num_tp

    @property
    def is_alone(self) -> bool:
        """Whether the rank holds the whole model."""
        return self.num_tp == 1 and not self.expert_parallel


ALONE = MeshPlace(num_cp=1, num_tp=1, cp_rank=0, tp_rank=0, expert_parallel=False)
"""A rank that holds the whole model, as a decode worker does."""


def check_tp(config: ModelConfig, num_tp: int) -> None:
    """Refuses a degree that does not divide the heads.

    Raises:
        UserError: names the layer, its heads and the degrees that work.
    """
    for index, layer in enumerate(config.layers):
        mixer = layer.mixer
        for kind, heads in (("KDA", mixer.num_heads),) if isinstance(mixer, KdaConfig) else (("MLA", mixer.num_heads),):
            if heads % num_tp:
                allowed = ", ".join(str(tp) for tp in range(1, heads + 1) if heads % tp == 0)
                raise UserError(
                    f"--tp {num_tp} does not divide the {heads} {kind} heads of layer {index}: use {allowed}"
                )


def local_config(config: ModelConfig, place: MeshPlace) -> ModelConfig:
    """The model as this rank's layers see it: its heads; expert and vocabulary numbers stay those of the whole."""
    if place.num_tp == 1:
        return config
    check_tp(config, place.num_tp)
    return replace(config, layers=tuple(_local_layer(layer, place) for layer in config.layers))


def expert_ranges(num_experts: int, num_world: int) -> tuple[range, ...]:
    """The experts of every world rank when they are spread over the mesh."""
    return even_ranges(num_experts, num_world)


def parameter_ranges(config: ModelConfig, place: MeshPlace) -> dict[str, Ranges]:
    """What this rank holds of every canonical parameter. `config` is the whole model's."""
    return {name: held_ranges(name, shape, config, place) for name, shape in parameter_shapes(config).items()}


def _local_layer(layer: LayerConfig, place: MeshPlace) -> LayerConfig:
    tp = place.num_tp
    mixer = layer.mixer
    if isinstance(mixer, KdaConfig):
        mixer = replace(mixer, num_heads=mixer.num_heads // tp, num_value_heads=mixer.num_value_heads // tp)
    else:
        mixer = replace(mixer, num_heads=mixer.num_heads // tp)
    return replace(layer, mixer=mixer)


def held_ranges(name: str, shape: Shape, config: ModelConfig, place: MeshPlace) -> Ranges:
    """What this rank holds of one canonical parameter, whose whole shape is given."""
    whole: list[tuple[range, ...]] = [(range(size),) for size in shape]
    if name == "head":
        whole[0] = (even_ranges(shape[0], place.num_tp)[place.tp_rank],)
    if not name.startswith("layers."):
        return tuple(whole)
    _, layer, part = name.split(".", 2)
    spec = config.layers[int(layer)]
    if part.startswith("kda.") and isinstance(spec.mixer, KdaConfig):
        _split_kda(part, whole, spec.mixer, place)
    elif part.startswith("mla.") and isinstance(spec.mixer, MlaConfig):
        _split_mla(part, whole, place)
    elif part.startswith(("ffn.", "moe.")):
        _split_ffn(part, whole, spec.ffn, place)
    return tuple(whole)


def _split_kda(part: str, whole: list[tuple[range, ...]], kda: KdaConfig, place: MeshPlace) -> None:
    if part in ("kda.q_proj", "kda.k_proj", "kda.v_proj", "kda.f_b", "kda.b_proj", "kda.g_b", "kda.g_proj") or part in (
        "kda.dt_bias",
        "kda.a_log",
    ):
        whole[0] = (_share(len(whole[0][0]), place),)
    elif part == "kda.o_proj":
        whole[1] = (_share(len(whole[1][0]), place),)
    elif part == "kda.conv":
        key_width = kda.num_heads * kda.key_dim
        blocks = (key_width, key_width, kda.num_value_heads * kda.value_dim)
        starts = (0, key_width, 2 * key_width)
        whole[0] = tuple(_shifted(_share(size, place), start) for size, start in zip(blocks, starts, strict=True))


def _split_mla(part: str, whole: list[tuple[range, ...]], place: MeshPlace) -> None:
    if part in ("mla.q_proj", "mla.q_b", "mla.kv_b", "mla.g_proj"):
        whole[0] = (_share(len(whole[0][0]), place),)
    elif part == "mla.o_proj":
        whole[1] = (_share(len(whole[1][0]), place),)


def _split_ffn(part: str, whole: list[tuple[range, ...]], ffn: DenseConfig | MoeConfig, place: MeshPlace) -> None:
    if part in ("ffn.gate_up", "moe.shared_gate_up"):
        half = len(whole[0][0]) // 2
        columns = even_ranges(half, place.num_tp)[place.tp_rank]
        whole[0] = (columns, _shifted(columns, half))
    elif part in ("ffn.down", "moe.shared_down"):
        whole[1] = (even_ranges(len(whole[1][0]), place.num_tp)[place.tp_rank],)
    elif part in ("moe.gate_up", "moe.down") and place.expert_parallel and isinstance(ffn, MoeConfig):
        whole[0] = (expert_ranges(ffn.num_experts, place.num_world)[place.world_rank],)


def _share(size: int, place: MeshPlace) -> range:
    each = size // place.num_tp
    return range(each * place.tp_rank, each * (place.tp_rank + 1))


def _shifted(run: range, offset: int) -> range:
    return range(run.start + offset, run.stop + offset)


def shard_shape(ranges: Ranges) -> Shape:
    """The shape of a rank's share."""
    return tuple(sum(len(run) for run in runs) for runs in ranges)
