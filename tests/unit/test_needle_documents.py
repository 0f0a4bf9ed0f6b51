"""Documents with planted facts: exact lengths, facts where they were wanted, questions with one answer."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longprefill.orchestrator.needle import documents
from longprefill.orchestrator.needle.bench import (
    MOST_TOGETHER,
    NeedleReport,
    NeedleRequest,
    documents_of,
    judge,
    questions_of,
)
from longprefill.orchestrator.needle.demo import cuts_of, document_over
from longprefill.orchestrator.needle.documents import Wanted, astride, spread, write_document
from longprefill.orchestrator.needle.filler import filler_text
from longprefill.orchestrator.needle.picture import Grid, png, svg
from longprefill.orchestrator.needle.words import UNKNOWN, Phrasing, draw_names
from longprefill.orchestrator.plan import ClusterSettings
from longprefill.partition.errors import UserError


def request(**changes: Any) -> NeedleRequest:
    values: dict[str, Any] = {
        "model": Path("model"), "lengths": (4096, 16384), "depths": 10, "needles": 2, "gaps": (32, 128), "absent": 5,
        "seed": 0, "settings": {},
    }  # fmt: skip
    return NeedleRequest(**values | changes)


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 9), length=st.integers(4000, 9000))
def test_a_document_holds_what_it_says(seed: int, count: int, length: int) -> None:
    wanted = spread(count, length, (0, 32, 128), random.Random(seed))
    document = write_document(length, wanted, num_absent=3, seed=str(seed))
    assert len(document.text) == len(document.text.encode()) == length
    assert len(document.facts) == 2 * count
    for placed in document.facts:
        assert document.text[placed.start : placed.end] == placed.fact.text
        assert placed.question.answer == placed.fact.digits
        assert placed.question.name == placed.fact.name
        assert re.fullmatch(r"\d{5}", placed.fact.digits)
        # a section's name stands in its header only
        assert document.text.count(f" {placed.fact.name}") >= 1
        assert placed.fact.digits in placed.fact.text.rpartition(" ")[2]
    lowered = document.text.lower()
    for question in document.absent:
        assert question.answer == UNKNOWN
        assert f" {question.name.lower()} " not in lowered


def test_no_absent_name_is_a_word_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it happens once in hundreds of documents: `made` can be drawn as well."""
    drawn = iter([["Return", "zado", "value"], ["the"], ["brimo"], ["ZADO"], ["qualt"]])
    monkeypatch.setattr(documents, "draw_names", lambda *_arguments: next(drawn))
    document = write_document(20_000, [], num_absent=3, seed="1")
    assert [question.name for question in document.absent] == ["brimo", "zado", "qualt"]
    assert {"return", "value", "the"} < set(document.text.lower().split())


def test_facts_lie_over_the_cuts() -> None:
    cuts = [500, 1000, 1500, 2048, 2500, 2900]
    document = write_document(3500, astride(cuts, gap=96), num_absent=0, seed="cuts")
    assert [placed.fact.kind for placed in document.facts] == ["section", "section", "plain"] * 2
    for placed, cut in zip(document.facts, cuts, strict=True):
        text = placed.fact.text
        header_end = placed.start + (text.index("\n", 1) if placed.fact.kind == "section" else 0)
        digits_start = placed.start + text.rindex(placed.fact.digits)
        assert header_end < cut < (digits_start if placed.fact.kind == "section" else placed.end)


@pytest.mark.parametrize(("cp", "step_tokens", "num_cuts"), [(24, 8192, 47), (2, 256, 127)])
def test_cuts_that_are_too_close_are_refused(cp: int, step_tokens: int, num_cuts: int) -> None:
    cuts = cuts_of(ClusterSettings(model_dir="", cp=cp, step_tokens=step_tokens), step_tokens, 8192)
    assert len(cuts) == num_cuts
    with pytest.raises(UserError, match=r"too close for a fact over each|do not fit 8192 tokens"):
        document_over(cuts, 8192)


def test_one_seed_gives_one_document() -> None:
    first, second, other = (
        write_document(2000, [Wanted(kind="plain", middle=700)], num_absent=1, seed=seed) for seed in ("1", "1", "2")
    )
    assert first == second
    assert first != other


def test_facts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="do not fit 300 tokens"):
        write_document(300, astride([100, 150, 200], gap=50), num_absent=0, seed="0")


def test_no_paragraph_is_trained_on_and_tested_on() -> None:
    training, test = (set(filler_text(split).split("\n\n")) - {""} for split in ("training", "test"))
    assert not training & test
    assert 0.05 < len(test) / len(training) < 0.2


def test_names_differ_by_more_than_their_case() -> None:
    names = draw_names(300, random.Random(0), siblings=0.5)
    assert len({name.lower() for name in names}) == 300
    assert all(3 <= len(name) <= 9 for name in names)


def test_every_cell_of_the_bench_gets_its_facts() -> None:
    wanted = request(lengths=(4096, 65536), needles=3, absent=7)
    report = NeedleReport(request=wanted)
    for length in wanted.lengths:
        for document in documents_of(wanted, length):
            answers = [question.answer for question in questions_of(document)]
            report.asked += judge(document, [*answers[:-1], f" {answers[-1]}\n"], length, wanted.depths)
        assert report.score(task="absent", length=length).asked == 7
        for task in ("plain", "section"):
            score = report.score(task=task, length=length)
            assert score.asked == score.right == 30
    assert {cell["asked"] for cell in report.document()["cells"]} <= {2, 3, 4}
    assert report.document()["wrong"] == []


def test_more_questions_make_more_documents_and_not_denser_ones() -> None:
    for length, most in ((4096, 1), (65536, MOST_TOGETHER), (262144, MOST_TOGETHER)):
        documents = list(documents_of(request(needles=12, absent=5), length))
        assert max(len(document.facts) for document in documents) == 2 * most * 10
        assert sum(len(document.facts) for document in documents) == 2 * 12 * 10


def test_a_wrong_answer_is_reported() -> None:
    wanted = request(lengths=(4096,), needles=1)
    (document,) = documents_of(wanted, 4096)
    report = NeedleReport(request=wanted)
    answers = [question.answer for question in questions_of(document)]
    report.asked = judge(document, [answers[0] + "0", *answers[1:]], 4096, wanted.depths)
    (wrong,) = report.document()["wrong"]
    assert wrong["expected"] == answers[0]
    assert report.grids()[1].shares[0][0] < 1
    assert report.grids()[0].shares[0][0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": 0}, "--depths 0: use 1 to 100"),
        ({"needles": 0}, "--needles 0"),
        ({"absent": -1}, "--absent -1"),
        ({"gaps": ()}, "--lengths and --gaps need"),
        ({"gaps": (5000,)}, "--gaps 5000"),
        ({"lengths": (2048,)}, "--lengths 2048: 10 depths with gaps up to 128 need at least 3880 tokens"),
    ],
)
def test_wrong_requests_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        request(**changes)


def test_pictures_show_each_share() -> None:
    grids = [
        Grid(title="one", columns=("4K", "16K"), shares=((1.0, 0.5), (0.25, float("nan")))),
        Grid(title="two & more", columns=("4K",), shares=((0.0,),)),
    ]
    drawn = svg("title", grids)
    assert svg("title", grids) == drawn
    for words in (">100<", ">50<", ">25<", ">0<", ">-<", "two &amp; more", "4K", "depth"):
        assert words in drawn
    data = png("title", grids)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert f'width="{width // 2}" height="{height // 2}"' in drawn


def test_phrasings_have_the_first_form_without_variety() -> None:
    document = write_document(
        2000, [Wanted(kind="plain", middle=900)], num_absent=0, seed="0", phrasing=Phrasing(varied=0.0)
    )
    (placed,) = document.facts
    assert placed.fact.text == f"The pass key for {placed.fact.name} is {placed.fact.digits}."
