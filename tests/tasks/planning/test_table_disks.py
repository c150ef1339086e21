"""Problems whose tables may lie on disks: what is offered at which price, by hand."""

from dataclasses import replace

import pytest

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.planning.problem.problem_builder import build_problem, unit_type
from heterps_core.planning.search.optimum import find_optimum
from tasks.planning.table_disks import HOT_SHARES, VOLUME_BYTES_PER_S, disks_may_help, with_table_disks
from tasks.provisioning import find_offers
from tests.heterps_core.profiling.builders import GRAPH, make_profile

NAMES = ("cpu-c7i", "gpu-t4")
TABLE_BYTES = 200e9


def night():
    """Return a model with a table of 200 GB, the problem of training it, and the offers for it."""
    embedding, *others = GRAPH.layers
    graph = replace(
        GRAPH,
        layers=(
            replace(
                embedding,
                parameter_bytes=int(0.8 * TABLE_BYTES),
                optimizer_state_bytes=int(0.2 * TABLE_BYTES),
            ),
            *others,
        ),
    )
    offers = find_offers.fn(NAMES)
    profiles = {
        name: replace(make_profile(), device_type=name, graph_fingerprint=graph.fingerprint())
        for name in NAMES
    }
    units = {
        name: unit_type(
            graph, profiles[name], DEVICE_TYPES[name], batch_size=400, price_usd_per_hour=price, max_units=64
        )
        for name, price in zip(NAMES, (0.08925, 0.526), strict=True)
    }
    problem = build_problem(
        graph,
        profiles,
        units,
        batch_size=400,
        num_samples=1e6,
        num_epochs=1,
        throughput_floor_samples_per_s=0.0,
    )
    return graph, problem, offers


def test_every_unit_has_a_volume_at_its_share_of_what_the_instance_moves():
    graph, problem, offers = night()

    units = with_table_disks(problem, graph, offers, charges_storage=True).device_types

    # c7i.48xlarge: 40 Gbit/s for 96 cores; g4dn.12xlarge: 9.5 Gbit/s for 4 cards, more than a volume.
    assert units["cpu-c7i"].disk_bytes_per_s == pytest.approx(40e9 / 8 / 96)
    assert units["gpu-t4"].disk_bytes_per_s == VOLUME_BYTES_PER_S


def test_volumes_of_all_tables_are_charged_by_the_hour_unless_storage_is_left_out():
    graph, problem, offers = night()

    charged, free = (
        with_table_disks(problem, graph, offers, charges_storage=charges).extra_costs.storage_usd_per_hour
        for charges in (True, False)
    )

    assert charged == pytest.approx(200 * 0.08 / 730)
    assert free == 0


def test_the_layers_say_what_misses_the_most_used_rows():
    graph, problem, offers = night()

    embedding, dense = with_table_disks(problem, graph, offers, charges_storage=True).layers

    assert len(embedding.cold_bytes_per_sample) == len(HOT_SHARES)
    assert list(embedding.cold_bytes_per_sample) == sorted(embedding.cold_bytes_per_sample, reverse=True)
    assert dense.cold_bytes_per_sample == ()


def test_tables_on_disks_make_the_night_cheaper_where_memory_is_what_it_pays_for():
    graph, problem, offers = night()

    in_memory = find_optimum(problem)
    on_disks = find_optimum(with_table_disks(problem, graph, offers, charges_storage=True))

    assert on_disks.cost_usd < 0.7 * in_memory.cost_usd


def test_disks_are_not_thought_of_where_any_unit_holds_all_tables():
    _, problem, _ = night()
    units = {name: replace(unit, memory_bytes=2 * TABLE_BYTES) for name, unit in problem.device_types.items()}

    assert disks_may_help(problem)
    assert not disks_may_help(replace(problem, device_types=units))
