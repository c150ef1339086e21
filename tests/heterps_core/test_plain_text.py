import io
import sys
from contextlib import suppress

import pytest

from flows.cli import main
from heterps_core.plain_text import PlainOutput, plain, unfiltered


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "ordinary, with umlauts äöü, 日本 and 🙂\tand\nlines",
            "ordinary, with umlauts äöü, 日本 and 🙂\tand\nlines",
        ),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("100 %\r  0 %", r"100 %\r  0 %"),
        ("a\x08\x08b\x7f\x00", r"a\x08\x08b\x7f\x00"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("one\u2028two", r"one\u2028two"),
        (b"caf\xe9".decode(errors="surrogateescape"), r"caf\udce9"),
    ],
)
def test_what_steers_a_terminal_is_shown(text, shown):
    assert plain(text) == shown
    assert plain(shown) == shown


def test_a_stream_writes_plainly_and_is_else_the_one_below():
    below = io.StringIO()
    stream = PlainOutput(below)

    print("\x1b[2J", "two", file=stream)
    stream.writelines(["\x07", "\n"])

    assert below.getvalue() == "\\x1b[2J two\n\\x07\n"
    assert (stream.isatty(), unfiltered(stream), unfiltered(below)) == (False, below, below)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "no\x1b[2Jsuch.json", "--scheduler", "exact"],
        ["init", "no\x1b[2Jsuch.csv"],
        ["predict", "no\x1b[2Jsuch.csv", "-o", "out.csv"],
        ["train", "--data", "no\x1b[2Jsuch.csv"],
        ["train", "--mo\x1b[2Jdel", "lr"],
        ["explain", "no\x1b[2Jsuch"],
        ["lo\x1b[2Jgs"],
    ],
    ids=lambda arguments: arguments[0].partition("\x1b")[0],
)
def test_no_command_prints_an_escape_sequence_that_a_name_holds(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path))
    stdout = sys.stdout
    # The parser ends by itself.
    with suppress(SystemExit):
        assert main(arguments) == 2

    printed = "".join(capsys.readouterr())
    assert "\x1b" not in printed
    assert r"\x1b[2J" in printed
    assert sys.stdout is stdout
