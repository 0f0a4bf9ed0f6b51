"""The yardstick from outside: transformers' own class of a family, looked at by hooks on its modules.

The class runs the whole prompt at once in fp32. Hooks keep what goes into and comes out of every mixer and
feed-forward, what indexers and routers chose; states and cache rows are read off its cache.

    T tokens, K selected positions, X width of a row
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longprefill.orchestrator.align.observation import LOGIT_ROWS, Observation
from longprefill.orchestrator.yardstick import CLASSES
from longprefill.partition.errors import ModelError, UserError
from longprefill.workers.choices import Record
from longprefill.workers.model.config import IndexerConfig, KdaConfig, MlaConfig, ModelConfig, RopeConfig
from longprefill.workers.model.families.registry import read_config, read_object
from longprefill.workers.probe import Place


class Oracle:
    """transformers' model of a directory, in fp32 on this machine."""

    def __init__(self, model_dir: Path) -> None:
        """
        Raises:
            ModelError: the class did not find all of its weights in the directory.
        """
        self.config = read_config(model_dir)
        self.model = _load(model_dir, self.config)

    def run(self, tokens: np.ndarray) -> Observation:
        """The whole prompt at once.

        Raises:
            UserError: the class itself fails on this model or prompt, which some sizes that ours takes make it do.
        """
        hooks = _Hooks(self.model, self.config, len(tokens))
        transformers = importlib.import_module("transformers")
        cache = transformers.DynamicCache(config=self.model.config.get_text_config())
        if all(isinstance(spec.mixer, KdaConfig) for spec in self.config.layers):
            # an attention layer must say how long the cache is: one more, that stays empty
            cache.layers.append(importlib.import_module("transformers.cache_utils").DynamicLayer())
        tokens_1T = torch.from_numpy(tokens.astype(np.int64))[None]
        try:
            with torch.no_grad(), hooks.attached():
                output = self.model(input_ids=tokens_1T, past_key_values=cache, use_cache=True)
        except (RuntimeError, ValueError, IndexError) as error:
            name = type(self.model).__name__
            raise UserError(
                f"--against transformers: {name} fails on this model and prompt ({error}): use --against single"
            ) from error
        last = len(self.config.layers)
        hooks.activations[last, "logits"] = output.logits[0, -LOGIT_ROWS:].float().clone()
        return Observation(
            num_tokens=len(tokens),
            activations=hooks.activations,
            leavings=self._leavings(output.past_key_values),
            record=hooks.record,
        )

    @torch.no_grad()
    def _leavings(self, cache: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for layer, spec in enumerate(self.config.layers):
            kept, prefix = cache.layers[layer], f"layers.{layer}."
            if isinstance(spec.mixer, KdaConfig):
                width = spec.mixer.conv_width - 1
                found[prefix + "state"] = kept.recurrent_states[0][0].float()
                columns_CW = kept.conv_states[0][0][:, -width:] if width else kept.conv_states[0][0][:, :0]
                found[prefix + "conv"] = columns_CW.T.float()
                continue
            rotated_TP = _in_pair_order(kept.values[0, 0], spec.mixer.rope)
            found[prefix + "latent"] = torch.cat((kept.keys[0, 0], rotated_TP), dim=-1).float()
            if spec.mixer.indexer is not None:
                body = _body(self.model)
                found |= {
                    prefix + name: rows
                    for name, rows in _index_rows(
                        body.layers[layer].self_attn.indexer, spec.mixer.indexer, kept.indexer_keys
                    ).items()
                }
        return {name: rows.contiguous() for name, rows in found.items()}


def _index_rows(indexer: Any, config: IndexerConfig, cached_1TX: torch.Tensor) -> dict[str, torch.Tensor]:
    """Key rows as we cache them; with k-pool the class caches [key | gate | is valid] of every token."""
    if config.pool == 1:
        first, rest = cached_1TX[0].float().tensor_split((config.rope_dim,), dim=1)
        return {"index_key": torch.cat((_in_pair_order(first, config.rope), rest), dim=1)}
    pooled_1NX = indexer.get_pooled_states(packed_states=cached_1TX)[0]
    complete = cached_1TX.shape[1] // config.pool * config.pool
    key_nX, gate_nX = cached_1TX[0, complete:, : 2 * config.head_dim].float().chunk(2, dim=1)
    return {"index_key": pooled_1NX[0].float(), "pool_key": key_nX, "pool_gate": gate_nX}


def _in_pair_order(rotated_TP: torch.Tensor, rope: RopeConfig | None) -> torch.Tensor:
    """Interleaved pairs leave the class's rotation with their first numbers in the first half; pages keep the
    checkpoint's order."""
    if rope is None or rope.pairing != "interleaved":
        return rotated_TP
    return rotated_TP.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)


class _Hooks:
    def __init__(self, model: Any, config: ModelConfig, num_tokens: int) -> None:
        self.model = model
        self.config = config
        self.num_tokens = num_tokens
        self.activations: dict[Place, torch.Tensor] = {}
        self.record: Record = {}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        body = _body(self.model)
        handles: list[Any] = []
        for layer, module in enumerate(body.layers):
            for part, name in ((module.self_attn, "mixer"), (module.mlp, "feed-forward")):
                handles.append(part.register_forward_pre_hook(self._input(layer, f"{name} input"), with_kwargs=True))
                handles.append(part.register_forward_hook(self._output(layer, f"{name} output")))
            mixer = self.config.layers[layer].mixer
            if isinstance(mixer, MlaConfig) and mixer.indexer is not None:
                handles.append(module.self_attn.indexer.register_forward_hook(self._positions(layer, mixer.indexer)))
            if hasattr(module.mlp, "gate"):
                handles.append(module.mlp.gate.register_forward_hook(self._experts(layer)))
        handles.append(
            body.norm.register_forward_pre_hook(self._input(len(body.layers), "final hidden"), with_kwargs=True)
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, layer: int, point: str, rows: torch.Tensor) -> None:
        self.activations[layer, point] = rows.reshape(self.num_tokens, -1).float().clone()

    def _input(self, layer: int, point: str) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(layer, point, args[0] if args else kwargs["hidden_states"])

        return hook

    def _output(self, layer: int, point: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            self._keep(layer, point, output[0] if isinstance(output, tuple) else output)

        return hook

    def _positions(self, layer: int, indexer: IndexerConfig) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, chosen_1TK: torch.Tensor) -> None:
            # rows that see no more than top-k keys have nothing to choose
            chosen_TK = chosen_1TK[0, indexer.topk :].to(torch.int64)
            if chosen_TK.shape[0]:
                behind = torch.where(chosen_TK < 0, self.num_tokens, chosen_TK).sort(dim=1).values
                ascending_TK = torch.where(behind == self.num_tokens, -1, behind).to(torch.int32)
                self.record["positions", layer, 0, indexer.topk] = ascending_TK

        return hook

    def _experts(self, layer: int) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: tuple[torch.Tensor, ...]) -> None:
            self.record["experts", layer, 0, 0] = output[2].reshape(self.num_tokens, -1).clone()

        return hook


def _body(model: Any) -> Any:
    """The text model's layers and final norm."""
    return getattr(model.model, "language_model", model.model)


def _load(model_dir: Path, config: ModelConfig) -> Any:
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model_class = getattr(transformers, CLASSES[read_object(model_dir / "config.json")["model_type"]])
    with contextlib.ExitStack() as stack:
        directory = model_dir
        if config.fp8_block is not None:
            from longprefill.orchestrator.align.dequantized import write_dequantized

            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longprefill-align-")))
            write_dequantized(model_dir, directory, config.fp8_block)
        # grouped products refuse widths that are not multiples of 16 bytes
        model, info = model_class.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, experts_implementation="eager"
        )
    missing = [name for name in info["missing_keys"] if ".visual." not in name]
    if config.tie_embeddings and missing == ["lm_head.weight"]:  # a class that cannot tie has a head of its own
        model.lm_head.weight = model.get_input_embeddings().weight
        missing = []
    if missing:
        raise ModelError(f"{model_dir}: {model_class.__name__} misses {len(missing)} weights, {missing[0]} for one")
    return model.eval()
