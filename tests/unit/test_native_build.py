"""Building the compiled kernels: instruction sets, cache, locks and refusals, with a compiler that only pretends."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longprefill.kernels.native import build as native_build
from longprefill.kernels.native import library
from longprefill.kernels.native.build import BuildError, build
from longprefill.kernels.native.isa import _X86_FLAGS, ISAS, IsaError, chosen_isa, isas_of, supported_isas

ALL_FLAGS = sorted({flag for flags in _X86_FLAGS.values() for flag in flags})


@given(flags=st.frozensets(st.sampled_from(ALL_FLAGS)))
def test_an_instruction_set_needs_its_flags_and_all_slower_sets(flags: frozenset[str]) -> None:
    found = isas_of(flags)
    assert found == ISAS[: len(found)]
    assert all(flags.issuperset(_X86_FLAGS[isa]) for isa in found[1:])
    if len(found) < len(ISAS):
        assert not flags.issuperset(_X86_FLAGS[ISAS[len(found)]])


def test_the_best_supported_set_is_taken_unless_one_is_named() -> None:
    assert chosen_isa({}) == supported_isas()[-1]
    assert chosen_isa({"LONGPREFILL_ISA": ""}) == supported_isas()[-1]
    assert chosen_isa({"LONGPREFILL_ISA": "portable"}) == "portable"


def test_a_wrong_name_is_an_error_with_the_allowed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = ", ".join(supported_isas())
    with pytest.raises(IsaError, match=f"LONGPREFILL_ISA=sse9: there is no such instruction set: use one of {allowed}"):
        chosen_isa({"LONGPREFILL_ISA": "sse9"})
    monkeypatch.setattr("longprefill.kernels.native.isa.supported_isas", lambda: ("portable",))
    with pytest.raises(IsaError, match="LONGPREFILL_ISA=avx512: this processor lacks it: use one of portable,"):
        chosen_isa({"LONGPREFILL_ISA": "avx512"})


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A compiler that writes down what it is asked for, and two sources, the second of which includes a header."""
    log, program, sources = tmp_path / "log", tmp_path / "fake-g++", tmp_path / "sources"
    program.write_text(f"""#!/bin/sh
        [ "$1" = --version ] && {{ echo "fake 1.0"; exit; }}
        echo "$*" >>{log}
        [ -e {tmp_path}/fails ] && {{ echo "error: no good" >&2; exit 3; }}
        while [ $# -gt 1 ]; do [ "$1" = -o ] && echo built >"$2"; shift; done
        """)
    program.chmod(0o755)
    sources.mkdir()
    (sources / "one.cpp").write_text("int one;\n")
    (sources / "two.cpp").write_text('#include "two.h"\n')
    (sources / "two.h").write_text("int two;\n")
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("LONGPREFILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build, "KERNELS", sources)
    monkeypatch.setattr(native_build, "sources", lambda: sorted(sources.glob("*.cpp")))
    monkeypatch.setattr(native_build, "headers", lambda: sorted(sources.glob("*.h")))

    def calls() -> list[str]:
        """What was compiled (file names) or linked since the last call."""
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted(
            "link" if "-shared" in line else line.split(" -c ")[1].split()[0].split("/")[-1] for line in lines
        )

    return calls


def test_a_library_is_built_once_and_again_only_where_something_changed(
    compiler: Callable[[], list[str]], tmp_path: Path
) -> None:
    first = build("portable")
    assert first.read_text() == "built\n"
    assert compiler() == ["link", "one.cpp", "two.cpp"]
    assert build("portable") == first
    assert compiler() == []
    (tmp_path / "sources" / "two.h").write_text("int three;\n")
    second = build("portable")
    assert second != first
    assert compiler() == ["link", "two.cpp"]
    assert build("avx2") not in (first, second)
    assert compiler() == ["link", "one.cpp", "two.cpp"]


def test_another_compiler_or_torch_is_another_library(
    compiler: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build("portable")
    program = tmp_path / "fake-g++"
    program.write_text(program.read_text().replace("fake 1.0", "fake 2.0"))
    second = build("portable")
    torch = native_build._find_torch()
    monkeypatch.setattr(native_build, "_find_torch", lambda: native_build.Torch(folder=torch.folder, version="99.0"))
    assert len({first, second, build("portable")}) == 3


def test_many_builders_at_once_build_once(compiler: Callable[[], list[str]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: build("portable"), range(8)))) == 1
    assert compiler() == ["link", "one.cpp", "two.cpp"]


def test_what_a_failing_compiler_says_is_told_and_nothing_is_left(
    compiler: Callable[[], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "fails").touch()
    with pytest.raises(BuildError, match=r"compiling one\.cpp for portable: .* ended with 3:\nerror: no good"):
        build("portable")
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("*.o"))
    (tmp_path / "fails").unlink()
    assert build("portable").exists()


def test_without_a_compiler_a_library_of_the_same_sources_serves(
    compiler: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = build("portable")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build("portable") == ready
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(no-such-compiler is not on the path\): install g\+\+"):
        build("avx2")


def test_a_cache_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LONGPREFILL_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"no folder for compiled kernels .*: set LONGPREFILL_CACHE"):
        native_build.cache_folder()


def test_a_disk_that_fails_is_a_build_error(
    compiler: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not a traceback in the middle of a table of backends."""
    (tmp_path / "cache").mkdir(mode=0o755)
    (tmp_path / "cache" / "objects").touch()
    with pytest.raises(BuildError, match=r"building in .*/cache: .*File exists.*/objects'.*set LONGPREFILL_CACHE"):
        build("portable")

    def no_space(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "cache" / "objects").unlink()
    monkeypatch.setattr(native_build.tempfile, "mkstemp", no_space)
    with pytest.raises(BuildError, match=r"building in .*/cache: .*No space left on device: make room"):
        build("portable")
    monkeypatch.setattr(native_build, "_locked", no_space)
    with pytest.raises(BuildError, match="No space left on device"):
        build("portable")
    assert compiler() == []


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_cache_that_others_can_write_to_is_refused(
    compiler: Callable[[], list[str]], mode: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = build("portable")
    ready.parent.chmod(mode)
    with pytest.raises(BuildError, match=rf"cache: others can write to it \(mode {mode:o}\): run chmod go-w"):
        build("portable")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build("portable")
    monkeypatch.delenv("LONGPREFILL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native_build.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "home" / "longprefill").mkdir(parents=True)
    (tmp_path / "home" / "longprefill").chmod(mode)
    assert native_build.cache_folder() == (tmp_path / f"longprefill-{os.getuid()}").resolve()
    assert len(compiler()) == 3


def test_a_ready_library_of_roots_is_taken_and_nothing_is_built_there(
    compiler: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An image that root built, run by a user."""
    ready = build("portable")
    compiler()
    assert ready.stat().st_mode & 0o777 == 0o755
    monkeypatch.setattr(native_build, "ROOT", os.getuid())
    monkeypatch.setattr(native_build.os, "getuid", lambda: 54321)
    assert build("portable") == ready
    with pytest.raises(BuildError, match=r"cache: owned by user \d+\): set LONGPREFILL_CACHE"):
        build("avx2")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build("portable") == ready
    monkeypatch.setattr(native_build, "ROOT", 54322)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build("portable")
    assert compiler() == []


def test_the_users_cache_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LONGPREFILL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = native_build.cache_folder()
    assert folder == (tmp_path / "longprefill").resolve()
    assert folder.stat().st_mode & 0o077 == 0


def test_a_failed_build_is_a_refusal_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(isa: str | None = None) -> Path:
        raise BuildError("no C++ compiler: install g++\nmore of it")

    monkeypatch.setattr(library, "build", fails)
    library.load.cache_clear()
    library._build_refusal.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert library.refusal("cpu") == "no C++ compiler: install g++"
            assert library.refusal("cpu") == "no C++ compiler: install g++"
        assert len(caplog.records) == 1
    finally:
        library.load.cache_clear()
        library._build_refusal.cache_clear()
    assert library.refusal("cuda") == "compiled for the CPU, not for cuda"


def test_a_wrong_isa_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGPREFILL_ISA", "sse9")
    library._chosen_once.cache_clear()
    try:
        with pytest.raises(IsaError):
            library.refusal("cpu")
    finally:
        library._chosen_once.cache_clear()
