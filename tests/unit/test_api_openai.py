"""/v1/completions, /v1/chat/completions, /v1/models: what OpenAI's clients send and read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longprefill.orchestrator.api.templates import ChatTemplate, read_template
from longprefill.orchestrator.api.unsupported import CHAT_NEUTRAL, COMPLETION_NEUTRAL, IGNORED
from longprefill.partition.errors import ModelError

from .api_double import token_at
from .api_support import Api, messages_of, model_dir, run, until

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.getbasetemp())


def expected_text(api: Api, prompt: str, num_tokens: int, seed: int = 0, sample: int = 0) -> str:
    tokens_T = np.asarray(api.model.tokenizer.encode(prompt))  # type: ignore[union-attr]
    ids = [token_at(tokens_T, seed, sample, index, api.model.vocab_size) for index in range(num_tokens)]
    return api.model.tokenizer.decode(ids)  # type: ignore[union-attr]


def test_completion(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        answer = await api.complete(max_tokens=5, temperature=0)
        assert answer.status_code == 200
        body = answer.json()
        assert (body["object"], body["model"]) == ("text_completion", "tiny")
        assert body["choices"] == [
            {"index": 0, "text": expected_text(api, "hello", 5), "logprobs": None, "finish_reason": "length"}
        ]
        assert body["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    run(directory, scenario)


def test_defaults_are_those_of_openai(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        await api.complete()
        await api.complete()
        first, second = (job.view.request for job in api.controller.jobs.values())
        assert (first.max_new_tokens, first.temperature, first.top_p, first.num_samples) == (16, 1.0, 1.0, 1)
        assert first.seed != second.seed
        await api.chat()
        assert [job.view.request for job in api.controller.jobs.values()][2].max_new_tokens == 4096 - 23

    run(directory, scenario)


def test_all_prompt_forms_and_samples(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        ids = [api.model.tokenizer.encode(text) for text in ("one", "two words")]  # type: ignore[union-attr]
        texts = (await api.complete(prompt=["one", "two words"], n=2, max_tokens=4, seed=3)).json()["choices"]
        tokens = (await api.complete(prompt=ids, n=2, max_tokens=4, seed=3)).json()["choices"]
        assert [choice["index"] for choice in texts] == [0, 1, 2, 3]
        assert texts == tokens
        wanted = [expected_text(api, text, 4, 3, sample) for text in ("one", "two words") for sample in (0, 1)]
        assert [choice["text"] for choice in texts] == wanted
        single = (await api.complete(prompt=ids[1], max_tokens=4, seed=3)).json()["choices"]
        assert single[0]["text"] == wanted[2]

    run(directory, scenario)


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"prompt": ["a", "b"], "n": 2}, {"echo": True}, {"logprobs": 2}])
def test_stream_says_what_the_whole_says(directory: Path, options: dict[str, Any]) -> None:
    async def scenario(api: Api) -> None:
        options_all = {"max_tokens": 30, "seed": 5, **options}
        whole = (await api.complete(**options_all)).json()
        streamed = await api.complete(**options_all, stream=True, stream_options={"include_usage": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert "cancel" not in api.controller.calls
        *chunks, last = messages_of(streamed.text)
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
        for choice in whole["choices"]:
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in own) == choice["text"]
            assert [piece["finish_reason"] for piece in own][-1] == choice["finish_reason"]
            assert all(piece["finish_reason"] is None for piece in own[:-1])
            if "logprobs" in options:
                for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                    assert [item for piece in own for item in piece["logprobs"][name]] == choice["logprobs"][name]

    run(directory, scenario)


def test_stop_text_is_left_out(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        whole = expected_text(api, "hello", 40)
        stop = whole[10:13]
        answer = (await api.complete(max_tokens=40, temperature=0, stop=["never to be seen", stop])).json()
        assert answer["choices"][0]["text"] == whole[: whole.index(stop)]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 40

    run(directory, scenario)


def test_nothing_to_generate_is_a_prefill(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        answer = (await api.complete(max_tokens=0, echo=True)).json()
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("hello", "length")
        streamed = await api.complete(max_tokens=0, stream=True)
        assert [chunk["choices"][0]["finish_reason"] for chunk in messages_of(streamed.text)] == ["length"]

    run(directory, scenario)


def test_logprobs_of_completions(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        answer = (await api.complete(max_tokens=4, logprobs=2, temperature=0)).json()["choices"][0]["logprobs"]
        assert answer["token_logprobs"] == [-0.5, -1.5, -2.5, -3.5]
        assert [len(top) for top in answer["top_logprobs"]] == [2, 2, 2, 2]
        assert len(answer["tokens"]) == len(answer["text_offset"]) == 4

    run(directory, scenario)


def test_chat(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        messages = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
        prompt = "<|bos|>system: be\n<|bos|>user: a\nassistant:"
        answer = (await api.chat(messages=messages, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2)).json()
        assert answer["object"] == "chat.completion"
        choice = answer["choices"][0]
        text = expected_text(api, prompt, 6)
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert choice["finish_reason"] == "length"
        content = choice["logprobs"]["content"]
        assert [len(item["top_logprobs"]) for item in content] == [2] * 6
        whole = [item for item in content if item["bytes"] is not None]
        assert all(bytes(item["bytes"]).decode() == item["token"] for item in whole)
        streamed = await api.chat(messages=messages, max_completion_tokens=6, temperature=0, stream=True)
        deltas = [chunk["choices"][0]["delta"] for chunk in messages_of(streamed.text)]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == text
        assert deltas[-1] == {}

    run(directory, scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_unsupported_parameters_are_refused_by_name_and_neutral_ones_are_not(directory: Path, path: str) -> None:
    is_chat = path.endswith("chat/completions")
    table = CHAT_NEUTRAL if is_chat else COMPLETION_NEUTRAL

    async def scenario(api: Api) -> None:
        ask = api.chat if is_chat else api.complete
        for name, values in table.items():
            for value in values:
                assert (await ask(max_tokens=1, **{name: value})).status_code == 200, (name, value)
            refused = await ask(max_tokens=1, **{name: "something"})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert (await ask(max_tokens=1, **dict.fromkeys(IGNORED, "anything"))).status_code == 200
        unknown = (await ask(max_tokens=1, temprature=1)).json()["error"]
        assert (unknown["param"], unknown["code"]) == ("temprature", "unknown_parameter")

    run(directory, scenario)


def test_parameters_are_documented() -> None:
    guide = (REPOSITORY / "docs" / "guide" / "service.md").read_text()
    for name in {*CHAT_NEUTRAL, *COMPLETION_NEUTRAL, *IGNORED}:
        assert f"`{name}`" in guide, name


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 4097}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"x": 1}}, "stream_options"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_the_parameter(directory: Path, parameters: dict[str, Any], param: str) -> None:
    async def scenario(api: Api) -> None:
        answer = await api.complete(**parameters)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param
        assert "\n" not in error["message"]
        assert len(error["message"]) < 600
        assert not api.controller.jobs

    run(directory, scenario)


def test_over_long_prompt(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        answer = (await api.complete(prompt=[5] * 4097)).json()["error"]
        assert answer["code"] == "context_length_exceeded"
        assert "4097 tokens: this service takes at most 4096 tokens" in answer["message"]
        both = (await api.complete(prompt=[5] * 4000, max_tokens=97)).json()["error"]
        assert (both["code"], both["param"]) == ("context_length_exceeded", "max_tokens")
        assert (await api.complete(prompt=[5] * 4000, max_tokens=96)).status_code == 200

    run(directory, scenario)


def test_text_that_cannot_fit_is_not_cut_into_tokens(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: Api) -> None:
        assert api.model.tokenizer is not None
        most = 2 * 4096 * api.model.tokenizer.longest_token_bytes
        monkeypatch.setattr(type(api.model.tokenizer), "encode", lambda *_: pytest.fail("it was cut"))
        answer = (await api.complete(prompt="a" * (most + 1))).json()["error"]
        assert answer["code"] == "context_length_exceeded"
        assert f"{most + 1} characters: this service takes at most 4096 tokens" in answer["message"]
        upload = await api.ask(
            "POST", "/v1/prefill/jobs", content=b"a" * (4 * most + 2**20 + 1), headers={"content-type": "text/plain"}
        )
        assert (upload.status_code, upload.json()["error"]["code"]) == (413, "context_length_exceeded")

    run(directory, scenario)


def test_models(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        listed = (await api.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny"]
        assert (await api.get("/v1/models/tiny")).json()["object"] == "model"
        for answer in (await api.get("/v1/models/a/b"), await api.complete(model="gpt"), await api.chat(model="gpt")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    run(directory, scenario)


def test_failed_and_refused_jobs(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        api.controller.fails_with = "prefill-0 failed it 3 times: rank 1 died"
        failed = await api.complete()
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "job_failed")
        assert "rank 1 died" in failed.json()["error"]["message"]
        assert failed.headers["x-should-retry"] == "false"
        streamed = await api.complete(stream=True)
        assert "[DONE]" not in streamed.text
        assert messages_of(streamed.text)[-1]["error"]["code"] == "job_failed"
        api.controller.max_jobs = 0
        busy = await api.complete()
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "3")
        api.controller.max_jobs, api.controller.max_tokens = 10, 2
        assert (await api.complete()).status_code == 409
        api.controller.is_draining = True
        assert (await api.complete(stream=True)).status_code == 503

    run(directory, scenario)


def test_one_refused_prompt_takes_the_others_back(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        api.controller.max_tokens = 120
        api.controller.pace = asyncio.Semaphore(0)
        answer = await api.complete(prompt=["short", "long " * 100], max_tokens=20)
        assert answer.status_code == 409
        await until(lambda: api.controller.jobs["job-000000"].view.state == "cancelled")

    run(directory, scenario)


def test_a_full_queue_takes_nothing_back_from_a_client_that_asks_again(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        api.controller.max_jobs = 1
        api.controller.pace = asyncio.Semaphore(0)
        asked: dict[str, Any] = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}
        key = {"idempotency-key": "k"}
        assert (await api.post("/v1/completions", asked, headers=key)).status_code == 429
        await until(lambda: not api.app.state.service.leftovers)
        api.controller.max_jobs = 2
        for _ in range(4):
            api.controller.pace.release()
        again = await api.post("/v1/completions", asked, headers=key)
        assert (again.status_code, len(api.controller.jobs)) == (200, 2)

    run(directory, scenario)


def test_a_key_that_is_used_for_something_else_costs_its_request_nothing(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        api.controller.pace = asyncio.Semaphore(0)
        asked: dict[str, Any] = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}
        key = {"idempotency-key": "k"}
        asking = asyncio.create_task(api.post("/v1/completions", asked, headers=key))
        await until(lambda: len(api.controller.jobs) == 2)
        other = await api.post("/v1/completions", asked | {"prompt": ["a", "c"]}, headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
        for _ in range(4):
            api.controller.pace.release()
        assert (await asking).status_code == 200

    run(directory, scenario)


TEMPLATES = {
    "{{ raise_exception('no system prompt') }}": "no system prompt",
    "{{ messages[0].content.nothing.more }}": "nothing",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages | nofilter }}": None,
}


@pytest.mark.parametrize(("source", "reason"), TEMPLATES.items(), ids=list(TEMPLATES))
def test_templates_are_sandboxed(source: str, reason: str | None) -> None:
    if reason is None:
        with pytest.raises(ModelError, match="does not compile"):
            ChatTemplate(source, {})
        return
    template = ChatTemplate(source, {})
    with pytest.raises(Exception, match=reason) as caught:
        template.render([{"role": "user", "content": "a"}])
    assert caught.value.status == 400  # type: ignore[attr-defined]


def test_templates_as_published(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    source = "{{ bos_token }}{% generation %}{{ messages[0] | tojson }}{% endgeneration %}{{ eos_token }}"
    words = {"bos_token": "<b>", "eos_token": {"content": "<e>"}}
    templates = [{"name": "tools", "template": "x"}, {"name": "default", "template": source}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words | {"chat_template": templates}))
    template = read_template(tmp_path)
    assert template is not None
    assert template.render([{"content": "ü<&"}]) == '<b>{"content": "ü<&"}<e>'
    (tmp_path / "chat_template.jinja").write_text("own {{ messages | length }}")
    own = read_template(tmp_path)
    assert own is not None
    assert own.render([{}, {}]) == "own 2"


def test_no_template_is_a_clear_refusal(directory: Path) -> None:
    from dataclasses import replace

    from .api_support import served_model

    async def scenario(api: Api) -> None:
        answer = await api.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")

    run(directory, scenario, model=replace(served_model(directory), template=None))
