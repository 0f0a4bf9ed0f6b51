"""/v1/prefill/jobs: submit, list, inspect, follow and cancel jobs that outlive their request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import JSONResponse, Response

from longprefill.orchestrator.api.auth import Caller
from longprefill.orchestrator.api.body import media_type_of
from longprefill.orchestrator.api.errors import ApiError, as_api_error
from longprefill.orchestrator.api.job_json import event_json, job_json, record_json, sample_json
from longprefill.orchestrator.api.openapi import EVENTS, answers, job_body
from longprefill.orchestrator.api.parameters import JobOptions, JobParameters, Prompt
from longprefill.orchestrator.api.service import CurrentCaller, CurrentService, Service, idempotency_key, known_job
from longprefill.orchestrator.api.streams import HEARTBEAT_S, EventStream, event
from longprefill.orchestrator.api.uploads import MEDIA_TYPES, read_upload, unknown_media_type
from longprefill.orchestrator.controller.contract import Conflict
from longprefill.orchestrator.job import JobRequest, JobState, TokenRecord
from longprefill.partition.errors import UserError

JOBS_PATH = "/v1/prefill/jobs"
MAX_PAGE = 1000
MAX_NUMBER = 2**53
"""Of events and cursors: what every client's numbers hold."""
MAX_WAIT_S = 60.0

router = APIRouter(tags=["prefill jobs"], prefix=JOBS_PATH)
Number = Annotated[int, Query(ge=0, le=MAX_NUMBER)]
LastEventId = Annotated[str, Header(alias="last-event-id", pattern=r"^[0-9]{0,15}$")]


@router.post("", status_code=202, openapi_extra=job_body(), responses=answers("prefill.job", 409, 413, 415, 422))
async def submit_job(request: Request, service: CurrentService, caller: CurrentCaller) -> Response:
    """Takes a job. When this returns it is on disk, and will end as done, failed or cancelled whatever dies.

    202 for a new job; 200 when the Idempotency-Key names one that is here already.
    """
    media_type = media_type_of(request)
    key = idempotency_key(request)
    if media_type in MEDIA_TYPES:
        with service.uploads.share() as take:
            upload = await read_upload(request, media_type, service.model.max_upload_bytes, take)
            return await _submit(service, caller, upload.prompt, upload.options, key)
    if media_type != "application/json":
        raise unknown_media_type(media_type)
    parameters = await service.reader.read(request, JobParameters)
    return await _submit(service, caller, parameters.prompt, parameters, key)


async def _submit(service: Service, caller: Caller, prompt: Prompt, options: JobOptions, key: str | None) -> Response:
    model = service.model
    longest_s = service.config.service.request_timeout_s
    if options.timeout_s is not None and options.timeout_s > longest_s:
        raise ApiError(
            400, f"timeout_s={options.timeout_s:g}: use at most {longest_s:g}", code="invalid_value", param="timeout_s"
        )
    async with service.reader.slots:
        tokens_T = await asyncio.to_thread(model.tokens_of, prompt)
    submission = await service.controller.submit(
        JobRequest(
            tenant=caller.tenant,
            max_new_tokens=model.new_tokens(options.max_new_tokens, 0, tokens_T.size, "max_new_tokens"),
            num_samples=options.num_samples,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop=tuple(options.stop),
            stop_token_ids=tuple(options.stop_token_ids),
            num_logprobs=options.num_logprobs,
            timeout_s=options.timeout_s,
            deadline_s=options.deadline_s,
            priority=options.priority,
            idempotency_key=key,
            keep_snapshot=options.keep_snapshot,
        ),
        tokens_T,
    )
    view = await service.controller.inspect(submission.job, caller.scope)
    headers = {"location": f"{JOBS_PATH}/{submission.job}"}
    return JSONResponse(job_json(view), 202 if submission.is_new else 200, headers)


@router.get("", responses=answers("list"))
async def list_jobs(
    service: CurrentService,
    caller: CurrentCaller,
    state: Annotated[list[JobState] | None, Query(max_length=len(JobState))] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    before: Annotated[str | None, Query(min_length=1, max_length=64)] = None,
) -> dict[str, Any]:
    """The caller's jobs, newest first; the next page comes with `before` = `last_id`."""
    last = None if before is None else known_job(before)
    views = await service.controller.list_jobs(caller.scope, states=tuple(state or ()), limit=limit + 1, before=last)
    page = views[:limit]
    return {
        "object": "list",
        "data": [job_json(view) for view in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(views) > limit,
    }


@router.get("/{job}", responses=answers("prefill.job", 404))
async def read_job(job: str, service: CurrentService, caller: CurrentCaller) -> dict[str, Any]:
    """A job as it is now, with its report so far; `traced`: the ranks' spans can be had too (`/trace`)."""
    view = await service.controller.inspect(known_job(job), caller.scope)
    report = None if view.report is None else dict(view.report)
    return {**job_json(view), "report": report, "traced": service.config.service.trace}


@router.delete("/{job}", responses=answers("prefill.job", 404))
async def cancel_job(job: str, service: CurrentService, caller: CurrentCaller) -> dict[str, Any]:
    """Ends a job as cancelled, now or at the end of the step that runs; an ended job stays as it is."""
    return job_json(await service.controller.cancel(known_job(job), caller.scope))


@router.get("/{job}/events", responses={**answers(None, 404), **EVENTS})
async def job_events(
    job: str,
    service: CurrentService,
    caller: CurrentCaller,
    after: Number = 0,
    last_event_id: LastEventId = "",
) -> Response:
    """What happened and happens to a job, as server-sent events; ends with the job. A client that comes back sends
    Last-Event-ID (or `after`) and gets what it missed. 204: there is nothing left to come."""
    start = int(last_event_id) if last_event_id else after
    view = await service.controller.inspect(known_job(job), caller.scope)
    if view.state.is_final and not await service.controller.events(job, caller.scope, after=start, timeout_s=0):
        return Response(status_code=204)
    return EventStream(_events(service, caller, job, start))


async def _events(service: Service, caller: Caller, job: str, after: int) -> AsyncGenerator[bytes, None]:
    try:
        is_last = False
        while True:
            found = await service.controller.events(
                job, caller.scope, after=after, timeout_s=0 if is_last else HEARTBEAT_S
            )
            for item in found:
                yield event(event_json(item), name=item.kind, number=item.number)
                after = item.number
            if is_last and not found:
                return
            # asked before the last events are: what ended the job is among them, or was sent
            is_last = is_last or (await service.controller.inspect(job, caller.scope)).state.is_final
    except UserError as error:
        yield event(as_api_error(error).body, name="error")
    except ApiError as error:
        yield event(error.body, name="error")


@router.get("/{job}/tokens", responses={**answers(None, 404), **EVENTS})
async def job_tokens(
    job: str,
    service: CurrentService,
    caller: CurrentCaller,
    after: Number = 0,
    last_event_id: LastEventId = "",
) -> Response:
    """What a job generates, as server-sent events; a client that comes back sends Last-Event-ID, and no token is
    repeated or left out. 204: there is nothing left to come."""
    start = int(last_event_id) if last_event_id else after
    first = await service.controller.tokens(known_job(job), caller.scope, after=start, timeout_s=0)
    if first.state.is_final and not first.records:
        return Response(status_code=204)
    return EventStream(_tokens(service, caller, job, start))


async def _tokens(service: Service, caller: Caller, job: str, after: int) -> AsyncGenerator[bytes, None]:
    try:
        while True:
            batch = await service.controller.tokens(job, caller.scope, after=after, timeout_s=HEARTBEAT_S)
            if batch.records:
                records = [record_json(record) for record in batch.records]
                yield event({"tokens": records, "cursor": batch.cursor}, name="tokens", number=batch.cursor)
                after = batch.cursor
            elif batch.state.is_final:
                yield event({"state": batch.state, "reason": batch.reason}, name="end")
                return
    except UserError as error:
        yield event(as_api_error(error).body, name="error")
    except ApiError as error:
        yield event(error.body, name="error")


@router.get("/{job}/result", responses=answers("prefill.result", 404, 409))
async def job_result(
    job: str,
    service: CurrentService,
    caller: CurrentCaller,
    wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0,
) -> dict[str, Any]:
    """What an ended job made: its report, and text and tokens of its samples. 409 while it runs; `wait_s` waits for
    its end so long."""
    job = known_job(job)
    cursor, records = 0, list[TokenRecord]()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        left_s = max(0.0, min(HEARTBEAT_S, deadline - loop.time()))
        batch = await service.controller.tokens(job, caller.scope, after=cursor, timeout_s=left_s)
        records += batch.records
        cursor = batch.cursor
        if batch.state.is_final and not batch.records:
            break
        if not batch.records and loop.time() >= deadline:
            raise Conflict(f"job {job} is {batch.state}: its result comes when it has ended; follow its events")
    view = await service.controller.inspect(job, caller.scope)
    samples = range(view.request.num_samples if records else 0)
    return {
        **job_json(view),
        "object": "prefill.result",
        "samples": [sample_json(number, records) for number in samples],
        "report": None if view.report is None else dict(view.report),
    }


@router.get("/{job}/trace", responses=answers("object", 404, 409))
async def job_trace(job: str, service: CurrentService, caller: CurrentCaller) -> Response:
    """The job's Chrome trace as far as it has run; 409 when the service does not trace."""
    trace = await service.controller.trace(known_job(job), caller.scope)
    return JSONResponse(trace, headers={"content-disposition": f'attachment; filename="{job}.trace.json"'})
