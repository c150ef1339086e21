"""Runs a flow from a shell: one option for each of its parameters, a clean terminal, one line for an error."""

from __future__ import annotations

import argparse
import errno
import inspect
import json
import os
import re
import shutil
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flows.service.prefect_connection import connect
from heterps_core.errors import ConfigurationError, HeterpsError, TrainingError
from infra.workspace import Workspace
from tasks.running.story import show_on_terminal

ENDED_HINT = (
    "interrupted; what was running is ended. "
    "To go on from the newest checkpoint: --resume-run-id with the id above"
)
FULL_BYTES = 65_536
"""With less than this free no database takes another write: SQLite's pages have 4 KiB, and a write needs several."""

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""


def main(
    flow: Callable[..., Any],
    *,
    program: str,
    check: Callable[..., object],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run a flow with the parameters of the command line and return the exit status.

    Args:
        flow: A Prefect flow; its docstring documents the parameters.
        program: How the user started it, for the help.
        check: Called with the parameters first, so that a wrong name is told before Prefect is started.
        arguments: Instead of those of the process.
    """
    function = inspect.unwrap(flow.fn)  # type: ignore[attr-defined]
    parameters = vars(parser_for(function, program=program).parse_args(arguments))
    try:
        check(**parameters)
        workspace = Workspace.locate().create()
        # Errors are told here in one line; Prefect would print each with its traceback, some of them twice.
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
        connect(workspace)
        show_on_terminal()
        flow(**parameters)
    except Exception as error:
        told = _told(error)
        if told is None:
            raise
        print(f"error: {told}", file=sys.stderr)
        return told.exit_status
    except KeyboardInterrupt:
        print(ENDED_HINT, file=sys.stderr)
        return INTERRUPTED
    except SystemExit:
        # How the machines' context manager leaves on SIGTERM and SIGHUP.
        print(ENDED_HINT, file=sys.stderr)
        raise
    return 0


def _told(error: Exception) -> HeterpsError | None:
    """Return what a person is told of an error; None for a defect of ours, whose traceback is of use.

    A full disk shows itself wherever something is written next, in Prefect's server or the ledger, and hides what was
    said of it first.
    """
    behind = list(_chain(error))
    if not isinstance(error, TrainingError) and (full := _full_disk(behind)) is not None:
        return full
    return error if isinstance(error, HeterpsError) else None


def _full_disk(errors: Sequence[BaseException]) -> HeterpsError | None:
    """Return what to say where the disk of the workspace is full; None where it is not."""
    root = Workspace.locate().root
    is_named = any(
        getattr(each, "errno", None) == errno.ENOSPC or "disk is full" in str(each) for each in errors
    )
    try:
        free_bytes = shutil.disk_usage(root).free
    except OSError:
        return None
    # An error of ours that is about something else is not hidden; Prefect's and SQLAlchemy's do not say why.
    if not is_named and (free_bytes > FULL_BYTES or isinstance(errors[0], HeterpsError)):
        return None
    first = next((each for each in reversed(errors) if isinstance(each, TrainingError)), errors[-1])
    return ConfigurationError(
        f"the disk of the workspace {root} must have room, but is full ({free_bytes:,} bytes free): "
        f"{str(first).partition(chr(10))[0]}; free space there, and where a run had begun go on with "
        f"--resume-run-id and the id above"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it, the newest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def parser_for(function: Callable[..., Any], *, program: str) -> argparse.ArgumentParser:
    """Return a parser with an option for each parameter, documented by the function's docstring.

    Knows the types that Prefect's form is made of here: bool, str, int, float and list[str], the last four or None;
    and dict, as JSON. A parameter without a default is an option that must be given.
    """
    documentation = inspect.getdoc(function) or ""
    helps = parameter_helps(documentation)
    parser = argparse.ArgumentParser(
        prog=program,
        # All options in brackets are thirty lines, above which nobody sees what was wrong.
        usage="%(prog)s [--OPTION VALUE ...]   (--help lists the options)",
        description=documentation.partition("\n")[0],
    )
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        is_list, kind = _kind_of(hints[name])
        is_required = parameter.default is inspect.Parameter.empty
        if kind is bool:
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                action=argparse.BooleanOptionalAction,
                default=parameter.default,
                help=_help(helps[name], None),
            )
            continue
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_json_object if kind is dict else kind,
            nargs="+" if is_list else None,
            # A list without a default may be given in parts.
            action="extend" if is_list and parameter.default is None else "store",
            default=None if is_required else parameter.default,
            required=is_required,
            metavar={str: "VALUE", dict: "JSON"}.get(kind, "N"),
            help=_help(helps[name], None if is_required or kind is dict else parameter.default),
        )
    return parser


def _json_object(text: str) -> dict[str, Any]:
    """Read the JSON form of a dict; argparse tells a ValueError as a wrong value."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def parameter_helps(documentation: str) -> Mapping[str, str]:
    """Return the text of each entry under "Args:" of a docstring, joined to one line.

    Example:
        >>> parameter_helps("Do it.\\n\\nArgs:\\n    a: One\\n        two.\\n    b: Three.\\n\\nReturns:\\n    c: 4")
        {'a': 'One two.', 'b': 'Three.'}
    """
    section = re.search(r"^Args:\n((?: +.*\n?|\n)*)", documentation, re.MULTILINE)
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section.group(1) if section else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _kind_of(hint: Any) -> tuple[bool, type]:
    """Return whether a hint is a list, and the type of one value."""
    # Annotated types are joined by typing.Union, plain ones by types.UnionType.
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is list:
        return True, typing.get_args(hint)[0]
    return False, typing.get_origin(hint) or hint


def _help(text: str, default: Any) -> str:
    # argparse reads % as the start of a format.
    text = text.replace("%", "%%")
    if default is None:
        return text
    shown = (" ".join(default) or "none") if isinstance(default, list) else default
    return f"{text} (default: {shown})"
