"""Shapes of published models and an example device, by name: enough to simulate without a model directory."""

from __future__ import annotations

from longprefill.orchestrator.simulator.cluster import ClusterError
from longprefill.orchestrator.simulator.costs import DeviceProfile
from longprefill.partition.shapes import (
    DenseShape,
    IndexerShape,
    KdaShape,
    LayerShape,
    MlaShape,
    ModelShape,
    MoeShape,
)

EXAMPLE_DEVICE = DeviceProfile(
    name="example",
    gemm_flops_per_s=350e12,
    attention_flops_per_s=300e12,
    indexer_flops_per_s=400e12,
    scan_flops_per_s=120e12,
    link_bytes_per_s=40e9,
    link_latency_s=15e-6,
    step_overhead_s=5e-3,
    overlap=0.5,
)
"""Round numbers of a present-day accelerator, sustained: for trying things out, measured on nothing."""


def named_shape(name: str) -> ModelShape:
    """A published model's shape.

    Raises:
        ClusterError: an unknown name.
    """
    shapes = {"kimi_linear": kimi_linear, "glm_flash": glm_flash}
    if name not in shapes:
        raise ClusterError(f"[costs] model={name!r} is unknown: use {' or '.join(shapes)}")
    return shapes[name]()


def kimi_linear() -> ModelShape:
    """Kimi-Linear 48B-A3B: 20 KDA and 7 dense MLA layers."""
    kda = KdaShape(
        num_heads=32,
        num_value_heads=32,
        key_dim=128,
        value_dim=128,
        conv_width=4,
        gate_rank=128,
        output_gate_rank=128,
    )
    mla = MlaShape(
        num_heads=32,
        q_lora_rank=None,
        kv_lora_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        row_bytes=1152,
        indexer=None,
    )
    moe = MoeShape(num_experts=256, experts_per_token=8, intermediate=1024, shared_intermediate=1024, latent_dim=None)
    full_attention = {4, 8, 12, 16, 20, 24, 27}
    layers = tuple(
        LayerShape(
            mixer=mla if number in full_attention else kda, ffn=DenseShape(intermediate=9216) if number == 1 else moe
        )
        for number in range(1, 28)
    )
    return ModelShape(hidden=2304, layers=layers, element_bytes=2, attn_res_block=None)


def glm_flash() -> ModelShape:
    """GLM-5.3-Flash: 34 KDA and 11 DSA layers; its hyper-connections are not counted."""
    kda = KdaShape(
        num_heads=64,
        num_value_heads=64,
        key_dim=128,
        value_dim=128,
        conv_width=4,
        gate_rank=128,
        output_gate_rank=128,
    )
    dsa = MlaShape(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_dim=256,
        rope_dim=0,
        value_dim=256,
        row_bytes=1024 + 256 // 4,
        indexer=IndexerShape(num_heads=32, head_dim=128, topk=2048, pool=4),
    )
    moe = MoeShape(num_experts=288, experts_per_token=8, intermediate=2048, shared_intermediate=2048, latent_dim=None)
    layers = tuple(
        LayerShape(mixer=dsa if number % 4 == 3 else kda, ffn=DenseShape(intermediate=12288) if number < 3 else moe)
        for number in range(45)
    )
    return ModelShape(hidden=4096, layers=layers, element_bytes=2, attn_res_block=None)
