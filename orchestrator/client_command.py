"""`longprefill submit | status | watch | cancel | result`: a service's jobs from the shell; `longprefill key`: an API
key.

Exit codes: 0; 1 the job failed or was cancelled; 2 a wrong call, a refusal, or nobody answers. Results go to standard
output, progress to standard error. The API key comes from the environment only: a command line can be read by others.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longprefill.orchestrator.command_edge import user_facing
from longprefill.orchestrator.errors import RunFailed
from longprefill.partition.errors import UserError

if TYPE_CHECKING:
    from longprefill.orchestrator.client import Client

KEY_VARIABLE, CA_VARIABLE = "LONGPREFILL_API_KEY", "LONGPREFILL_CA"
KEY_BYTES = 32
STDIN = "-"
SHORT_PATIENCE_S, LONG_PATIENCE_S = 3.0, 120.0
"""With a service that does not answer: at first, and once a job of it is followed."""

Url = Annotated[
    str | None,
    typer.Option(
        envvar="LONGPREFILL_URL",
        help="The service, http://127.0.0.1:8000 if left out; its key is in LONGPREFILL_API_KEY.",
    ),
]
Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as submit prints it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the service's JSON.")]


def add_client_commands(app: typer.Typer) -> None:
    """Adds the commands of this file to the command line."""
    app.command()(user_facing(submit))
    app.command()(user_facing(status))
    app.command()(user_facing(watch))
    app.command()(user_facing(cancel))
    app.command()(user_facing(result))
    app.command()(user_facing(key))


def submit(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="UTF-8 text, token ids (.npy, .json, .ids), or -.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate; 0: prefill only.")] = 0,
    num_samples: Annotated[int, typer.Option("--samples", help="Continuations of the one prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of this probability mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a sample; may be repeated.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Fail when not done by then.")] = None,
    deadline_s: Annotated[float | None, typer.Option(help="Aim at the first token by then.")] = None,
    priority: Annotated[float, typer.Option(help="Weight among the tenant's jobs.")] = 1.0,
    keep_snapshot: Annotated[
        bool, typer.Option("--keep-snapshot", help="Keep the prefilled job as a file of the service.")
    ] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key names the same job.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait for the end, show progress, print the text.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Hand a prompt to a service and print the job's id."""
    prompt = _prompt(file)
    with _client(url) as client:
        job = client.submit(
            prompt,
            idempotency_key=idempotency_key,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=stop or None,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            priority=priority,
            keep_snapshot=keep_snapshot,
        )
        if not wait:
            typer.echo(json.dumps(job, indent=2) if as_json else job["id"])
            return
        typer.echo(f"job {job['id']}", err=True)
        _follow(client, job["id"])
        _print_result(client.result(job["id"]), as_json=as_json)


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Left out: all jobs, newest first.")] = None,
    state: Annotated[list[str] | None, typer.Option(help="Only jobs in this state; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(help="Jobs to show.")] = 20,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Show one job, or a list of jobs."""
    from longprefill.orchestrator.client.show import job_table, jobs_table, print_table

    if limit < 1:
        raise UserError(f"--limit {limit}: use 1 or more")
    with _client(url) as client:
        found: Any = client.jobs(states=state or (), limit=limit) if job is None else client.job(job)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_table(jobs_table(found) if job is None else job_table(found))


def watch(job: Job, url: Url = None) -> None:
    """Follow a job until it ends; leaving it (Ctrl-C) does not cancel it."""
    with _client(url) as client:
        _follow(client, job)
        _check_end(client.job(job))


def cancel(job: Job, as_json: AsJson = False, url: Url = None) -> None:
    """End a job as cancelled; one that has ended stays as it is."""
    with _client(url) as client:
        view = client.cancel(job)
    typer.echo(json.dumps(view, indent=2) if as_json else f"{view['id']} {view['state']}")


def result(job: Job, as_json: AsJson = False, url: Url = None) -> None:
    """Print what an ended job generated."""
    with _client(url) as client:
        _print_result(client.result(job), as_json=as_json)


def key(tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it will be.")]) -> None:
    """Make an API key: the key on standard output, this once; the line for the service's configuration beside it."""
    import hashlib
    import secrets

    from longprefill.orchestrator.config import ApiKey

    made = f"lp-{secrets.token_urlsafe(KEY_BYTES)}"
    entry = ApiKey(tenant=tenant, sha256=hashlib.sha256(made.encode()).hexdigest())
    typer.echo("The key, which is shown only now; clients send it as Authorization: Bearer KEY:", err=True)
    typer.echo(made)
    typer.echo("For the service's configuration, in [auth] keys:", err=True)
    typer.echo(f'{{tenant = "{entry.tenant}", sha256 = "{entry.sha256}"}}')


@contextmanager
def _client(url: str | None) -> "Iterator[Client]":
    from longprefill.orchestrator.client.client import DEFAULT_URL, Client

    ca_file = os.environ.get(CA_VARIABLE) or None
    client = Client(
        url or DEFAULT_URL, os.environ.get(KEY_VARIABLE) or None, patience_s=SHORT_PATIENCE_S, ca_file=ca_file
    )
    with client:
        yield client


def _prompt(file: str) -> Any:
    """What to send: .npy files as they lie on the disk, the rest as token ids or text."""
    path = Path(file)
    if path.suffix == ".npy" and path.is_file():
        return path
    from longprefill.workers.model.tokenizer import read_source

    found = read_source(file)
    if isinstance(found, bytes):
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{'standard input' if file == STDIN else file} is not UTF-8 text: byte 0x{found[error.start]:02x} at "
                f"offset {error.start}: convert it, or give token ids as .npy, .json or .ids"
            ) from None
    return found


def _follow(client: "Client", job: str) -> None:
    from longprefill.orchestrator.client.show import Progress

    with Progress(client.job(job)) as progress:
        client.patience_s = LONG_PATIENCE_S
        for event in client.events(job):
            progress.show(event)


def _print_result(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        for sample in found["samples"]:
            typer.echo(sample["text"])
    _check_end(found)


def _check_end(view: dict[str, Any]) -> None:
    if view["state"] in ("failed", "cancelled"):
        raise RunFailed(f"job {view['id']} {view['state']}: {view['reason'] or 'no reason given'}")
