"""A tiny planning problem and plan as files: two layers on two device types, everything round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BATCH_SIZE = 4096


def problem_document(**changes: Any) -> dict[str, Any]:
    """Return a problem whose two layers take a second on one unit of either type, and send nothing."""
    unit = {
        "price_usd_per_hour": 1.0,
        "max_units": 4,
        "memory_bytes": 1e9,
        "bandwidth_bytes_per_s": 1e9,
        "compute_parallel_fraction": 1.0,
        "communication_parallel_fraction": 1.0,
    }
    return {
        "schema_version": 1,
        "model": "tiny",
        "batch_size": BATCH_SIZE,
        "profile_batch_size": BATCH_SIZE,
        "num_samples": BATCH_SIZE * 3600,
        "num_epochs": 1,
        "throughput_floor_samples_per_s": 0,
        "layers": [layer_document("embedding", is_sharded=True), layer_document("tower")],
        "device_types": {"cpu": dict(unit), "gpu": dict(unit)},
    } | changes


def layer_document(
    name: str,
    *,
    is_sharded: bool = False,
    compute_seconds: float = 1.0,
    communication_seconds: float = 0.0,
    output_bytes_per_sample: float = 0.0,
) -> dict[str, Any]:
    """Return a layer with the same times on both types."""
    return {
        "name": name,
        "kind": name,
        "is_sharded": is_sharded,
        "state_bytes": 1000,
        "output_bytes_per_sample": output_bytes_per_sample,
        "compute_seconds": dict.fromkeys(("cpu", "gpu"), compute_seconds),
        "communication_seconds": dict.fromkeys(("cpu", "gpu"), communication_seconds),
    }


def plan_document(*stages: tuple[int, int, str, int], **changes: Any) -> dict[str, Any]:
    """Return a plan; by default one unit of a type for each layer."""
    names = ("first_layer", "last_layer", "device_type", "num_replicas")
    return {
        "schema_version": 1,
        "scheduler": "exact",
        "seed": 0,
        "stages": [
            dict(zip(names, stage, strict=True)) for stage in stages or ((0, 0, "cpu", 1), (1, 1, "gpu", 1))
        ],
        "throughput_samples_per_s": BATCH_SIZE,
        "price_usd_per_hour": 2.0,
        "cost_usd": 2.0,
        "cost_lower_bound_usd": 2.0,
        "optimality_gap": 0.0,
        "num_evaluations": 1,
        "search_seconds": 0.0,
    } | changes


def write_files(folder: Path, problem: object, plan: object) -> list[str]:
    """Write both and return their paths, as a command takes them."""
    paths = folder / "problem.json", folder / "plan.json"
    for path, document in zip(paths, (problem, plan), strict=True):
        path.write_text(json.dumps(document))
    return [str(path) for path in paths]


def help_examples(text: str) -> list[list[str]]:
    """Return the arguments of each example that a command's help shows."""
    shown = text.partition("examples:\n")[2].partition("\n\n")[0]
    return [line.split()[1:] for line in shown.splitlines()]
