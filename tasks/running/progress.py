"""The log lines of a run, which the command line shows.

In a served flow run the same lines are in the log of the run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from heterps_core.plain_text import plain, unfiltered
from heterps_core.text_table import labelled_lines

_STEP = "  %-10s %s"

LAUNCHING, JUDGING, RECORDING = "launching", "judging", "recording"
PHASE_AFTER = {
    "run": "preparing data",
    "data": "profiling",
    "profile": "planning",
    "machines": LAUNCHING,
    "prices": LAUNCHING,
    "resume": LAUNCHING,
    "trained": JUDGING,
    "champion": RECORDING,
}
"""The phase of a run after the log line of a step."""

logger = logging.getLogger(__name__)


def log_step(step: str, text: str) -> None:
    """Log what a step is about to do or has found."""
    logger.info(_STEP, step, text)


def log_block(text: str) -> None:
    """Log a text of several lines as it is."""
    logger.info("%s", text)


class _TerminalHandler(logging.Handler):
    """Shows steps on a terminal, their names in colour, and a bar below with the progress of the phase."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(16),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=Console(highlight=False, file=unfiltered(sys.stdout)),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self.bar.add_task("starting", total=None, text="")
        self._phase = "starting"

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record above the bar, and show the phase after a step."""
        from rich.text import Text

        message, step = record.getMessage(), None
        if record.msg == _STEP and isinstance(record.args, tuple):
            step = str(record.args[0])
            width = self.bar.console.width
            message = "\n".join(labelled_lines([(step, str(record.args[1]))], width=width))
        text = Text(plain(message))
        text.highlight_regex(r"(?m)^  \S+( \S+)?(?=  )", "bold cyan")
        self.bar.console.print(text, soft_wrap=True)
        if step in PHASE_AFTER:
            self.show(PHASE_AFTER[step])

    def show(self, phase: str, *, num_done: int = 0, num_steps: int | None = None, text: str = "") -> None:
        """Show a phase, how far it is where that is known, and for how long."""
        if phase != self._phase:
            self._phase = phase
            self.bar.reset(self._task, description=phase, text="")
        self.bar.update(self._task, completed=num_done, total=num_steps, text=plain(text))


@contextmanager
def shown_steps() -> Iterator[None]:
    """Print the story to standard output while a block runs, without times and names; plain in a pipe."""
    handler: logging.Handler
    with ExitStack() as shown:
        if sys.stdout.isatty():
            handler = _TerminalHandler()
            shown.enter_context(handler.bar)
        else:
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        shown.callback(logger.removeHandler, handler)
        logger.setLevel(logging.INFO)
        yield


def show_progress(phase: str, *, num_done: int, num_steps: int, text: str) -> None:
    """Show how far a phase is, where steps are shown on a terminal."""
    for handler in logger.handlers:
        if isinstance(handler, _TerminalHandler):
            handler.show(phase, num_done=num_done, num_steps=num_steps, text=text)
