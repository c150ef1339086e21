"""The `heterps` command: the core's abilities from a shell, without orchestration.

A subcommand is one module with its help, its arguments and what it runs; it is listed in `CORE_COMMANDS`. The
installed `heterps` adds those that need more than the core (`flows/cli.py`).
What a user can cause and mend ends as one line on stderr and the error's exit status, never as a traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeAlias

from heterps_core import __version__
from heterps_core.data import make_days_command
from heterps_core.errors import HeterpsError
from heterps_core.profiling import command as profile_command
from heterps_core.profiling import import_command
from heterps_core.scheduling import plan_command
from heterps_core.simulation import command as simulate_command
from heterps_core.spot import command as replay_command
from heterps_core.topology import command as place_command

_INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""

_CAUSED_BY_USERS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENOENT,
    }
)
"""What the operating system refuses for rights, room, the kind of a file, or a folder that is not there."""

Command: TypeAlias = tuple[str, str, ModuleType]
"""Name, summary, and the module that has its HELP, `add_arguments` and `run`."""

CORE_COMMANDS: tuple[Command, ...] = (
    ("plan", "search the cheapest plan for a problem.json", plan_command),
    ("profile", "time each layer of a model here, and estimate other device types", profile_command),
    ("import-profile", "read PipeDream's or Sailor's profiles of other models, for planning", import_command),
    ("simulate", "run a plan's pipeline in simulation, with stragglers if asked", simulate_command),
    ("place", "put a plan's ranks on the machines of a cluster file", place_command),
    ("make-days", "write days of made-up clicks whose truth drifts", make_days_command),
    ("replay", "what a nightly job would have cost on recorded spot markets", replay_command),
)


def main(arguments: Sequence[str] | None = None, *, commands: Sequence[Command] = CORE_COMMANDS) -> int:
    """Run the command line and return the exit status."""
    options = _parser(commands).parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
        sys.stdout.flush()
    except HeterpsError as error:
        print(f"heterps: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("heterps: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno not in _CAUSED_BY_USERS:
            raise
        print(f"heterps: error: {error.strerror}: {error.filename or 'a file'}", file=sys.stderr)
        return HeterpsError.exit_status
    return 0


def _parser(commands: Sequence[Command]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="heterps",
        description="Plan the training of click-through-rate models on unlike machines at the least cost.",
    )
    parser.add_argument("--version", action="version", version=f"heterps {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary, command in commands:
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=command.HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
