"""Builds the compiled kernels: one shared library an instruction set, from `kernels/*/cpu_src/*.cpp`.

    python -m longprefill.kernels.native.build            build for this processor (or LONGPREFILL_ISA), print the path
    python -m longprefill.kernels.native.build --all      every instruction set that this processor can run

Does not import torch: its headers and version are found without. Libraries lie in a cache of the user, under a name
that holds everything they depend on: a changed source, compiler, flag or torch is another file, nothing is ever stale.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .isa import chosen_isa, compiler_flags, supported_isas

logger = logging.getLogger(__name__)

KERNELS = Path(__file__).resolve().parent.parent
INCLUDE = Path(__file__).resolve().parent / "include"
CACHE_VARIABLE = "LONGPREFILL_CACHE"
ROOT = 0

BASE_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    # Vectors are passed inside one translation unit only; every symbol but the registrations stays inside the library,
    # or a function compiled for AVX-512 could be taken by the portable library in the same process.
    *("-Wall", "-Wno-psabi", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fno-gnu-unique"),
)
"""No -ffast-math: NaN, infinities and the order of sums are part of the contract."""

LINK_FLAGS = ("-shared", "-fopenmp", "-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL")
_INCLUDE_LINE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
UNITS = 4
"""Groups of sources that are compiled as one."""
OUTPUT_LINES = 20
"""How much of a failed compiler's output the error repeats."""


class BuildError(RuntimeError):
    """The library cannot be built here: no compiler, no headers, or what the compiler said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    folder: Path
    version: str


def build(isa: str | None = None) -> Path:
    """The library for `isa` (None: the chosen one), built if it is not in the cache yet.

    Safe in any number of processes at once: one builds, the others wait for its lock and take the result.

    Raises:
        BuildError: no compiler and no library of these sources in a cache, no torch headers, no cache that can be
            written, or a failed compilation.
        IsaError: LONGPREFILL_ISA is wrong.
    """
    isa = chosen_isa() if isa is None else isa
    torch = _find_torch()
    prefix = f"longprefill-{isa}-{_source_digest(torch, isa)}"
    command = compiler_command()
    if command is None:  # one that was built on a machine with a compiler, an image for example, will do
        ready = _ready_library(f"{prefix}-*.so")
        if ready is None:
            said = os.environ.get("CXX", "g++")
            raise BuildError(f"no C++ compiler ({said} is not on the path): install g++ or set CXX")
        return ready
    compiler = _compiler_version(command)
    name = f"{prefix}-{_digest([compiler.encode(), *(part.encode() for part in command)])}"
    ready = _ready_library(f"{name}.so")
    if ready is not None:
        return ready
    library = cache_folder() / f"{name}.so"
    try:
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                started = time.monotonic()
                logger.info("building the %s kernels with %s (once; about a minute)", isa, compiler)
                _compile_and_link(library, isa, torch, command, compiler)
                logger.info("built %s in %.0f s", library, time.monotonic() - started)
    except OSError as error:
        raise BuildError(
            f"building in {library.parent}: {error}: make room for it there, or set {CACHE_VARIABLE} to another folder"
        ) from error
    return library


def sources() -> list[Path]:
    """Translation units, in a fixed order."""
    return sorted(KERNELS.glob("*/cpu_src/*.cpp"))


def units() -> list[list[Path]]:
    """The translation units in at most UNITS groups, each compiled as one: two thirds of a unit's time are torch's
    headers. So the names in their anonymous namespaces differ."""
    found = sources()
    number = min(UNITS, len(found))
    return [found[len(found) * n // number : len(found) * (n + 1) // number] for n in range(number)]


def headers() -> list[Path]:
    """Headers of ours that any translation unit may include."""
    return sorted([*INCLUDE.rglob("*.h"), *KERNELS.glob("*/cpu_src/*.h")])


def cache_folder() -> Path:
    """Where libraries are built: LONGPREFILL_CACHE, else the user's cache folder, else a private temporary one.

    Raises:
        BuildError: none of them is the user's own; the message says why.
    """
    refusals, mode = [], 0o755 if os.environ.get(CACHE_VARIABLE) else 0o700
    for folder in _cache_candidates():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=mode)
            refusal = _distrust(folder, (os.getuid(),))
        except OSError as error:
            refusal = error.strerror or str(error)
        if refusal is None and not os.access(folder, os.W_OK):
            refusal = "not writable"
        if refusal is None:
            return folder.resolve()
        refusals.append(f"{folder}: {refusal}")
    raise BuildError(
        f"no folder for compiled kernels ({'; '.join(refusals)}): set {CACHE_VARIABLE} to one that you alone can write"
    )


def _cache_candidates() -> list[Path]:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return [Path(named)]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or "/nonexistent") / ".cache")
    return [base / "longprefill", Path(tempfile.gettempdir()) / f"longprefill-{os.getuid()}"]


def _distrust(folder: Path, owners: Sequence[int]) -> str | None:
    """Why not to load code from a folder: others than its owners can put some there. None: nothing against it."""
    status = folder.stat()
    if status.st_uid not in owners:
        return f"owned by user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"others can write to it (mode {status.st_mode & 0o777:o}): run chmod go-w on it"
    return None


def _ready_library(pattern: str) -> Path | None:
    """A library in a cache of the user's or of root's, which an image may hold; the latter need not be writable."""
    for folder in _cache_candidates():
        try:
            if _distrust(folder, (os.getuid(), ROOT)) is None:
                found = sorted(folder.resolve().glob(pattern))
                if found:
                    return found[0]
        except OSError:  # not there, or not ours to look into
            continue
    return None


def _find_torch() -> Torch:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("torch is not installed: the kernels are compiled against its headers")
    folder = Path(found.origin).parent
    if not (folder / "include" / "torch" / "library.h").exists():
        raise BuildError(f"torch in {folder} comes without C++ headers: install a torch wheel")
    return Torch(folder=folder, version=importlib.metadata.version("torch"))


def compiler_command() -> list[str] | None:
    """$CXX, g++ if it is unset, as the parts of a command line; None: its program is not on the path."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    return command if command and shutil.which(command[0]) else None


def _compiler_version(command: Sequence[str]) -> str:
    return _run([*command, "--version"], "asking the compiler for its version").partition("\n")[0]


def _compile_flags(isa: str, torch: Torch) -> list[str]:
    include = torch.folder / "include"
    return [
        *BASE_FLAGS,
        *compiler_flags(isa),
        f"-DLONGPREFILL_NAMESPACE=longprefill_{isa}",
        f"-I{INCLUDE}",
        # Torch's own warnings are not ours to mend.
        *("-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")),
    ]


def _source_digest(torch: Torch, isa: str) -> str:
    parts = [torch.version.encode(), *(flag.encode() for flag in (*BASE_FLAGS, *LINK_FLAGS))]
    parts += [flag.encode() for flag in compiler_flags(isa)]
    for path in (*headers(), *sources()):
        parts += [str(path.relative_to(KERNELS)).encode(), path.read_bytes()]
    return _digest(parts)


def _digest(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _compile_and_link(library: Path, isa: str, torch: Torch, command: Sequence[str], compiler: str) -> None:
    """Compiles what no earlier build left in the cache, links, and moves the library to its place in one step."""
    flags = _compile_flags(isa, torch)
    common = [compiler.encode(), *(part.encode() for part in (*command, *flags, torch.version))]
    objects = library.parent / "objects"
    objects.mkdir(exist_ok=True)

    def compiled(unit: list[Path]) -> Path:
        texts = [text for source in unit for text in _texts(source)]
        target = objects / f"{unit[0].stem}-{isa}-{_digest([*common, *texts])}.o"
        if not target.exists():
            with _replacing(target) as unfinished, tempfile.TemporaryDirectory() as folder:
                joined = Path(folder) / f"{unit[0].stem}.cpp"
                joined.write_text("".join(f'#include "{source}"\n' for source in unit), encoding="utf-8")
                names = ", ".join(source.name for source in unit)
                _run([*command, *flags, "-c", str(joined), "-o", str(unfinished)], f"compiling {names} for {isa}")
        return target

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        compiled_objects = list(pool.map(compiled, units()))
    libraries = ["-L" + str(torch.folder / "lib"), "-ltorch_cpu", "-lc10"]
    with _replacing(library) as unfinished:
        _run(
            [*command, *LINK_FLAGS, *(str(path) for path in compiled_objects), *libraries, "-o", str(unfinished)],
            f"linking the {isa} kernels",
        )


def _texts(source: Path) -> list[bytes]:
    """A translation unit and the headers of ours that it includes, in order of inclusion."""
    seen: list[Path] = [source]
    for path in seen:  # grows while it runs
        for name in _INCLUDE_LINE.findall(path.read_text(encoding="utf-8")):
            found = [folder / name for folder in (path.parent, INCLUDE) if (folder / name).exists()]
            if found and found[0] not in seen:
                seen.append(found[0])
    return [path.read_bytes() for path in seen]


def _run(command: Sequence[str], doing: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{doing}: {command[0]} cannot be run: {error}") from error
    if result.returncode != 0:
        said = "\n".join((result.stderr or result.stdout).strip().splitlines()[:OUTPUT_LINES])
        raise BuildError(f"{doing}: {command[0]} ended with {result.returncode}:\n{said}")
    return result.stdout


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A path beside `target` that becomes `target` when the block ends well: readers see all of it or nothing."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(descriptor)
    try:
        yield Path(name)
        os.chmod(name, 0o755)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; the kernel lets go of it when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str]) -> int:
    """The command in the module's docstring. Exit code 2 with one line if nothing can be built."""
    if arguments and list(arguments) != ["--all"]:
        sys.stderr.write(f"build: {' '.join(arguments)}: only --all is known\n")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        for isa in supported_isas() if arguments else (chosen_isa(),):
            sys.stdout.write(f"{build(isa)}\n")
    except BuildError as error:
        sys.stderr.write(f"build: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
