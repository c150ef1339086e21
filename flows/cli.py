"""The `heterps` command: everything that a person does beside the flows, from a shell.

A command is one module with its help as docstring, `add_arguments` and `run`, listed in `COMMANDS`; only the one
asked for is imported. What a user can cause and fix ends as one line on stderr and the error's exit status, never
as a traceback.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from flows import INTERRUPTED
from flows.commands import OneLineParser, plain_output
from heterps_core import __version__
from heterps_core.errors import ConfigurationError, HeterpsError

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

FLOWS: Mapping[str, tuple[str, str, str]] = {
    "train": (
        "train a night here and now, and print its plan, quality and bill",
        "train_ctr",
        "TrainParameters",
    ),
    "refresh-prices": (
        "fetch today's prices of regions into the workspace",
        "refresh_prices",
        "PriceParameters",
    ),
    "backfill": ("train a range of past days, one after the other", "backfill_ctr", "BackfillParameters"),
}
"""Name -> summary, module in `flows` and the class of its parameters, whose options are the command's."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    "status": ("what runs now, what it has cost, and what comes next", "flows.commands.status"),
    "logs": ("what a run and its nodes have said, with -f as they say it", "flows.commands.logs"),
    "serve": ("Prefect, MLflow and the nightly schedule, until Ctrl-C", "flows.service.serve"),
    "runs": ("the last runs side by side: plan, end, cost, throughput, AUC", "flows.commands.runs"),
    "cost": ("what runs cost: bills, and the sum of the month", "flows.commands.cost"),
    "explain": ("why a run had its plan", "flows.commands.explain"),
    "stop": ("let a run write a checkpoint, then end its machines", "flows.commands.stop"),
    "predict": ("probabilities for the rows of a file, by the champion", "flows.commands.data.predict"),
    "export": ("the champion's network for servers that have torch alone", "flows.commands.data.export"),
    "champion": ("the model that serves: since when, how good, what it cost", "flows.commands.champion"),
    "rollback": ("make an earlier champion champion again", "flows.commands.rollback"),
    "doctor": ("what is missing on this machine, and how to fix it", "flows.commands.doctor"),
    "sweep": ("end orphaned machines; for cron", "flows.commands.sweep"),
    "tidy": ("delete files of old runs and models that nothing needs; for cron", "flows.commands.tidy"),
    "inventory": ("write the machines that you have, for plans to use", "flows.commands.inventory"),
    "catalogue": ("device types with prices, and why others are out", "flows.commands.planning.catalogue"),
    "profile": ("time the layers of a model, estimate other device types", "flows.commands.planning.profile"),
    "tune": ("search the parameters of a training, into a file", "flows.commands.planning.tune"),
    "plan": ("search the cheapest plan for a problem.json", "flows.commands.planning.plan"),
    "simulate": ("simulate a plan's pipeline", "flows.commands.planning.simulate"),
    "init": ("write a schema file for a table, from what its first rows show", "flows.commands.data.init"),
    "check-data": ("hold a new day against the one before", "flows.commands.data.check_data"),
    "make-days": ("write days of synthetic clicks whose truth drifts", "flows.commands.data.make_days"),
}
"""Name -> summary and module."""


@plain_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # The current folder, as with `python -m`, for a person's own models; last, so that it hides nothing.
    if "" not in sys.path:
        sys.path.append("")
    if arguments and arguments[0] in FLOWS:
        return _run_flow(*arguments)
    options = _parser(asked=arguments[0] if arguments else "").parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
        sys.stdout.flush()
    except HeterpsError as error:
        print(f"heterps: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("heterps: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno not in _CAUSED_BY_USERS:
            raise
        print(f"heterps: error: {error.strerror}: {error.filename or 'a file'}", file=sys.stderr)
        return ConfigurationError.exit_status
    return 0


def _run_flow(name: str, *arguments: str) -> int:
    """Run a flow in this process, without a served deployment."""
    from flows import parameters
    from flows.command_line import main as run_flow

    _, module, parameter_class = FLOWS[name]
    return run_flow(
        f"flows.{module}", getattr(parameters, parameter_class), arguments, program=f"heterps {name}"
    )


def _parser(asked: str) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of the one that is asked for."""
    parser = OneLineParser(
        prog="heterps",
        description="Plan and run the training of click-through-rate models on heterogeneous hardware "
        "at minimum cost. Every night by a schedule: make serve, then prefect deployment run train-ctr.",
    )
    parser.add_argument("--version", action="version", version=f"heterps {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (summary, *_) in FLOWS.items():
        subparsers.add_parser(name, help=summary)
    for name, (summary, module) in COMMANDS.items():
        if name != asked:
            subparsers.add_parser(name, help=summary)
            continue
        command = import_module(module)
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
