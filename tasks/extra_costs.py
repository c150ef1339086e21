"""What a job is charged besides its machines' time: assumptions and list prices, each with its source."""

from __future__ import annotations

from collections.abc import Sequence

from heterps_core.graph.model_graph import ModelGraph
from heterps_core.problem.extra_costs import ExtraCosts

STARTUP_SECONDS = 120.0
"""Assumed, from launch to first step: an instance boots in half a minute to a minute, then the environment is
unpacked, tables are filled and torch starts."""

TEARDOWN_SECONDS = 30.0
"""Assumed, from the last step to the end of billing: the last checkpoint is written before it, the log after it."""

STORAGE_USD_PER_GB_MONTH = 0.023
"""S3 Standard, us-east-1, first 50 TB (aws.amazon.com/s3/pricing, as of 2026-07)."""

TRANSFER_USD_PER_GB = 0.02
"""Between zones of a region: 0.01 for each direction (aws.amazon.com/ec2/pricing/on-demand, data transfer)."""

KEPT_CHECKPOINTS = 2
HOURS_PER_MONTH = 730.0
BYTES_PER_GB = 1e9


def job_extra_costs(graph: ModelGraph, *, leave_out: Sequence[str]) -> ExtraCosts:
    """Return the extra costs of a job of this model, without the terms that are left out.

    Spot risk is charged where device types are on spot; on-demand machines have none.

    Raises:
        UnknownNameError: A term to leave out is not known.
    """
    checkpoint_bytes = sum(layer.state_bytes for layer in graph.layers)
    stored_gb = KEPT_CHECKPOINTS * checkpoint_bytes / BYTES_PER_GB
    return ExtraCosts(
        startup_seconds=STARTUP_SECONDS,
        teardown_seconds=TEARDOWN_SECONDS,
        storage_usd_per_hour=stored_gb * STORAGE_USD_PER_GB_MONTH / HOURS_PER_MONTH,
        transfer_usd_per_gb=TRANSFER_USD_PER_GB,
    ).without(leave_out)
