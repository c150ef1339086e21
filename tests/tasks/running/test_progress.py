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
    "from tasks.running.progress import log_block, log_step, show_progress, shown_steps\n"
    "with shown_steps():\n"
    "    log_step('machines', 'many words [of] ' * 12)\n"
    "    show_progress('training', num_done=3, num_steps=4, text='7 samples/s, 0.00010 USD')\n"
    "    log_block('\\n  cost        1 USD')\n"
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
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in written.splitlines()]
    assert columns - 20 < max(map(len, lines)) <= columns
    assert "[of]" in written


def test_a_terminal_shows_a_bar_for_what_is_going_on_and_takes_it_away_at_the_end():
    written = on_terminal(80)

    bar = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    assert re.search(r"  training ━{12}\S+ 7 samples/s, 0\.00010 USD 0:00:0\d", bar)
    assert written.rindex("\x1b[?25h") > written.rindex("training")  # the cursor is there again
    assert written.endswith("\x1b[1A\x1b[2K")  # the line of the bar is empty


def test_a_pipe_gets_plain_text_and_a_line_for_each_step():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=PROJECT, capture_output=True, text=True, check=True
    )

    assert "\x1b" not in done.stdout
    assert done.stdout == "  machines   " + "many words [of] " * 12 + "\n\n  cost        1 USD\n"
