"""Output files of a command, checked before the work that fills them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from longprefill.orchestrator.errors import RunFailed
from longprefill.partition.errors import UserError


def check_outputs(outputs: Mapping[str, Path | None], *, inputs: Sequence[Path] = ()) -> None:
    """Refuses paths that cannot be written, that are used twice, or that would overwrite an input (a file, or anything
    that exists in a directory). Creates nothing.

    Raises:
        UserError: names the option, the path and why.
    """
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        check_writable(option, path)
        target = path.resolve()
        if target in taken and (target.is_file() or not target.exists()):
            raise UserError(f"{option} and {taken[target]} both name {path}: give each a file of its own")
        taken[target] = option
        for source in inputs:
            resolved = source.resolve()
            if target == resolved or (resolved.is_dir() and target.exists() and target.is_relative_to(resolved)):
                raise UserError(f"{option} {path} would overwrite an input: choose another path")


def check_writable(option: str, path: Path) -> None:
    """Refuses a path that cannot be written; creates nothing.

    Raises:
        UserError: names the option, the path and why.
    """
    try:
        parent = path.resolve().parent
        if path.is_dir():
            raise UserError(f"{option} {path} is a directory: name a file")
        if not parent.is_dir():
            raise UserError(
                f"{option} {path} cannot be written: there is no directory {parent}: create it or choose another path"
            )
        existed = path.exists()
        if not existed or path.is_file():
            # root passes os.access everywhere; what counts is whether the file opens (a virtual file system, say)
            with path.open("ab"):
                pass
        elif not os.access(path, os.W_OK):  # a pipe or a terminal, whose opening may wait for its other end
            raise UserError(f"{option} {path} cannot be written: it is not writable: choose another path")
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}: choose another path") from None


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """What fails in the block is told as one line: the disk may fill up while the work runs.

    Raises:
        RunFailed: names the option, the path and why.
    """
    try:
        yield
    except OSError as error:
        raise RunFailed(f"{option} {path} could not be written: {error.strerror}") from error
