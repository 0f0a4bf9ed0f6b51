"""Where a command meets the shell: expected failures become one line and an exit code, signals end things in order."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, ParamSpec

import typer

from longprefill.orchestrator.errors import RunFailed
from longprefill.partition.errors import UserError

P = ParamSpec("P")


def user_facing(command: Callable[P, None]) -> Callable[P, None]:
    """Turns expected failures into one line and an exit code; anything else keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except UserError as error:
            end(str(error), 2)
        except RunFailed as error:
            end(str(error), 1)
        except KeyboardInterrupt:
            end("interrupted", 130)
        except BrokenPipeError:
            # whoever read our output has left; what is still buffered must not fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)

    return wrapped


def end(message: str, code: int) -> NoReturn:
    """Ends the process with one line on standard error."""
    typer.echo(f"longprefill: {' '.join(message.split())}", err=True)
    sys.exit(code)


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler: as Ctrl-C, so that every context manager ends what it started."""
    raise KeyboardInterrupt
