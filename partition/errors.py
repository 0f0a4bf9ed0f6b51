"""Errors that are answers: the caller asked for something that cannot be done, and one line says what and why.

A `UserError` reaches the command line as one line with exit code 2 and HTTP as 409 or 422; anything else is a bug and
keeps its traceback. Instances pickle, so they cross process borders unchanged. Torch-free.
"""


class UserError(Exception):
    """An expected negative answer. Its argument is the whole message: what, its value, what is allowed, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class ModelError(UserError):
    """A model directory, its config or its weights cannot be used."""


class PromptError(UserError):
    """A prompt cannot be read, or the model cannot take it."""
