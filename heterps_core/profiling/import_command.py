"""`heterps import-profile`: plans for models that others have profiled.

Reads a profile in another project's format, writes it as this project's, and with prices as a planning problem.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flows.commands.planning.profile import write_profiles
from heterps_core.device_types import DEVICE_TYPES, get_device_type
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.profiling.imported.imported_model import ImportedModel
from heterps_core.profiling.imported.pipedream import DEFAULT_DEVICE_TYPE, read_pipedream
from heterps_core.profiling.imported.rescaling import estimate_each_layer
from heterps_core.profiling.imported.sailor import read_sailor
from heterps_core.profiling.profiles.layer_profile import LayerProfile
from heterps_core.text_table import aligned
from heterps_core.units import BITS_PER_BYTE, BYTES_PER_GIB, MS_PER_S

HELP = """\
Read a profile that others have measured, and write it as profiles or as a planning problem.

examples:
  heterps import-profile vgg16.graph.txt --format pipedream --device gpu-v100=3.06:16 --device gpu-t4=0.526:32
      --batch-size 512 --throughput-floor 1000 --output problem.json
  heterps import-profile timing/OPT-350 --format sailor --layer-sizes llm_info.json --device gpu-v100=3.06
      --device RTX-3090=0.4:8:24:10 --output problem.json
  heterps plan problem.json --scheduler exact

exit status: 0 where the profile was read; 2 where it or an argument cannot be used.
"""

DEFAULT_MAX_UNITS = 64
"""The order of a new account's quota."""

DEFAULT_NUM_SAMPLES = 1e6
"""Costs of a plan are then those of a million samples."""

_BITS_PER_GBIT = 1e9
_DEVICE_FORM = "NAME[=USD_PER_HOUR[:MAX_UNITS[:MEMORY_GIB:GBIT_PER_S]]]"


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedDevice:
    """A device type as the user names it on the command line; figures are for one GPU or core."""

    name: str
    price_usd_per_hour: float | None
    """None where only its profile is wanted."""

    max_units: int
    memory_bytes: float
    network_bytes_per_s: float

    def times(self, num_devices: int) -> PricedDevice:
        """Return the figures of a unit that has several of them."""
        price = self.price_usd_per_hour
        return replace(
            self,
            price_usd_per_hour=None if price is None else num_devices * price,
            memory_bytes=num_devices * self.memory_bytes,
            network_bytes_per_s=num_devices * self.network_bytes_per_s,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a PipeDream graph file, or a folder of Sailor timings"
    )
    parser.add_argument(
        "--format", required=True, metavar="NAME", help=f"one of: {', '.join(sorted(_READERS))}"
    )
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar=_DEVICE_FORM,
        help="a device type to plan with, may be repeated; price, memory and bandwidth are those of one GPU or core; "
        f"memory and bandwidth are known for: {', '.join(sorted(DEVICE_TYPES))} (default units: {DEFAULT_MAX_UNITS})",
    )
    parser.add_argument(
        "--measured-on",
        default=DEFAULT_DEVICE_TYPE,
        metavar="NAME",
        help=f"pipedream: what the file was measured on; others are estimated (default: {DEFAULT_DEVICE_TYPE})",
    )
    parser.add_argument(
        "--layer-sizes", type=Path, metavar="FILE", help="sailor: llm_info.json, may be gzipped"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="sailor: GPUs of a unit (default: 1)"
    )
    parser.add_argument(
        "--profile-batch-size",
        type=int,
        metavar="N",
        help="samples of the profiled batch (default: what the file tells)",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="samples of a training step (default: the profiled batch)"
    )
    parser.add_argument(
        "--num-samples",
        type=float,
        default=DEFAULT_NUM_SAMPLES,
        metavar="N",
        help="samples of an epoch (default: %(default)g)",
    )
    parser.add_argument("--num-epochs", type=float, default=1.0, metavar="N", help="(default: %(default)g)")
    parser.add_argument(
        "--throughput-floor",
        type=float,
        default=0.0,
        metavar="SAMPLES_PER_S",
        help="what a plan must reach at least (default: no floor)",
    )
    parser.add_argument("--profiles", type=Path, metavar="PROFILES.json", help="write the profiles here")
    parser.add_argument(
        "--output", type=Path, metavar="PROBLEM.json", help="write the planning problem here; needs prices"
    )


def run(options: argparse.Namespace) -> None:
    """Import a profile, print a row for each device type, and write what was asked for.

    Raises:
        HeterpsError: An argument or the source cannot be used, or an output cannot be written.
    """
    if options.format not in _READERS:
        raise UnknownNameError("profile format", options.format, _READERS)
    if options.tensor_parallel < 1:
        raise ConfigurationError(f"--tensor-parallel must be at least 1, got {options.tensor_parallel}")
    devices = [parse_device(text).times(options.tensor_parallel) for text in options.device]
    names = [device.name for device in devices]
    if not names or len(set(names)) < len(names):
        raise ConfigurationError(
            f"--device must name at least one device type, and each once, got: {', '.join(names) or 'none'}"
        )
    imported = _READERS[options.format](options, devices)
    if options.profiles is not None:
        write_profiles(options.profiles, [imported.profiles[name] for name in names])
    if options.output is not None:
        _write_problem(options, imported, devices)
    print(imported_table(imported, devices))


def parse_device(text: str) -> PricedDevice:
    """Read one `--device`; see `_DEVICE_FORM`.

    Raises:
        ConfigurationError: A figure is no positive number, or memory and bandwidth are needed and missing.

    Example:
        >>> parse_device("gpu-v100=3.06:16").price_usd_per_hour
        3.06
    """
    name, _, figures = text.partition("=")
    parts = figures.split(":") if figures else []
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = [math.nan]
    if not name or len(parts) not in (0, 1, 2, 4) or not all(0 < number < math.inf for number in numbers):
        raise ConfigurationError(f"--device must be {_DEVICE_FORM} with positive numbers, got {text!r}")
    max_units = numbers[1] if len(numbers) > 1 else DEFAULT_MAX_UNITS
    if max_units != int(max_units):
        raise ConfigurationError(f"MAX_UNITS of --device must be a whole number, got {text!r}")
    if len(numbers) == 4:
        memory_bytes = numbers[2] * BYTES_PER_GIB
        network_bytes_per_s = numbers[3] * _BITS_PER_GBIT / BITS_PER_BYTE
    elif name in DEVICE_TYPES:
        memory_bytes = DEVICE_TYPES[name].memory_bytes
        network_bytes_per_s = DEVICE_TYPES[name].network_bandwidth_bytes_per_s
    else:
        raise ConfigurationError(
            f"memory and bandwidth of a device type must be known, and are for {', '.join(sorted(DEVICE_TYPES))}; "
            f"for {name!r} say them: --device {name}=USD_PER_HOUR:MAX_UNITS:MEMORY_GIB:GBIT_PER_S"
        )
    return PricedDevice(
        name=name,
        price_usd_per_hour=numbers[0] if numbers else None,
        max_units=int(max_units),
        memory_bytes=memory_bytes,
        network_bytes_per_s=network_bytes_per_s,
    )


def imported_table(imported: ImportedModel, devices: Sequence[PricedDevice]) -> str:
    """Return what was imported as text for people: a row per device type, then the heaviest layer."""
    rows: list[tuple[str, ...]] = [
        ("device type", "times", "batch ms", "samples/s", "alpha", "memory GB", "USD/hour", "")
    ]
    for device in devices:
        profile = imported.profiles[device.name]
        price = device.price_usd_per_hour
        total_ms = sum(_layer_ms(profile))
        rows.append(
            (
                device.name,
                "estimated" if profile.is_estimated else "measured",
                f"{total_ms:.3f}",
                f"{profile.batch_size / total_ms * MS_PER_S:,.1f}" if total_ms else "-",
                f"{profile.compute_parallel_fraction(batch_size=profile.batch_size):.3f}",
                f"{device.memory_bytes / 1e9:.1f}",
                "-" if price is None else f"{price:.4f}",
                "",
            )
        )
    times_ms = _layer_ms(imported.profiles[devices[0].name])
    heaviest = max(range(len(times_ms)), key=lambda layer: times_ms[layer])
    share = times_ms[heaviest] / (sum(times_ms) or 1.0)
    graph = imported.graph
    profile = imported.profiles[devices[0].name]
    return "\n".join(
        [
            f"{graph.name}: {len(graph.layers)} layers, {profile.batch_size} samples, "
            f"{graph.state_bytes / 1e9:.3f} GB of state; {imported.provenance}",
            "",
            *aligned(rows, words=(0, 1, len(rows[0]) - 1)),
            "",
            f"heaviest     layer {heaviest}, {graph.layers[heaviest].name}: {share:.1%} of the time on "
            f"{devices[0].name}",
        ]
    )


def _layer_ms(profile: LayerProfile) -> list[float]:
    return [timing.compute_ms(update_share=1.0) for timing in profile.timings]


def _read_pipedream(options: argparse.Namespace, devices: Sequence[PricedDevice]) -> ImportedModel:
    if options.tensor_parallel != 1 or options.layer_sizes is not None:
        raise ConfigurationError(
            "--tensor-parallel and --layer-sizes belong to --format sailor; leave them away"
        )
    measured_on = get_device_type(options.measured_on)
    wanted = [get_device_type(device.name) for device in devices]
    imported = read_pipedream(options.source, measured_on, batch_size=options.profile_batch_size)
    measured = imported.profiles[measured_on.name]
    estimates = {
        device_type.name: estimate_each_layer(imported.graph, measured, device_type)
        for device_type in wanted
        if device_type.name != measured_on.name
    }
    return replace(imported, profiles={**imported.profiles, **estimates})


def _read_sailor(options: argparse.Namespace, devices: Sequence[PricedDevice]) -> ImportedModel:
    if options.layer_sizes is None:
        raise ConfigurationError("Sailor's timings need the sizes of layers: --layer-sizes llm_info.json")
    return read_sailor(
        options.source,
        options.layer_sizes,
        network_bytes_per_s={device.name: device.network_bytes_per_s for device in devices},
        tensor_parallel=options.tensor_parallel,
        batch_size=options.profile_batch_size,
    )


_READERS: Mapping[str, Callable[[argparse.Namespace, Sequence[PricedDevice]], ImportedModel]] = {
    "pipedream": _read_pipedream,
    "sailor": _read_sailor,
}


def _write_problem(
    options: argparse.Namespace, imported: ImportedModel, devices: Sequence[PricedDevice]
) -> None:
    from heterps_core.planning.problem.problem_builder import UnitTerms, build_problem

    terms = {}
    for device in devices:
        if device.price_usd_per_hour is None:
            raise ConfigurationError(
                f"a planning problem needs the price of every device type, but {device.name} has none; "
                f"say --device {device.name}=USD_PER_HOUR"
            )
        terms[device.name] = UnitTerms(
            price_usd_per_hour=device.price_usd_per_hour,
            max_units=device.max_units,
            memory_bytes=device.memory_bytes,
            bandwidth_bytes_per_s=device.network_bytes_per_s,
        )
    profile_batch_size = imported.profiles[devices[0].name].batch_size
    problem = build_problem(
        imported.graph,
        imported.profiles,
        terms,
        batch_size=profile_batch_size if options.batch_size is None else options.batch_size,
        num_samples=options.num_samples,
        num_epochs=options.num_epochs,
        throughput_floor_samples_per_s=options.throughput_floor,
    )
    document = {
        **problem.to_json(),
        "provenance": {
            "profile": imported.provenance,
            "prices": "given on the command line",
            "device_types": {
                name: {
                    "times": "estimated" if imported.profiles[name].is_estimated else "measured",
                    "hardware": imported.profiles[name].hardware,
                }
                for name in terms
            },
        },
    }
    try:
        options.output.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the planning problem to {options.output}: {error.strerror}"
        ) from error
