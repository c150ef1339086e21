"""What a run tells: on a terminal in colour and wrapped at its width, elsewhere plain and one line a step."""

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
from struct import pack

import pytest

from tests.paths import PROJECT

PROGRAM = (
    "from tasks.running.progress import log_block, log_step, show_on_terminal\n"
    "show_on_terminal()\n"
    "log_step('machines', 'many words [of] ' * 12)\n"
    "log_block('\\n  cost        1 USD')\n"
)


def on_terminal(columns):
    """Return the bytes that the program writes to a terminal of so many columns."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, pack("HHHH", 24, columns, 0, 0))
    names = {"NO_COLOR", "COLUMNS"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=PROJECT,
        env={**environment, "TERM": "xterm-256color"},
        stdin=terminal,
        stdout=terminal,
        check=True,
    )
    os.close(terminal)
    written = b""
    try:
        while part := os.read(controller, 65_536):
            written += part
    except OSError:  # how Linux tells that the other end is closed
        pass
    os.close(controller)
    return written.decode()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_colours_and_no_line_wider_than_it_is(columns):
    written = on_terminal(columns)

    assert "\x1b[1;36m  machines\x1b[0m" in written
    assert "\x1b[1;36m  cost\x1b[0m" in written
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in written.splitlines()]
    assert columns - 20 < max(map(len, lines)) <= columns
    assert "[of]" in written


def test_a_pipe_gets_plain_text_and_a_line_for_each_step():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=PROJECT, capture_output=True, text=True, check=True
    )

    assert "\x1b" not in done.stdout
    assert done.stdout == "  machines   " + "many words [of] " * 12 + "\n\n  cost        1 USD\n"
