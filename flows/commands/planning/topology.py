"""`heterps place`: which rank of a plan runs on which device of a cluster file, and what the choice is worth."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_core.errors import ConfigurationError, MalformedDocumentError
from heterps_core.json_file import write_json
from heterps_core.text_table import Table

if TYPE_CHECKING:
    from heterps_core.plans.scheduling_plan import Stage
    from heterps_core.topology.machine_topology import MachineTopology
    from heterps_core.topology.rank_placement import RankPlacement

HELP = """\
Put the ranks of a plan on the machines of a cluster file: the heaviest traffic on the fastest links.

The cluster file lists machines with devices and links, as PaddlePaddle's does; the "model" of a device
must be the name of a device type of the plan. Printed are the seconds of traffic in a training step:
bytes over bandwidth, summed over all pairs of ranks. Messages travel side by side, so a step takes
less; the figures are there to compare placements.

examples:
  heterps plan problem.json --scheduler exact --output plan.json
  heterps place problem.json plan.json cluster.json
  heterps place problem.json plan.json cluster.json --output placement.json

exit status: 0 with a placement; 2 where a file cannot be used, or the cluster has too few devices of a type.
"""

SCHEMA_VERSION = 1

COLUMNS = {
    **dict.fromkeys(("rank", "stage", "replica"), "d"),
    **dict.fromkeys(("machine", "device"), ""),
    **dict.fromkeys(("local id", "global id"), "s"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRank:
    """One row of the table."""

    rank: int
    stage: int
    replica: int
    machine: str
    """Its host name."""

    device_type: str
    local_id: int
    global_id: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("problem", type=Path, metavar="PROBLEM.json", help="the planning problem")
    parser.add_argument(
        "plan", type=Path, metavar="PLAN.json", help="a plan for it, of heterps plan --output"
    )
    parser.add_argument("cluster", type=Path, metavar="CLUSTER.json", help="machines, devices and links")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the placement here too")


def run(options: argparse.Namespace) -> None:
    """Place the ranks, print the table, and write it if asked.

    Raises:
        HeterpsError: A file cannot be used, the cluster is too small, or the output cannot be written.
    """
    from heterps_core.planning.search.plan_file import load_problem_and_plan
    from heterps_core.topology.machine_topology import load_topology
    from heterps_core.topology.rank_placement import place_ranks
    from heterps_core.topology.rank_traffic import problem_traffic
    from heterps_core.training.job import default_microbatches

    problem, plan = load_problem_and_plan(options.problem, options.plan)
    try:
        topology = load_topology(options.cluster)
    except MalformedDocumentError as error:
        if error.field == str(options.cluster):
            raise
        raise MalformedDocumentError(str(options.cluster), str(error)) from error
    _check_room(plan.stages, topology, options.cluster)
    traffic = problem_traffic(
        problem,
        plan.stages,
        num_microbatches=default_microbatches(problem.batch_size, num_stages=len(plan.stages)),
    )
    placement = place_ranks(traffic, topology)
    ranks = placed_ranks(placement, topology)
    if options.output is not None:
        write_json(options.output, placement_to_json(ranks, placement))
    print(placement_text(ranks, placement))


def placed_ranks(placement: RankPlacement, topology: MachineTopology) -> list[PlacedRank]:
    """Return the ranks in order, stage by stage, with their devices."""
    devices = {device.global_id: device for device in topology.devices()}
    machine_of = topology.machine_of()
    places = [
        (stage, replica, devices[global_id])
        for stage, ids in enumerate(placement.device_ids)
        for replica, global_id in enumerate(ids)
    ]
    return [
        PlacedRank(
            rank=rank,
            stage=stage,
            replica=replica,
            machine=topology.machines[machine_of[device.global_id]].hostname,
            device_type=device.model,
            local_id=device.local_id,
            global_id=device.global_id,
        )
        for rank, (stage, replica, device) in enumerate(places)
    ]


def placement_text(ranks: Sequence[PlacedRank], placement: RankPlacement) -> str:
    """Return a placement as text for people: a row per rank, then what it is worth."""
    table = Table(columns=COLUMNS, rows=[_row(rank) for rank in ranks])
    totals = [
        ("traffic", placement.seconds_per_step, "summed over all pairs of ranks"),
        ("plain order", placement.plain_order_seconds_per_step, "each rank on the first free device"),
    ]
    return "\n".join(
        [
            *table.lines(indent=""),
            "",
            *(
                f"{label:<12} {seconds:.6f} s per step, {meaning}{_change(seconds, placement.seconds_per_step)}"
                for label, seconds, meaning in totals
            ),
        ]
    )


def placement_to_json(ranks: Sequence[PlacedRank], placement: RankPlacement) -> dict[str, Any]:
    """Return a placement as plain JSON values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "ranks": [asdict(rank) for rank in ranks],
        "seconds_per_step": placement.seconds_per_step,
        "plain_order_seconds_per_step": placement.plain_order_seconds_per_step,
    }


def _row(rank: PlacedRank) -> tuple[str | int, ...]:
    place = map(str, (rank.machine, rank.device_type, rank.local_id, rank.global_id))
    return (rank.rank, rank.stage, rank.replica, *place)


def _change(seconds: float, reference: float) -> str:
    return f" ({100 * (seconds / reference - 1):+.1f} %)" if seconds != reference and reference else ""


def _check_room(stages: Sequence[Stage], topology: MachineTopology, path: Path) -> None:
    """Check all device types at once, before any table of ranks is made."""
    wanted: Counter[str] = Counter()
    for stage in stages:
        wanted[stage.device_type] += stage.num_replicas
    there = Counter(device.model for device in topology.devices() if device.computes)
    short = [
        f"{count:,} of {name!r}, but there are {there[name]:,}"
        for name, count in wanted.items()
        if count > there[name]
    ]
    if short:
        known = ", ".join(f"{count:,} of {name!r}" for name, count in there.items())
        raise ConfigurationError(
            f"each rank needs a device of its own: the plan needs {'; '.join(short)} (in {path}: {known}); "
            f"add machines, or plan with smaller caps"
        )
