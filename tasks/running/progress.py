"""What a run tells while it goes: ordinary log lines, which a terminal shows plainly.

In a served flow run the same lines are in the log of the run; the command line adds a handler.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)


def log_step(step: str, text: str) -> None:
    """Say what a step is about to do or has found."""
    logger.info("  %-10s %s", step, text)


def log_block(text: str) -> None:
    """Say something of several lines as it is."""
    logger.info("%s", text)


def show_on_terminal() -> None:
    """Print the story to standard output, without times and names."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
