"""What an operator asks at a shell: one module a command of `heterps`, with its HELP, `add_arguments` and `run`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

RUN_HELP = "a run's id, the beginning of one, or latest"
"""For the help of every command that takes a run; `tasks/records/runs.py` finds it."""


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
