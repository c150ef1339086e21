"""Time each layer of a model alone on this machine: forward, backward and update, median and spread.

examples:
  heterps profile --model dcnv2
  heterps profile --model my_models:build --batch-size 1024 --device-types gpu-t4 --output profiles.json
  heterps profile --batch-size 4096 --device cuda --output profiles.json

exit status: 0 with a profile; 2 where an argument cannot be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from heterps_core.data.features import FeatureSpec
from heterps_core.device_types import matching
from heterps_core.json_file import write_json
from heterps_core.models import CTR_MODELS, DEFAULT_MODEL
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.profiling.measuring_process import ProfileRequest, measure_in_fresh_process
from heterps_core.profiling.timing import Timing
from heterps_core.text_table import Table

SCHEMA_VERSION = 1

DEFAULT_BATCH_SIZE = 512

CRITEO_SHAPE = FeatureSpec(num_dense=13, slot_rows=(100_000,) * 26)
"""Columns of the Criteo click logs, with 100,000 rows in each table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help=f"{', '.join(sorted(CTR_MODELS))}, or package.module:function (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=DEFAULT_BATCH_SIZE,
        metavar="N",
        help=f"rows that are trained at once (default: {DEFAULT_BATCH_SIZE})",
    )
    parser.add_argument(
        "--device-types",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="estimate for these types too, of heterps catalogue; patterns such as gpu-l4* too",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: time the layers on the first CUDA device of this machine too (default: cpu)",
    )
    parser.add_argument("--output", type=Path, metavar="PROFILES.json", help="write the profiles here too")


def run(options: argparse.Namespace) -> None:
    """Profile, print a table for each device type, and write the profiles if asked."""
    from heterps_core.compute_device import require_cuda
    from heterps_core.profiling.measurement.layer_profiler import trace_model
    from heterps_core.profiling.profile_cache import profile_model

    request = ProfileRequest(model=options.model, features=CRITEO_SHAPE, batch_size=options.batch_size)
    # Always measured again: a person who asks on the command line wants to see this machine as it is now.
    if options.device == "cuda":
        require_cuda()
    profiles = profile_model(
        request, trace_model(request), matching(options.device_types), cache_directory=None
    )
    if options.device == "cuda":
        (on_gpu,) = measure_in_fresh_process(replace(request, device="cuda"))
        profiles = {**profiles, on_gpu.device_type: on_gpu}
    if options.output is not None:
        _write_profiles(options.output, list(profiles.values()))
    print("\n\n".join(_profile_table(profile) for profile in profiles.values()))


def _profile_table(profile: LayerProfile) -> str:
    """Return a profile as text for people: a row per layer, then what follows from them."""
    times = dict.fromkeys(("forward ms", "backward ms", "update ms", "spread ms"), ".3f")
    rows = [
        (
            timing.layer,
            timing.kind,
            *(_shown(phase) for phase in (timing.forward, timing.backward, timing.update)),
            None if timing.is_estimated else timing.spread_ms,
            timing.exchanged_bytes + timing.all_reduced_bytes,
            "estimated" if timing.is_estimated else "measured",
        )
        for timing in profile.timings
    ]
    table = Table(columns={"layer": "", "kind": "", **times, "bytes": ",.0f", "": ""}, rows=rows)
    total_ms = sum(timing.compute_ms(update_share=1.0) for timing in profile.timings)
    alpha = profile.compute_parallel_fraction(batch_size=profile.batch_size)
    beta = profile.communication_parallel_fraction(batch_size=profile.batch_size)
    lines = [
        f"{profile.model} on one unit of {profile.device_type}, {profile.batch_size} samples: {profile.hardware}",
        "",
        *table.lines(indent=""),
        "",
        f"sum          {total_ms:.3f} ms, {profile.batch_size / total_ms * 1e3:,.0f} samples/s",
        f"scaling      alpha {alpha:.3f} (computation), beta {beta:.3f} (communication inside a stage)",
    ]
    if not profile.is_estimated:
        lines.append(f"replicas     {profile.replica_path}")
        lines.append(f"neighbour    a step beside another worker takes {profile.crowding:.2f} times as long")
    if profile.sum_over_step is not None:
        lines.append(
            f"check        layers alone took {profile.sum_over_step:.1%} of the step they are scaled to"
        )
    if profile.was_busy:
        lines.append(f"busy         {profile.busy_text}")
    return "\n".join(lines)


def _write_profiles(path: Path, profiles: Sequence[LayerProfile]) -> None:
    """Write profiles as one JSON file, by device type.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "profiles": {profile.device_type: profile.to_json() for profile in profiles},
    }
    write_json(path, document)


def _shown(phase: Timing) -> float | None:
    return phase.median_ms if phase.median_ms > 0 else None
