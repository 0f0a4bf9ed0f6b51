"""`longprefill bench needle`: documents with planted facts, prefilled by a cluster, and how many answers are right.

Every document holds plain facts, sections and nothing about some names, and is prefilled once; all questions about it
start from its boundary state. What is asked depends on the seed only, so meshes and formats see the same questions.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longprefill.orchestrator.cluster import LocalCluster
from longprefill.orchestrator.needle.documents import Document, spread, write_document
from longprefill.orchestrator.needle.picture import Grid, png, svg
from longprefill.orchestrator.needle.words import Question
from longprefill.orchestrator.outputs import check_outputs, writing
from longprefill.partition.errors import UserError
from longprefill.workers.model.families.registry import read_config
from longprefill.workers.model.tokenizer import Tokenizer

TASKS = ("plain", "section", "absent")
TOKENS_PER_FACT = 1024
"""Documents hold at least so much text a fact of each task, but never fewer facts than depths."""
MOST_TOGETHER = 5
"""Facts of each task at each depth of one document: more questions make more documents, not denser ones."""
LEAST_TOKENS_PER_DEPTH = 260
"""A plain fact and a section without its gap need this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleRequest:
    """The options of `longprefill bench needle`."""

    model: Path
    lengths: tuple[int, ...]
    depths: int
    needles: int
    """Facts of each task for each length and depth."""
    gaps: tuple[int, ...]
    absent: int
    """Questions about names that are not there, for each length."""
    seed: int
    settings: dict[str, Any]
    """Fields of ClusterSettings: mesh, dtype, formats, step size, layout."""
    json_file: Path | None = None
    svg_file: Path | None = None
    png_file: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.depths <= 100:
            raise UserError(f"--depths {self.depths}: use 1 to 100")
        if not 1 <= self.needles <= 1000:
            raise UserError(f"--needles {self.needles}: use 1 to 1000 facts a length and depth")
        if self.absent < 0:
            raise UserError(f"--absent {self.absent}: use 0 or more questions")
        if not self.lengths or not self.gaps:
            raise UserError("--lengths and --gaps need at least one number each")
        for gap in self.gaps:
            if not 0 <= gap <= 4096:
                raise UserError(f"--gaps {gap}: use 0 to 4096 bytes between a section's header and its fact")
        least = self.depths * (LEAST_TOKENS_PER_DEPTH + max(self.gaps))
        for length in self.lengths:
            if length < least:
                raise UserError(
                    f"--lengths {length}: {self.depths} depths with gaps up to {max(self.gaps)} need at least {least} "
                    "tokens: use longer documents or fewer --depths"
                )


@dataclass(slots=True, kw_only=True)
class Score:
    asked: int = 0
    right: int = 0

    def add(self, is_right: bool) -> None:
        self.asked += 1
        self.right += is_right

    @property
    def share(self) -> float:
        return self.right / self.asked if self.asked else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question with what came out of it."""

    length: int
    task: str
    depth: int
    """Tenths of the document, with ten depths; -1 where there is nothing to find."""
    gap: int
    name: str
    expected: str
    answer: str

    @property
    def is_right(self) -> bool:
        return self.answer == self.expected


@dataclass(slots=True, kw_only=True)
class NeedleReport:
    request: NeedleRequest
    asked: list[Asked] = field(default_factory=list)
    documents: dict[int, int] = field(default_factory=dict)
    """By length."""
    prefill_s: dict[int, float] = field(default_factory=dict)
    """Wall seconds of all documents of a length."""

    def score(self, **wanted: Any) -> Score:
        """Of the questions whose fields have these values."""
        score = Score()
        for one in self.asked:
            if all(getattr(one, name) == value for name, value in wanted.items()):
                score.add(one.is_right)
        return score

    def document(self) -> dict[str, Any]:
        """What --json writes."""
        request = self.request
        cells = [
            {"task": task, "length": length, "depth": depth, "asked": score.asked, "right": score.right}
            for task in TASKS[:2]
            for length in request.lengths
            for depth in range(request.depths)
            for score in [self.score(task=task, length=length, depth=depth)]
        ]
        totals: list[dict[str, Any]] = []
        for length in request.lengths:
            for task in TASKS:
                score = self.score(task=task, length=length)
                totals.append({"task": task, "length": length, "asked": score.asked, "right": score.right})
            for gap in request.gaps:
                score = self.score(task="section", length=length, gap=gap)
                totals.append(
                    {"task": "section", "length": length, "gap": gap, "asked": score.asked, "right": score.right}
                )
        wrong = [
            {name: getattr(one, name) for name in ("length", "task", "depth", "gap", "name", "expected", "answer")}
            for one in self.asked
            if not one.is_right
        ]
        return {
            "model": str(request.model),
            "settings": request.settings,
            "seed": request.seed,
            "depths": request.depths,
            "documents": {str(length): count for length, count in self.documents.items()},
            "prefill_s": {str(length): round(seconds, 3) for length, seconds in self.prefill_s.items()},
            "cells": cells,
            "totals": totals,
            "wrong": wrong,
        }

    def grids(self) -> list[Grid]:
        """The picture's two parts: share of right answers by depth (rows) and length (columns)."""
        request = self.request
        grids: list[Grid] = []
        for task, title in (("plain", "the fact names its owner"), ("section", "the header names the owner")):
            rows = tuple(
                tuple(self.score(task=task, length=length, depth=depth).share for length in request.lengths)
                for depth in range(request.depths)
            )
            grids.append(Grid(title=title, columns=tuple(length_label(n) for n in request.lengths), shares=rows))
        return grids


def run_needles(request: NeedleRequest, on_document: Callable[[str], None]) -> NeedleReport:
    """Runs the request; one line for each document goes to `on_document`.

    Raises:
        UserError: something about the request, the model or the machine; nothing was started.
        RunFailed: a worker died, hung or failed.
    """
    outputs = {"--json": request.json_file, "--svg": request.svg_file, "--png": request.png_file}
    check_outputs(outputs, inputs=[request.model])
    read_config(request.model)  # a missing directory is told by its name
    tokenizer = Tokenizer(request.model)
    plans = [(length, document) for length in request.lengths for document in documents_of(request, length)]
    for _, document in plans:
        check_byte_tokens(tokenizer, document, request.model)
    cluster = LocalCluster(request.model, decode=False, max_tokens=max(request.lengths), **request.settings)
    report = NeedleReport(request=request)
    with cluster, tempfile.TemporaryDirectory(prefix="longprefill-needle-") as folder:
        # imported here: it loads torch, while Ray's workers start
        from longprefill.orchestrator.needle.reader import Reader

        questions = [question for _, document in plans for question in questions_of(document)]
        longest = max(len(tokenizer.encode(question.text)) for question in questions)
        reader = Reader(cluster.settings, max_tokens=max(request.lengths), longest_question=longest)
        for length, document in plans:
            result = cluster.prefill(tokenizer.encode(document.text))
            snapshot = Path(folder) / "document.safetensors"
            cluster.export_job(result.job, snapshot)
            cluster.close_job(result.job)
            asked = questions_of(document)
            answers = reader.answers(snapshot, [tokenizer.encode(question.text) for question in asked])
            snapshot.unlink()
            texts = [tokenizer.decode(answer) for answer in answers]
            report.asked += judge(document, texts, length, request.depths)
            report.documents[length] = report.documents.get(length, 0) + 1
            report.prefill_s[length] = report.prefill_s.get(length, 0.0) + result.prefill_s
            on_document(_progress(report, length, result.prefill_s))
    _write(request, report)
    return report


def check_byte_tokens(tokenizer: Tokenizer, document: Document, model: Path) -> None:
    """Refuses a model whose tokens are not bytes, because facts are placed by bytes.

    Raises:
        UserError: names how many tokens it makes of the document.
    """
    num_tokens, length = len(tokenizer.encode(document.text)), len(document.text)
    if num_tokens != length:
        raise UserError(
            f"the tokenizer of {model} makes {num_tokens} tokens of {length} bytes: needles are placed by bytes and "
            "need a model whose tokens are bytes, as examples/needle is"
        )


def documents_of(request: NeedleRequest, length: int) -> list[Document]:
    """All documents of a length; together they have `needles` facts of each task at each depth."""
    together = min(request.needles, MOST_TOGETHER, max(1, length // (request.depths * TOKENS_PER_FACT)))
    documents: list[Document] = []
    left, absent_left = request.needles, request.absent
    while left:
        count = min(together, left)
        left -= count
        absent = -(-absent_left * count // (left + count))
        absent_left -= absent
        seed = f"{request.seed}/{length}/{len(documents)}"
        rng = random.Random(f"{seed}/places")
        shift = len(documents) % len(request.gaps)  # else a depth would always have the same gap
        gaps = (*request.gaps[shift:], *request.gaps[:shift])
        wanted = spread(count * request.depths, length, gaps, rng)
        documents.append(write_document(length, wanted, num_absent=absent, seed=seed))
    return documents


def questions_of(document: Document) -> list[Question]:
    """All questions about a document, those about absent names last."""
    return [*(placed.question for placed in document.facts), *document.absent]


def judge(document: Document, answers: list[str], length: int, depths: int) -> list[Asked]:
    """The questions of `questions_of` with their answers; anything around an answer but spaces makes it wrong."""
    judged: list[Asked] = []
    for number, (question, answer) in enumerate(zip(questions_of(document), answers, strict=True)):
        depth, gap = -1, 0
        if number < len(document.facts):
            placed = document.facts[number]
            depth, gap = min((placed.start + placed.end) * depths // (2 * length), depths - 1), placed.fact.gap
        judged.append(
            Asked(
                length=length,
                task=question.task,
                depth=depth,
                gap=gap,
                name=question.name,
                expected=question.answer,
                answer=answer.strip(),
            )
        )
    return judged


def length_label(length: int) -> str:
    """256K for 262144."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _progress(report: NeedleReport, length: int, seconds: float) -> str:
    parts = [f"{length} tokens in {seconds:.2f} s"]
    for task in TASKS:
        score = report.score(task=task, length=length)
        parts.append(f"{task} {score.right}/{score.asked}")
    return ", ".join(parts)


def _write(request: NeedleRequest, report: NeedleReport) -> None:
    title = f"Right answers of {request.model.name}"
    if request.json_file is not None:
        with writing("--json", request.json_file):
            request.json_file.write_text(json.dumps(report.document(), indent=1) + "\n")
    if request.svg_file is not None:
        with writing("--svg", request.svg_file):
            request.svg_file.write_text(svg(title, report.grids()))
    if request.png_file is not None:
        with writing("--png", request.png_file):
            request.png_file.write_bytes(png(title, report.grids()))
