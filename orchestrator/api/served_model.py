"""The model as the HTTP side knows it: its name, limits, tokenizer and chat template. No weights, no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longprefill.orchestrator.api.errors import ApiError, invalid
from longprefill.orchestrator.api.parameters import Prompt
from longprefill.orchestrator.api.templates import ChatTemplate, read_template
from longprefill.orchestrator.config import ServiceConfig
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.tokenizer import REPLACEMENT, Tokenizer

NORMALIZED = 2
"""Text may shrink this much before it is cut into tokens (composed characters, dropped ones)."""
UTF8_BYTES, ID_BYTES = 4, 8
"""At most, of a character and of a token id."""
FRAME_BYTES = 1 << 20
"""What is in an upload beside the prompt: a form's parts, a file's header."""
NO_TOKENIZER = "this model has no tokenizer.json: give token ids instead of text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    vocab_size: int
    max_tokens: int
    """Of prompt and generation together: what the model was made for and the pools can hold."""
    max_prompt_tokens: int
    """At most `max_tokens`."""
    max_new_tokens: int
    can_generate: bool
    """Whether there are decode workers."""
    created_at: int
    tokenizer: Tokenizer | None
    template: ChatTemplate | None

    def tokens_of(self, prompt: Prompt) -> np.ndarray:
        """Token ids int32 [T] of a prompt. Slow for long text: call it beside the event loop.

        Raises:
            ApiError: 400, text without a tokenizer, no token, too many, or one outside of the vocabulary.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise invalid(NO_TOKENIZER, param="prompt")
            self._check_text(prompt, self.tokenizer)
            ids_T = np.asarray(self.tokenizer.encode(prompt), dtype=np.int32)
        else:
            ids_T = prompt
        if ids_T.size == 0:
            raise invalid("the prompt is empty: give at least one token", param="prompt")
        if ids_T.size > self.max_prompt_tokens:
            raise self._too_long(f"{ids_T.size} tokens")
        outside = np.flatnonzero((ids_T < 0) | (ids_T >= self.vocab_size))
        if outside.size:
            position = int(outside[0])
            raise invalid(
                f"token {int(ids_T[position])} at position {position} is outside of the vocabulary: use 0 to "
                f"{self.vocab_size - 1}",
                param="prompt",
            )
        return ids_T

    @property
    def max_upload_bytes(self) -> int:
        """No upload that is longer holds a prompt that fits, text or token ids."""
        most = self.max_prompt_tokens
        text = 0 if self.tokenizer is None else UTF8_BYTES * self._max_characters(self.tokenizer)
        return FRAME_BYTES + max(text, ID_BYTES * most)

    def _check_text(self, text: str, tokenizer: Tokenizer) -> None:
        """Refuses text that has more tokens than fit, however it is cut, before minutes go into cutting it."""
        if len(text) > self._max_characters(tokenizer):
            raise self._too_long(f"{len(text)} characters")

    def _max_characters(self, tokenizer: Tokenizer) -> int:
        return NORMALIZED * self.max_prompt_tokens * tokenizer.longest_token_bytes

    def _too_long(self, size: str) -> ApiError:
        return invalid(
            f"the prompt has {size}: this service takes at most {self.max_prompt_tokens} tokens",
            param="prompt",
            code="context_length_exceeded",
        )

    def new_tokens(self, asked: int | None, default: int, prompt_tokens: int, param: str) -> int:
        """How many tokens a request may generate; the default is cut to what there is room for.

        Raises:
            ApiError: 400, more than the service allows or the context holds; 409, nothing here generates.
        """
        if not self.can_generate and asked != 0:
            raise ApiError(
                409, f"this service has no decode workers: use {param}=0 (prefill only)", code="infeasible", param=param
            )
        room = self.max_tokens - prompt_tokens
        if asked is None:
            return max(0, min(default, self.max_new_tokens, room))
        if asked > self.max_new_tokens:
            raise invalid(f"{param}={asked}: this service generates at most {self.max_new_tokens} tokens", param=param)
        if asked > room:
            raise invalid(
                f"{prompt_tokens} prompt tokens and {param}={asked} are {prompt_tokens + asked}: this service takes at "
                f"most {self.max_tokens} together",
                param=param,
                code="context_length_exceeded",
            )
        return asked

    def text_of(self, tokens: np.ndarray) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(tokens.tolist()) if self.tokenizer is not None else ""

    def piece(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text and bytes, as log-probabilities name it; None: bytes that are no text of their own."""
        if self.tokenizer is None:
            return f"token:{token}", None
        if self.tokenizer.is_special(token):
            text = self.tokenizer.spelling(token) or ""
            return text, list(text.encode())
        text = self.tokenizer.decode([token])
        if REPLACEMENT in text:  # a part of a character
            return self.tokenizer.spelling(token) or text, None
        return text, list(text.encode())


def read_served_model(config: ServiceConfig) -> ServedModel:
    """The configured model.

    Raises:
        ModelError: its directory, config, tokenizer or chat template cannot be used.
    """
    directory = Path(config.model.dir)
    model = read_config(directory)
    limit = min(model.max_tokens, config.longest_job_tokens)
    has_tokenizer = (directory / "tokenizer.json").is_file()
    return ServedModel(
        name=config.model.served_name,
        vocab_size=model.vocab_size,
        max_tokens=limit,
        max_prompt_tokens=min(config.service.max_prompt_tokens or limit, limit),
        max_new_tokens=config.service.max_new_tokens if config.decode else 0,
        can_generate=bool(config.decode),
        created_at=int(time.time()),
        tokenizer=Tokenizer(directory) if has_tokenizer else None,
        template=read_template(directory),
    )
