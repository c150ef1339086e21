"""Runs a flow from a shell: one option for each of its parameters, a clean terminal, one line for an error."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic_core import PydanticUndefined

from flows import INTERRUPTED
from flows.commands import OneLineParser, plain_output
from flows.loading import loading
from flows.parameter_model import REMOVED, FlowParameters
from heterps_core.errors import ConfigurationError, HeterpsError, RunStoppedError, TrainingError
from heterps_core.json_file import read_json
from heterps_core.toml_file import PARAMETERS_TABLE, SCHEMA_TABLE, SUFFIX, read_toml
from infra.workspace import Workspace
from tasks.running.progress import shown_steps

ENDED_HINT = (
    "interrupted; what was running is ended. "
    "To go on from the newest checkpoint: --resume-run-id with the id above"
)
FILE_OPTION = "parameters"

FULL_BYTES = 65_536
"""With less than this free no database takes another write: SQLite's pages have 4 KiB, and a write needs several."""


@plain_output()
def main(
    module: str,
    model: type[FlowParameters],
    arguments: Sequence[str] | None = None,
    *,
    program: str | None = None,
) -> int:
    """Run a flow with the parameters of the command line and return the exit status.

    Args:
        module: Has the flow, under its own last name; loaded once the parameters are checked.
        model: The flow's parameters.
        arguments: Those of the shell by default.
        program: How it was called, for its help; `python -m <module>` by default.
    """
    parameters = vars(_parser_for(model, program=program or f"python -m {module}").parse_args(arguments))
    try:
        of_files: dict[str, Any] = {}
        for file in parameters.pop(FILE_OPTION, ()):
            of_files |= (of_file := _read_parameters(Path(file)))
            model.of(of_file, place=f" in {file}")
        run_here(module, model.of(of_files | parameters))
    except Exception as error:
        shown = _shown(error)
        if shown is None:
            raise
        print(f"{'stopped' if isinstance(shown, RunStoppedError) else 'error'}: {shown}", file=sys.stderr)
        return shown.exit_status
    except KeyboardInterrupt:
        print(ENDED_HINT, file=sys.stderr)
        return INTERRUPTED
    except SystemExit:
        # How the machines' context manager leaves on SIGTERM and SIGHUP.
        print(ENDED_HINT, file=sys.stderr)
        raise
    return 0


def run_here(module: str, asked: FlowParameters) -> Any:
    """Run a flow in this process, print its steps, and return its result.

    Raises:
        HeterpsError: The parameters cannot be used, or the flow failed.
    """
    from flows.service.prefect_connection import connect

    # The caller reports errors in one line; Prefect would print each with its traceback, some of them twice.
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "CRITICAL"
    with shown_steps():
        with loading():
            asked.check()
            loaded = connect(Workspace.locate().create(), load=module)
        flow = getattr(loaded, module.rpartition(".")[2])
        return flow(**asked.model_dump(include=asked.model_fields_set))


def _shown(error: Exception) -> HeterpsError | None:
    """Return the error to show to a person; None for a defect of ours, whose traceback helps.

    A full disk shows itself wherever something is written next, in Prefect's server or the ledger, and hides the
    first message.
    """
    causes = list(_chain(error))
    if not isinstance(error, TrainingError) and (full := _full_disk(causes)) is not None:
        return full
    from prefect.exceptions import ObjectNotFound

    if isinstance(error, ObjectNotFound):
        return ConfigurationError(
            "a flow run must stay in Prefect until its end, but this one was deleted there: its machines have ended, "
            "and its steps are in MLflow as far as they were recorded; start it again, or go on with --resume-run-id"
        )
    return error if isinstance(error, HeterpsError) else None


def _full_disk(errors: Sequence[BaseException]) -> HeterpsError | None:
    """Return the error for a workspace whose disk is full; None while it has room."""
    is_named = any(
        getattr(each, "errno", None) == errno.ENOSPC or "disk is full" in str(each) for each in errors
    )
    try:
        root = Workspace.locate().root
        free_bytes = shutil.disk_usage(root).free
    except (OSError, ConfigurationError):
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


def _parser_for(model: type[FlowParameters], *, program: str) -> argparse.ArgumentParser:
    """Return a parser with an option for each parameter; it holds those that are given, as text or lists of text."""
    parser = OneLineParser(
        prog=program,
        usage="%(prog)s [--OPTION VALUE ...]",
        description=model.__doc__,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        f"--{FILE_OPTION.replace('_', '-')}",
        action="extend",
        nargs="+",
        metavar="FILE",
        help="files with parameters by name, as heterps init (TOML) and heterps tune (JSON) write them; a later file "
        "wins over an earlier one, and options over all",
    )
    add_options(parser, model)
    return parser


def add_options(parser: argparse.ArgumentParser, model: type[FlowParameters]) -> None:
    """Add an option for each parameter; what is parsed has those that are given, as text or lists of text."""
    for name, form in model.form().items():
        kind, field = form["type"], model.model_fields[name]
        options: dict[str, Any] = {
            # argparse reads % as the start of a format.
            "help": f"{field.description}{_default(field.default)}".replace("%", "%%"),
            "required": field.is_required(),
            # A subcommand's parser has no such default.
            "default": argparse.SUPPRESS,
        }
        if kind == "boolean":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = {"string": "VALUE", "array": "VALUE", "object": "JSON"}.get(kind, "N")
        if kind == "array":
            options |= {"action": "extend", "nargs": "+"}
        if kind == "object":
            options["type"] = _json
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    for name in (name for name in REMOVED if name not in model.model_fields):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            action=_Removed,
            nargs="*",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


class _Removed(argparse.Action):
    """Refuses an option of an earlier version, and says what stands in its place."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} was removed: {REMOVED[self.dest]}; leave it out")


def _read_parameters(path: Path) -> dict[str, Any]:
    """Return the parameters of a file by their names; a TOML file that has a schema is the schema file, too.

    Raises:
        ConfigurationError: It cannot be read, is no JSON or TOML, or holds anything but an object.
    """
    if path.suffix == SUFFIX:
        tables = read_toml(path, what="parameters")
        schema = {"schema_file": str(path)} if SCHEMA_TABLE in tables else {}
        return schema | tables.get(PARAMETERS_TABLE, {})
    found = read_json(path, what="parameters")
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"{path} must hold a JSON object of parameters by name, got {type(found).__name__}"
        )
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be a JSON object such as '{{\"name\": 1}}', got {text!r}"
        ) from error


def _default(default: Any) -> str:
    if default in (None, PydanticUndefined, {}):
        return ""
    return f" (default: {(' '.join(default) or 'none') if isinstance(default, list) else default})"
