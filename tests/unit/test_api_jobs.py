"""/v1/prefill/jobs: submission in every form, lists, events that are taken up again, results, tenants."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longprefill.orchestrator.job import JobState

from .api_support import Api, Exchange, messages_of, model_dir, run, until

JOBS = "/v1/prefill/jobs"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_dir(tmp_path_factory.getbasetemp())


def npy(values: Any, dtype: str = "int32") -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(values, dtype=dtype))
    return buffer.getvalue()


def prompt_of(api: Api, answer: Any) -> list[int]:
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"{JOBS}/{answer.json()['id']}"
    return api.controller.jobs[answer.json()["id"]].tokens_T.tolist()


def test_a_job_from_submission_to_result(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        options = {"max_new_tokens": 4, "num_samples": 2, "num_logprobs": 1, "seed": 9, "deadline_s": 60}
        submitted = await api.submit(**options)
        assert submitted.status_code == 202
        job = submitted.json()["id"]
        assert submitted.json()["request"].items() >= options.items()
        assert submitted.json()["request"]["idempotency_key"] is None
        result = (await api.get(f"{JOBS}/{job}/result", params={"wait_s": 5})).json()
        assert result["state"] == "done"
        assert [len(sample["token_ids"]) for sample in result["samples"]] == [4, 4]
        assert [sample["finish_reason"] for sample in result["samples"]] == ["length", "length"]
        assert [len(sample["logprobs"]) for sample in result["samples"]] == [4, 4]
        assert (await api.get(f"{JOBS}/{job}")).json()["generated_tokens"] == 8

    run(directory, scenario)


def test_every_form_of_a_prompt_is_the_same_prompt(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        text = "héllo ☃"
        ids = api.model.tokenizer.encode(text)  # type: ignore[union-attr]
        data = text.encode()
        as_text, as_binary = {"content-type": "text/plain; charset=utf-8"}, {"content-type": "application/octet-stream"}
        options = {"options": json.dumps({"max_new_tokens": 3, "stop": ["x"]})}
        answers = [
            await api.ask("POST", JOBS, files={"prompt": (None, data)}),
            await api.submit(prompt=text),
            await api.submit(prompt=ids),
            await api.ask("POST", JOBS, content=data, headers=as_text),
            await api.ask("POST", JOBS, content=npy(ids), headers=as_binary),
            await api.ask("POST", JOBS, content=npy(ids, "uint16"), headers=as_binary),
            await api.ask("POST", JOBS, files={"prompt": ("a.txt", data, "text/plain")}),
            await api.ask("POST", JOBS, files={"prompt": ("a.npy", npy(ids, ">i8"))}, data=options),
        ]
        assert [prompt_of(api, answer) for answer in answers] == [ids] * len(answers)
        assert answers[-1].json()["request"].items() >= {"max_new_tokens": 3, "stop": ["x"]}.items()
        query = {"max_new_tokens": "2", "temperature": "0.5", "stop": ["a", "b"], "keep_snapshot": "true"}
        asked = (await api.ask("POST", JOBS, content=data, headers=as_text, params=query)).json()["request"]
        wanted = {"max_new_tokens": 2, "temperature": 0.5, "stop": ["a", "b"], "keep_snapshot": True}
        assert asked.items() >= wanted.items()

    run(directory, scenario)


BINARY = "application/octet-stream"
BAD_UPLOADS: list[tuple[str, bytes, int]] = [
    ("text/plain", b"", 400),
    ("text/plain", b"ab\xff", 400),
    (BINARY, b"plain text", 400),
    (BINARY, b"\x93NUMPY", 400),
    (BINARY, b"\x93NUMPY\x01\x00\xff\xff" + b"{" * 100, 400),
    (BINARY, npy([[1, 2]]), 400),
    (BINARY, npy([1.5], "float32"), 400),
    (BINARY, npy([]), 400),
    (BINARY, npy([-5]), 400),
    (BINARY, npy([2**40], "int64"), 400),
    (BINARY, npy([300]), 400),
    (BINARY, npy(range(50))[:-8], 400),
    (BINARY, npy([1] * 10).replace(b"(10,)", b"(9999999999,)"), 400),
    (BINARY, npy([1] * 10).replace(b"<i4", b"|O8"), 400),
    (BINARY, pickle.dumps([1, 2, 3]), 400),
    ("image/png", b"abc", 415),
    ("application/x-www-form-urlencoded", b"prompt=a", 415),
    ("multipart/form-data", b"abc", 400),
    ("multipart/form-data; boundary=x", b"--x\r\nnothing", 400),
    ("multipart/form-data; boundary=x", b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\n\r\n--x--', 400),
    ("multipart/form-data; boundary=x", b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\na\r\n--x--', 400),
]


@pytest.mark.parametrize(("media_type", "body", "status"), BAD_UPLOADS)
def test_bad_uploads_are_refused(directory: Path, media_type: str, body: bytes, status: int) -> None:
    async def scenario(api: Api) -> None:
        answer = await api.ask("POST", JOBS, content=body, headers={"content-type": media_type})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
        assert not api.controller.jobs

    run(directory, scenario)


def test_nothing_is_unpickled(directory: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    buffer = io.BytesIO()
    np.save(buffer, np.asarray([Trap()], dtype=object), allow_pickle=True)

    async def scenario(api: Api) -> None:
        assert (await api.ask("POST", JOBS, content=buffer.getvalue(), headers={"content-type": BINARY})).is_error
        files = {"prompt": ("a.npy", buffer.getvalue())}
        assert (await api.ask("POST", JOBS, files=files)).is_error

    run(directory, scenario)
    assert not (tmp_path / "sprung").exists()


def test_options_that_cannot_be(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        for options in ({"timeout_s": 4000}, {"timeout_s": 0}, {"priority": 0}, {"max_tokens": 3}, {"stop": "x"}):
            answer = await api.submit(**options)
            assert answer.status_code == 400, options
            assert answer.json()["error"]["param"] == next(iter(options))
        for query in ("max_new_tokens=x", "max_new_tokens=1&max_new_tokens=2", "nothing=1", "stop="):
            answer = await api.ask("POST", f"{JOBS}?{query}", content=b"a", headers={"content-type": "text/plain"})
            assert answer.status_code == 400, query
        assert not api.controller.jobs

    run(directory, scenario)


def test_idempotency(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        key = {"idempotency-key": "order 66"}
        body = {"prompt": "hello"}
        first = await api.post(JOBS, body, headers=key)
        again = await api.post(JOBS, body, headers=key)
        assert (first.status_code, again.status_code) == (202, 200)
        assert first.json()["id"] == again.json()["id"]
        assert again.json()["request"]["idempotency_key"] == "order 66"
        other = await api.post(JOBS, {"prompt": "other"}, headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
        for bad in ("", "a" * 201, "\x7f"):
            assert (await api.post(JOBS, body, headers={"idempotency-key": bad})).status_code == 400
        wanted = {"model": "tiny", "prompt": ["a", "b"]}
        texts = [(await api.post("/v1/completions", wanted, headers=key)).json()["choices"] for _ in range(2)]
        assert texts[0] == texts[1]
        assert len(api.controller.jobs) == 3

    run(directory, scenario)


def test_lists_in_pages(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        assert (await api.get(JOBS)).json() == {
            "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False
        }  # fmt: skip
        ids = [(await api.submit()).json()["id"] for _ in range(5)]
        seen, before = [], None
        while True:
            query = {"limit": 2} | ({} if before is None else {"before": before})
            page = (await api.get(JOBS, params=query)).json()
            seen += [job["id"] for job in page["data"]]
            before = page["last_id"]
            if not page["has_more"]:
                break
        assert seen == ids[::-1]
        await until(lambda: all(job.view.state is JobState.DONE for job in api.controller.jobs.values()))
        assert (await api.get(JOBS, params={"state": "queued"})).json()["data"] == []
        assert len((await api.get(JOBS, params={"state": ["queued", "done"]})).json()["data"]) == 5
        for query in ({"limit": 0}, {"limit": "x"}, {"state": "lost"}, {"before": ""}):
            assert (await api.get(JOBS, params=query)).status_code == 400, query
        assert (await api.get(JOBS, params={"before": "nothing"})).status_code == 404

    run(directory, scenario)


def test_unknown_jobs(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        for job in ("nothing", "a" * 100, "%00", "%ff", "..", "☃"):
            for tail in ("", "/events", "/tokens", "/result", "/trace"):
                answer = await api.get(f"{JOBS}/{job}{tail}")
                assert answer.status_code == 404, (job, tail)
            assert (await api.ask("DELETE", f"{JOBS}/{job}")).status_code == 404

    run(directory, scenario)


def test_events_go_on_where_they_were_left(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        job = (await api.submit(max_new_tokens=2)).json()["id"]
        whole = messages_of((await api.get(f"{JOBS}/{job}/events")).text)
        assert [item["number"] for item in whole] == list(range(1, len(whole) + 1))
        assert whole[-1]["data"]["state"] == "done"
        for last in range(len(whole)):
            rest = await api.get(f"{JOBS}/{job}/events", headers={"last-event-id": str(last)})
            assert messages_of(rest.text) == whole[last:]
            assert f"id: {last + 1}\n" in rest.text
        nothing = await api.get(f"{JOBS}/{job}/events", params={"after": len(whole)})
        assert (nothing.status_code, nothing.content) == (204, b"")
        for bad in ("x", "-1", "9" * 40):
            assert (await api.get(f"{JOBS}/{job}/events", headers={"last-event-id": bad})).status_code == 400

    run(directory, scenario)


def test_tokens_go_on_where_they_were_left(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        api.controller.pace = asyncio.Semaphore(0)
        job = (await api.submit(max_new_tokens=9)).json()["id"]
        exchange = Exchange(api.app)
        task = exchange.start("GET", f"{JOBS}/{job}/tokens")
        exchange.send(b"")
        assert (await exchange.receive())["status"] == 200
        for _ in range(4):
            api.controller.pace.release()
        seen: list[dict[str, Any]] = []
        cursor = 0
        while len(seen) < 4:
            message = messages_of((await exchange.receive())["body"].decode())[0]
            seen, cursor = seen + message["tokens"], message["cursor"]
        exchange.leave()
        await asyncio.wait_for(task, 10)
        for _ in range(5):
            api.controller.pace.release()
        rest = await api.get(f"{JOBS}/{job}/tokens", headers={"last-event-id": str(cursor)})
        *batches, end = messages_of(rest.text)
        seen += [token for batch in batches for token in batch["tokens"]]
        assert [token["index"] for token in seen] == list(range(9))
        assert end == {"state": "done", "reason": None}
        result = (await api.get(f"{JOBS}/{job}/result")).json()["samples"][0]
        assert result["token_ids"] == [token["token"] for token in seen]
        assert result["text"] == "".join(token["text"] for token in seen)

    run(directory, scenario)


def test_cancel_and_early_result(directory: Path) -> None:
    async def scenario(api: Api) -> None:
        api.controller.pace = asyncio.Semaphore(0)
        job = (await api.submit(max_new_tokens=9)).json()["id"]
        early = await api.get(f"{JOBS}/{job}/result")
        assert (early.status_code, early.json()["error"]["code"]) == (409, "conflict")
        assert (await api.ask("DELETE", f"{JOBS}/{job}")).json()["state"] == "cancelled"
        assert (await api.ask("DELETE", f"{JOBS}/{job}")).status_code == 200
        result = (await api.get(f"{JOBS}/{job}/result")).json()
        assert (result["state"], result["samples"]) == ("cancelled", [])
        assert (await api.get(f"{JOBS}/{job}/trace")).status_code == 409

    run(directory, scenario)
