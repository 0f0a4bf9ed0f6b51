"""A document with facts over every cut of its prefill, and what a model answers: the table of `scripts/quickstart`.

The document is prefilled up to its last byte and exported; one question goes on from there through hand-off and decode
worker as any prompt does, all others start from the same boundary state in this process.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longprefill.orchestrator.cluster import LocalCluster, PrefillResult
from longprefill.orchestrator.needle.bench import check_byte_tokens, questions_of
from longprefill.orchestrator.needle.documents import Document, astride, write_document
from longprefill.orchestrator.outputs import check_outputs, writing
from longprefill.orchestrator.plan import ClusterSettings, step_tokens_for
from longprefill.orchestrator.run_report import RunReport, build_report
from longprefill.partition.errors import UserError
from longprefill.partition.generators import generate
from longprefill.partition.layout import Slice
from longprefill.partition.steps import pack_jobs
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.tokenizer import Tokenizer
from longprefill.workers.sampling import Sampling

GAP = 96
"""Bytes of text between a section's header and its fact, with the cut in their middle."""
NUM_ABSENT = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    cut: int
    """Where the fact's document is cut over ranks or steps; -1: nothing to find."""
    task: str
    question: str
    expected: str
    answer: str

    @property
    def is_right(self) -> bool:
        return self.answer == self.expected


def cuts_of(settings: ClusterSettings, step_tokens: int, num_tokens: int) -> list[int]:
    """Every position where one fragment ends and the next begins, step after step."""
    starts = {
        fragment.start
        for step in pack_jobs([Slice(job=0, start=0, end=num_tokens)], step_tokens)
        for fragment in generate(settings.layout, tuple(step), settings.cp).fragments
        if fragment.length
    }
    return sorted(starts - {0})


def document_over(cuts: list[int], num_tokens: int) -> Document:
    """The document: its facts lie over the cuts, one over each, in their order.

    Raises:
        UserError: the cuts are too close together.
    """
    document = write_document(num_tokens, astride(cuts, gap=GAP), num_absent=NUM_ABSENT, seed="quickstart")
    for cut, placed in zip(cuts, document.facts, strict=True):
        if not placed.start < cut < placed.end:
            raise UserError(
                f"{len(cuts)} cuts of {num_tokens} tokens are too close for a fact over each: use more --tokens, a "
                "larger --step-tokens or a smaller --cp"
            )
    return document


def show_document(model: Path, *, num_tokens: int, settings: dict[str, Any], json_file: Path | None) -> float:
    """Writes the document, prefills it, asks everything and prints both tables to standard error.

    Returns the share of right answers.

    Raises:
        UserError: an option, the model or the machine does not allow it.
        RunFailed: a worker died, hung or failed.
    """
    check_outputs({"--json": json_file}, inputs=[model])
    config, tokenizer = read_config(model), Tokenizer(model)
    cluster = LocalCluster(model, max_tokens=2 * num_tokens, **settings)
    step_tokens = step_tokens_for(cluster.settings, config, num_tokens)
    cuts = cuts_of(cluster.settings, step_tokens, num_tokens)
    document = document_over(cuts, num_tokens)
    check_byte_tokens(tokenizer, document, model)
    console = Console(stderr=True, highlight=False)
    with cluster, tempfile.TemporaryDirectory(prefix="longprefill-needle-") as folder:
        report, answers = _ask(cluster, document, tokenizer, Path(folder) / "document.safetensors")
    answered = _judged(document, answers, cuts)
    if json_file is not None:
        rows = [
            {"cut": one.cut, "kind": one.task, "question": one.question, "expected": one.expected,
             "answer": one.answer, "right": one.is_right} for one in answered
        ]  # fmt: skip
        with writing("--json", json_file):
            json_file.write_text(json.dumps(report.document | {"answers": rows}, indent=2) + "\n")
    console.print(report.table())
    console.print(_table(answered))
    num_right = sum(one.is_right for one in answered)
    console.print(f"{num_right} of {len(answered)} answers are right; {len(cuts)} cuts, a fact over each")
    return num_right / len(answered)


def _ask(
    cluster: LocalCluster, document: Document, tokenizer: Tokenizer, snapshot: Path
) -> tuple[RunReport, list[str]]:
    # imported here: it loads torch, while Ray's workers start
    from longprefill.orchestrator.needle.reader import MAX_NEW_TOKENS, Reader

    questions = [tokenizer.encode(question.text) for question in questions_of(document)]
    text = tokenizer.encode(document.text)
    first = cluster.run_until([*text, *questions[0]], len(text))
    cluster.export_job(first.job, snapshot)
    cluster.close_job(first.job)
    result = cluster.resume(snapshot, max_new_tokens=MAX_NEW_TOKENS, handoff=True)
    tokens: list[int] = []
    first_token_at = 0.0
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=cluster.config.eos_token_ids)
    for token in cluster.generate(result.job, sampling):
        first_token_at = first_token_at or time.perf_counter()
        if token.id not in cluster.config.eos_token_ids:
            tokens.append(token.id)
    whole = PrefillResult(
        job=result.job,
        num_tokens=result.num_tokens,
        steps=[*first.steps, *result.steps],
        prefill_s=first.prefill_s + result.prefill_s,
        accepted_at=first.accepted_at,
        handoff=result.handoff,
    )
    answer = tokenizer.decode(tokens)
    report = build_report(
        cluster,
        whole,
        cluster.workers.stats(),
        ttft_s=first_token_at - first.accepted_at,
        output_tokens=tokens,
        text=answer,
    )
    reader = Reader(cluster.settings, max_tokens=len(text), longest_question=max(map(len, questions)))
    others = reader.answers(snapshot, questions[1:])
    return report, [answer, *(tokenizer.decode(other) for other in others)]


def _judged(document: Document, answers: list[str], cuts: list[int]) -> list[Answered]:
    answered: list[Answered] = []
    for number, (question, answer) in enumerate(zip(questions_of(document), answers, strict=True)):
        answered.append(
            Answered(
                cut=cuts[number] if number < len(cuts) else -1,
                task=question.task,
                question=question.text.strip(),
                expected=question.answer,
                answer=answer.strip(),
            )
        )
    return answered


def _table(answered: list[Answered]) -> Table:
    table = Table(title="questions, each asked behind the whole document", title_justify="left")
    table.add_column("cut at", justify="right")
    for heading in ("kind", "question", "answer"):
        table.add_column(heading)
    table.add_column("")
    for one in answered:
        verdict = "right" if one.is_right else f"wrong: {one.expected}"
        table.add_row("-" if one.cut < 0 else f"{one.cut:,}", one.task, one.question, one.answer, verdict)
    return table
