"""Run a plan's pipeline in simulation, and print what it reaches beside what the planner's formula says.

The formula takes the slowest stage for the whole pipeline. The simulation runs every pass and message,
in the trainer's order. A problem with "step_model": "trainer"
is run with delayed updates: steps follow one another without a gap, and the formula counts what a
worker does one after the other. Without it the formula is that of the papers (Liu et al. 2021), which
ignores that a pipeline fills and drains in every step; the simulation is then slower and costs more.

examples:
  heterps plan problem.json --scheduler exact --output plan.json
  heterps simulate problem.json plan.json
  heterps simulate problem.json plan.json --micro-batches 16 --output simulation.json

exit status: 0 with a result; 2 where a file or an argument cannot be used.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from heterps_core.json_file import write_json


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
    simulation = simulate_plan(problem, plan.stages, num_microbatches=options.micro_batches)
    document = simulation_to_json(problem, plan, simulation)
    if options.output is not None:
        write_json(options.output, document)
    if options.json:
        print(json.dumps(document))
    else:
        print(simulation_text(problem, plan, simulation))
