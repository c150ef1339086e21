"""Run a plan's pipeline in simulation, and print what it reaches beside what the planner's formula says.

The formula takes the slowest stage for the whole pipeline. The simulation runs every pass and message,
in the trainer's order, with slow machines where they are named. A problem with "step_model": "trainer"
is run with delayed updates: steps follow one another without a gap, and the formula counts what a
worker does one after the other. Without it the formula is that of the papers (Liu et al. 2021), which
ignores that a pipeline fills and drains in every step; the simulation is then slower and costs more.

examples:
  heterps plan problem.json --scheduler exact --output plan.json
  heterps simulate problem.json plan.json
  heterps simulate problem.json plan.json --micro-batches 16 --straggler 0.1=2 --output simulation.json

exit status: 0 with a result; 2 where a file or an argument cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heterps_core.errors import ConfigurationError
from heterps_core.json_file import write_json

if TYPE_CHECKING:
    from heterps_core.plans.scheduling_plan import Stage


_FORM_OF_STRAGGLER = "STAGE[.REPLICA]=FACTOR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("problem", type=Path, metavar="PROBLEM.json", help="the planning problem")
    parser.add_argument(
        "plan", type=Path, metavar="PLAN.json", help="a plan for it, of heterps plan --output"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="that a batch is cut into (default: as the trainer cuts it)",
    )
    parser.add_argument(
        "--straggler",
        action="append",
        default=[],
        metavar=_FORM_OF_STRAGGLER,
        help="passes there take FACTOR times as long, without REPLICA those of the whole stage; may be repeated, "
        "the later counts",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the figures here too")


def run(options: argparse.Namespace) -> None:
    """Simulate, print the figures, and write them if asked."""
    from heterps_core.planning.search.plan_file import load_problem_and_plan
    from heterps_core.planning.simulate.plan_simulation import (
        simulate_plan,
        simulation_text,
        simulation_to_json,
    )

    problem, plan = load_problem_and_plan(options.problem, options.plan)
    simulation = simulate_plan(
        problem,
        plan.stages,
        num_microbatches=options.micro_batches,
        slow_factors=slow_factors(options.straggler, plan.stages),
    )
    document = simulation_to_json(problem, plan, simulation)
    if options.output is not None:
        write_json(options.output, document)
    if options.json:
        print(json.dumps(document))
    else:
        print(simulation_text(problem, plan, simulation))


def slow_factors(texts: Sequence[str], stages: Sequence[Stage]) -> dict[tuple[int, int], float]:
    """Read every `--straggler` for a plan's stages, by stage and replica; see `_FORM_OF_STRAGGLER`.

    Raises:
        ConfigurationError: One has another form, a factor that is no positive number, or names no worker.
    """
    factors: dict[tuple[int, int], float] = {}
    for text in texts:
        worker, _, factor_text = text.partition("=")
        stage_text, dot, replica_text = worker.partition(".")
        try:
            stage, factor = int(stage_text), float(factor_text)
            replica = int(replica_text) if dot else None
        except ValueError:
            stage, replica, factor = -1, None, math.nan
        if not 0 < factor < math.inf:
            raise ConfigurationError(
                f"--straggler must be {_FORM_OF_STRAGGLER}, for instance 0.1=2 or 0=1.5, got {text!r}"
            )
        if not 0 <= stage < len(stages):
            raise ConfigurationError(
                f"--straggler must name a stage of the plan, 0 to {len(stages) - 1}, got {text!r}"
            )
        count = stages[stage].num_replicas
        if replica is not None and not 0 <= replica < count:
            raise ConfigurationError(
                f"--straggler must name a replica of stage {stage}, 0 to {count - 1}, got {text!r}"
            )
        for slow in range(count) if replica is None else [replica]:
            factors[stage, slow] = factor
    return factors
