"""Commands of `heterps`: each module has its help as docstring, `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import NoReturn

from heterps_core.plain_text import PlainOutput

RUN_HELP = "a run's id, the beginning of one, or latest"
"""For the help of every command that takes a run; `tasks/records/runs.py` finds it."""


@contextmanager
def plain_output() -> Iterator[None]:
    """Let nothing that a command prints steer the terminal, whatever nodes, files and data hold."""
    if isinstance(sys.stdout, PlainOutput):
        yield
        return
    with ExitStack() as streams:
        streams.enter_context(redirect_stdout(PlainOutput(sys.stdout)))
        streams.enter_context(redirect_stderr(PlainOutput(sys.stderr)))
        yield


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help lists what there is\n")


def whole_number(most: int) -> Callable[[str], int]:
    """Return what reads an argument that is a number from 1 to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {most:,}, got {text!r}")
        return int(text)

    return read
