"""`longprefill doctor` on compiled kernels: which instruction set, library, cache, compiler and backends, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longprefill.kernels.backends import OPS
from longprefill.kernels.native import library
from longprefill.kernels.native.build import build
from longprefill.kernels.native.isa import IsaError, supported_isas
from longprefill.orchestrator import doctor

NO_COMPILER = "no C++ compiler (no-such-c++ is not on the path): install g++ or set CXX"
LIBRARY = Path("/somewhere/longprefill-fake.so")


@pytest.fixture(autouse=True)
def no_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A library that is there without a compiler having run."""
    monkeypatch.setattr(library, "refusal", lambda device_type: None)
    monkeypatch.setattr(doctor, "build", lambda isa: LIBRARY)
    monkeypatch.setenv("LONGPREFILL_CACHE", str(tmp_path))
    monkeypatch.delenv("LONGPREFILL_ISA", raising=False)
    library._chosen_once.cache_clear()
    yield
    library._chosen_once.cache_clear()


def diagnosed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    doctor.print_diagnosis(as_json=True)
    return json.loads(capsys.readouterr().out)


def text(capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed for people, without the breaks of a narrow terminal's tables."""
    doctor.print_diagnosis(as_json=False)
    return " ".join(capsys.readouterr().out.split())


def test_the_best_instruction_set_is_named_with_its_library(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    best = supported_isas()[-1]
    assert diagnosed(capsys)["compiled"] == {
        "isa": best,
        "supported_isas": list(supported_isas()),
        "forced_isa": None,
        "library": str(LIBRARY),
        "cache": str(tmp_path.resolve()),
        "reason": "",
    }
    said = text(capsys)
    isas = ", ".join(supported_isas())
    assert f"compiled kernels: {best} of {isas} (the best here; LONGPREFILL_ISA forces another), {LIBRARY}" in said


def test_a_forced_instruction_set_is_named_as_forced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGPREFILL_ISA", "portable")
    compiled = diagnosed(capsys)["compiled"]
    assert (compiled["isa"], compiled["forced_isa"]) == ("portable", "portable")
    assert "(forced by LONGPREFILL_ISA)" in text(capsys)


def test_a_wrong_instruction_set_is_an_error_not_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGPREFILL_ISA", "sse9")
    with pytest.raises(IsaError, match="LONGPREFILL_ISA=sse9: there is no such instruction set"):
        doctor.diagnose()


def test_every_kernel_has_one_backend_in_use_and_all_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    rows = diagnosed(capsys)["kernels"]
    assert {row["op"] for row in rows} == set(OPS)
    for op in OPS:
        mine = [row for row in rows if row["op"] == op]
        assert [row["used"] for row in mine] == [True] + [False] * (len(mine) - 1)
        assert all(row["why"] for row in mine)
    why = {(row["op"], row["backend"]): row["why"] for row in rows}
    assert why["kda", "cpu"] == f"compiled for {supported_isas()[-1]}"
    assert why["kda", "plain"] == "cpu comes first; taken where it is asked for by name"
    assert why["sampling", "plain"] == "torch operators; this op has no compiled backend"


def test_without_a_compiler_the_torch_operators_serve_and_the_reason_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-c++")
    monkeypatch.setattr(library, "refusal", lambda device_type: NO_COMPILER)
    found = diagnosed(capsys)
    assert found["compiler"] is None
    assert (found["compiled"]["library"], found["compiled"]["reason"]) == (None, NO_COMPILER)
    used = {row["op"]: row for row in found["kernels"] if row["used"]}
    assert {row["backend"] for row in used.values()} == {"plain"}
    assert used["indexer"]["why"] == f"torch operators; cpu is not there: {NO_COMPILER}"
    refused = next(row for row in found["kernels"] if (row["op"], row["backend"]) == ("indexer", "cpu"))
    assert (refused["available"], refused["reason"], refused["why"]) == (False, NO_COMPILER, NO_COMPILER)
    said = text(capsys)
    assert f"compiled kernels: none for {supported_isas()[-1]} of " in said
    assert f": {NO_COMPILER}; cache " in said
    assert "compiler none" in said


def test_the_compiler_is_that_of_cxx_with_its_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "my-c++"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", f"{program} -m64")
    assert diagnosed(capsys)["compiler"] == str(program)
    assert f"compiler {program}" in text(capsys).replace(" /", "/").replace("compiler/", "compiler /")


def test_a_cache_that_cannot_be_written_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LONGPREFILL_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("longprefill.orchestrator.doctor.build", build)
    compiled = diagnosed(capsys)["compiled"]
    assert compiled["cache"] is None
    assert compiled["library"] is None
    assert compiled["reason"].startswith("no folder for compiled kernels")
