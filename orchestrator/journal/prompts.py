"""Prompts on disk: a file is whole and durable, or not there. Each is named by its job's id; others are orphans."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container
from pathlib import Path

import numpy as np

SUFFIX = ".npy"


class PromptFiles:
    """The prompts of jobs that have not ended, as int32 .npy files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, job: str, tokens_T: np.ndarray) -> None:
        """Writes a prompt; it survives a loss of power when this returns.

        Raises:
            OSError: no room, or the directory cannot be written; no file is left.
        """
        path = self._path(job)
        unready = path.with_suffix(".new")
        try:
            with unready.open("xb") as file:
                np.save(file, np.ascontiguousarray(tokens_T, dtype=np.int32), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            unready.rename(path)
            self._sync_directory()
        except BaseException:
            for leftover in (unready, path):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            raise

    def read(self, job: str) -> np.ndarray:
        """int32 [T].

        Raises:
            OSError, ValueError: the file is gone or damaged.
        """
        tokens_T = np.load(self._path(job), allow_pickle=False)
        if tokens_T.dtype != np.int32 or tokens_T.ndim != 1:
            raise ValueError(f"{self._path(job)} holds {tokens_T.dtype} {tokens_T.shape}, a prompt is int32 [T]")
        return tokens_T

    def remove(self, job: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path(job).unlink()

    def sweep(self, known: Container[str]) -> int:
        """Removes every file that is no known job's prompt.

        Returns:
            How many were removed.
        """
        orphans = [path for path in self.directory.iterdir() if path.suffix != SUFFIX or path.stem not in known]
        for path in orphans:
            path.unlink(missing_ok=True)
        return len(orphans)

    def _path(self, job: str) -> Path:
        return self.directory / f"{job}{SUFFIX}"

    def _sync_directory(self) -> None:
        handle = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
