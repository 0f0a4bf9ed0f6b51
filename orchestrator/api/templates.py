"""A model's chat template: messages in, prompt text out, in jinja's sandbox.

As published: `chat_template.jinja`, or `chat_template` in tokenizer_config.json (a text, or a list with one named
"default"). The environment is the one that published templates are written for, transformers' `apply_chat_template`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longprefill.orchestrator.api.errors import ApiError, invalid
from longprefill.partition.errors import ModelError
from longprefill.workers.model.families.registry import read_object

SPECIAL_WORDS = ("bos_token", "eos_token", "pad_token", "unk_token")
NO_TEMPLATE = (
    "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): use "
    "/v1/completions with a prompt of your own"
)


class ChatTemplate:
    """Compiled once."""

    def __init__(self, source: str, words: Mapping[str, str]) -> None:
        """`words` are the special tokens that a template may name.

        Raises:
            ModelError: it does not compile.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self._words = dict(words)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks for the assistant's next turn.

        Raises:
            ApiError: 400, the template refuses these messages or cannot take them.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._words
            )
        except TemplateError as error:
            raise _refusal(str(error)) from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError, IndexError) as error:
            # a template works on whatever the messages hold: what it trips over is theirs
            raise _refusal(f"{type(error).__name__}: {error}") from None


def read_template(model_dir: str | Path) -> ChatTemplate | None:
    """The template of a model directory, None when it has none.

    Raises:
        ModelError: it cannot be read or does not compile.
    """
    directory = Path(model_dir)
    config_file = directory / "tokenizer_config.json"
    config = read_object(config_file) if config_file.exists() else {}
    words = {name: _word(config[name]) for name in SPECIAL_WORDS if config.get(name) is not None}
    own_file = directory / "chat_template.jinja"
    try:
        source = own_file.read_text(encoding="utf-8") if own_file.exists() else _named(config.get("chat_template"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{own_file} cannot be read: {error}") from None
    return None if source is None else ChatTemplate(source, words)


def _named(given: object) -> str | None:
    """The template in tokenizer_config.json: a text, or the one named "default" of several."""
    if isinstance(given, list):
        found = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}
        given = found.get("default")
    if given is not None and not isinstance(given, str):
        raise ModelError(f"tokenizer_config.json: chat_template is a {type(given).__name__}: it must be a text")
    return given


def _word(given: object) -> str:
    """A special token: its text, or an object with it."""
    return str(given.get("content", "")) if isinstance(given, dict) else str(given)


def _refusal(reason: str) -> ApiError:
    return invalid(f"the model's chat template refuses the messages: {reason[:200]}", param="messages")


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks for training what the assistant says: here only its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
