"""What a run tells while it goes: ordinary log lines, which the command line shows.

In a served flow run the same lines are in the log of the run.
"""

from __future__ import annotations

import logging
import sys

from heterps_core.text_table import labelled_lines

STEP = "  %-10s %s"

logger = logging.getLogger(__name__)


def log_step(step: str, text: str) -> None:
    """Say what a step is about to do or has found."""
    logger.info(STEP, step, text)


def log_block(text: str) -> None:
    """Say something of several lines as it is."""
    logger.info("%s", text)


class TerminalHandler(logging.Handler):
    """Shows steps on a terminal, wrapped at its width, with what stands before each text in colour."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console

        self._console = Console(highlight=False)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        from rich.text import Text

        message = record.getMessage()
        if record.msg == STEP and isinstance(record.args, tuple):
            message = "\n".join(
                labelled_lines([(str(record.args[0]), str(record.args[1]))], width=self._console.width)
            )
        text = Text(message)
        text.highlight_regex(r"(?m)^  \S+( \S+)?(?=  )", "bold cyan")
        self._console.print(text, soft_wrap=True)


def show_on_terminal() -> None:
    """Print the story to standard output, without times and names; plain where it is no terminal."""
    if logger.handlers:
        return
    handler: logging.Handler = TerminalHandler() if sys.stdout.isatty() else logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
