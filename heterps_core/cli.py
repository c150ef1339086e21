"""The `heterps` command: the core's abilities from a shell, without orchestration.

A subcommand is one function that adds its parser and names the function to run; it is listed in `_COMMANDS`.
What a user can cause and mend ends as one line on stderr and the error's exit status, never as a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from heterps_core import __version__
from heterps_core.errors import HeterpsError
from heterps_core.profiling import command as profile_command
from heterps_core.profiling import import_command
from heterps_core.scheduling import plan_command
from heterps_core.simulation import command as simulate_command
from heterps_core.topology import command as place_command

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""

_PROFILE_HELP = """\
Time each layer of a model alone on this machine: forward, backward and update, median and spread.

examples:
  heterps profile --model ctrdnn
  heterps profile --model my_models:build --batch-size 1024 --device-type gpu-t4 --output profiles.json

exit status: 0 with a profile; 2 where an argument cannot be used.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = _parser().parse_args(arguments)
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
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="heterps",
        description="Plan the training of click-through-rate models on unlike machines at the least cost.",
    )
    parser.add_argument("--version", action="version", version=f"heterps {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add_command in _COMMANDS:
        add_command(subparsers)
    return parser


def _add_plan_command(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="search the cheapest plan for a problem.json",
        description=plan_command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan_command.add_arguments(parser)
    parser.set_defaults(run=plan_command.run)


def _add_profile_command(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="time each layer of a model here, and estimate other device types",
        description=_PROFILE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    profile_command.add_arguments(parser)
    parser.set_defaults(run=profile_command.run)


def _add_import_profile_command(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "import-profile",
        help="read PipeDream's or Sailor's profiles of other models, for planning",
        description=import_command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    import_command.add_arguments(parser)
    parser.set_defaults(run=import_command.run)


def _add_simulate_command(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="run a plan's pipeline in simulation, with stragglers if asked",
        description=simulate_command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulate_command.add_arguments(parser)
    parser.set_defaults(run=simulate_command.run)


def _add_place_command(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "place",
        help="put a plan's ranks on the machines of a cluster file",
        description=place_command.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    place_command.add_arguments(parser)
    parser.set_defaults(run=place_command.run)


_COMMANDS: tuple[Callable[[Subparsers], None], ...] = (
    _add_plan_command,
    _add_profile_command,
    _add_import_profile_command,
    _add_simulate_command,
    _add_place_command,
)

if __name__ == "__main__":
    sys.exit(main())
