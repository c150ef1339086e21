"""The `heterps` command: the core's abilities from a shell, without orchestration.

A subcommand is one function that adds its parser and names the function to run; it is listed in `_COMMANDS`.
What a user can cause and mend ends as one line on stderr and the error's exit status, never as a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heterps_core import __version__
from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.profiling import command as profile_command
from heterps_core.scheduling.schedulers import SCHEDULERS, get_scheduler

if TYPE_CHECKING:
    from heterps_core.scheduling.problem import SchedulingProblem
    from heterps_core.scheduling.search_result import SearchResult

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""

_PLAN_HELP = """\
Search the cheapest plan for a planning problem and print it with its proof.

examples:
  heterps plan problem.json --scheduler exact
  heterps plan problem.json --scheduler reinforce --seed 7 --budget-evaluations 100000 --output plan.json

exit status: 0 with a plan; 2 where the problem or an argument is malformed; 3 where no plan exists.
"""


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
        description=_PLAN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("problem", type=Path, metavar="PROBLEM.json", help="the planning problem")
    parser.add_argument(
        "--scheduler", required=True, metavar="NAME", help=f"one of: {', '.join(sorted(SCHEDULERS))}"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all random choices (default: 0)")
    parser.add_argument(
        "--budget-evaluations",
        type=int,
        metavar="N",
        help="most plans to rate (default: the scheduler's own)",
    )
    parser.add_argument("--output", type=Path, metavar="PLAN.json", help="write the plan here too")
    parser.set_defaults(run=_run_plan)


def _run_plan(options: argparse.Namespace) -> None:
    from heterps_core.scheduling.problem import SchedulingProblem

    scheduler = get_scheduler(options.scheduler)
    if options.seed < 0:
        raise ConfigurationError(f"--seed must not be negative, got {options.seed}")
    problem = SchedulingProblem.load(options.problem)
    budget = options.budget_evaluations
    result = scheduler.search(
        problem,
        budget_evaluations=scheduler.default_budget_evaluations if budget is None else budget,
        seed=options.seed,
    )
    if options.output is not None:
        _write_json(options.output, result.plan.to_json())
    print(plan_table(problem, result))


def plan_table(problem: SchedulingProblem, result: SearchResult) -> str:
    """Return a plan as text for people: a row per stage, then the totals with the proof."""
    plan, evaluation = result.plan, result.evaluation
    slowest = evaluation.bottleneck
    rows = [
        ("stage", "layers", "device type", "replicas", "compute ms", "comm. ms", "memory GB", "USD/hour", "")
    ]
    for index, part in enumerate(evaluation.stages):
        stage = part.stage
        rows.append(
            (
                str(index),
                f"{stage.first_layer}..{stage.last_layer}",
                stage.device_type,
                str(stage.num_replicas),
                f"{part.compute_seconds * 1e3:.3f}",
                f"{part.communication_seconds * 1e3:.3f}",
                f"{part.memory_bytes / 1e9:.3f}",
                f"{part.price_usd_per_hour:.4f}",
                "<- slowest" if part is slowest else "",
            )
        )
    floor = problem.throughput_floor_samples_per_s
    totals = [
        ("throughput", f"{plan.throughput_samples_per_s:,.1f} samples/s (floor {floor:,.1f})"),
        ("price", f"{plan.price_usd_per_hour:,.4f} USD/hour for {evaluation.run_seconds / 3600:,.3f} hours"),
        ("cost", f"{plan.cost_usd:,.6f} USD"),
        ("lower bound", f"{plan.cost_lower_bound_usd:,.6f} USD (proven: no plan is cheaper)"),
        ("gap", "0 (proven optimal)" if plan.optimality_gap == 0 else f"{plan.optimality_gap:.4%}"),
        ("search", f"{plan.num_evaluations:,} evaluations in {plan.search_seconds:.3f} s"),
    ]
    return "\n".join(
        [
            f"Plan for {problem.model} ({problem.num_layers} layers) by {plan.scheduler}, seed {plan.seed}",
            "",
            *_aligned(rows),
            "",
            *(f"{label:<12}{text}" for label, text in totals),
        ]
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_text = (False, True, True)  # the layers and the device type read from the left, numbers from the right
    return [
        "  ".join(
            cell.ljust(width) if index < len(is_text) and is_text[index] else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _write_json(path: Path, document: object) -> None:
    try:
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error


def _add_profile_command(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="time each layer of a model here, and estimate other device types",
        description=_PROFILE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    profile_command.add_arguments(parser)
    parser.set_defaults(run=profile_command.run)


_COMMANDS: tuple[Callable[[Subparsers], None], ...] = (_add_plan_command, _add_profile_command)

if __name__ == "__main__":
    sys.exit(main())
