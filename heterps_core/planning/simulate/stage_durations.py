"""How long the passes and messages of one micro-batch take on every replica, by the rows that each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.simulate.pipeline_load import PipelineLoad
from heterps_core.planning.simulate.row_routes import RowRoutes, Transfer, routes_between, slice_bounds

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDurations:
    """One stage and a micro-batch of one size."""

    pass_seconds: Mapping[Direction, Floats]
    """Shape (k,), slow factors included."""

    weight_gradient_seconds: Floats
    """The same, of what is put off."""

    incoming: Mapping[Direction, Transfer | None]
    """Activations from the stage before, gradients from the stage behind; None at the ends of the chain."""


def stage_durations(
    load: PipelineLoad, *, num_rows: int, slow_factors: Sequence[Floats]
) -> list[StageDurations]:
    """Return the durations of all stages.

    A pass takes the stage's mean time, times what its slice is longer or shorter than the mean as far as rows
    matter, times the replica's slow factor. Messages take their rows' share of the slice's time.

    Args:
        load: The pipeline.
        num_rows: Of the micro-batch.
        slow_factors: Per stage, of shape (k,).
    """
    # Of a slice, in a micro-batch of mean size.
    mean_rows = [load.batch_size / load.num_microbatches / stage.num_replicas for stage in load.stages]

    def transfer(sender: int, receiver: int, routes: RowRoutes) -> Transfer:
        seconds = {
            max(sender, receiver): load.stages[max(sender, receiver)].input_seconds,
            min(sender, receiver): load.stages[min(sender, receiver)].output_seconds,
        }
        return Transfer(
            routes,
            num_senders=load.stages[sender].num_replicas,
            num_receivers=load.stages[receiver].num_replicas,
            send_seconds_per_row=seconds[sender] / mean_rows[sender],
            receive_seconds_per_row=seconds[receiver] / mean_rows[receiver],
        )

    boundaries = [
        routes_between(num_rows, num_replicas=stage.num_replicas, num_peer_replicas=behind.num_replicas)
        for stage, behind in pairwise(load.stages)
    ]
    arriving = [transfer(index, index + 1, routes) for index, routes in enumerate(boundaries)]
    returning = [transfer(index + 1, index, routes.reversed()) for index, routes in enumerate(boundaries)]
    durations = []
    for index, stage in enumerate(load.stages):
        num_slice_rows = np.diff(slice_bounds(num_rows, stage.num_replicas))
        factors = 1 + stage.compute_row_share * (num_slice_rows / mean_rows[index] - 1)
        factors *= slow_factors[index]
        durations.append(
            StageDurations(
                pass_seconds={
                    "forward": factors * stage.forward_seconds,
                    "backward": factors * stage.backward_seconds,
                },
                weight_gradient_seconds=factors * stage.weight_gradient_seconds,
                incoming={
                    "forward": arriving[index - 1] if index > 0 else None,
                    "backward": returning[index] if index < len(boundaries) else None,
                },
            )
        )
    return durations
