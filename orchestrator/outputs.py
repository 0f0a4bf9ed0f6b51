"""Output files of a command, checked before the work that fills them."""

from __future__ import annotations

import os
from pathlib import Path

from longprefill.partition.errors import UserError


def check_writable(option: str, path: Path | None) -> None:
    """Refuses a path that cannot be written; creates nothing.

    Raises:
        UserError: names the option, the path and why.
    """
    if path is None:
        return
    parent = path.resolve().parent
    if path.is_dir():
        raise UserError(f"{option} {path} is a directory: name a file")
    if not parent.is_dir():
        raise UserError(
            f"{option} {path} cannot be written: there is no directory {parent}: create it or choose another path"
        )
    target = path if path.exists() else parent
    if not os.access(target, os.W_OK):
        raise UserError(f"{option} {path} cannot be written: {target} is not writable: choose another path")
    # root passes os.access everywhere; what counts is whether the file opens (a read-only or a virtual file system)
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UserError(f"{option} {path} cannot be written: {error.strerror}: choose another path") from None
    if path.stat().st_size == 0 and target is parent:
        path.unlink()
