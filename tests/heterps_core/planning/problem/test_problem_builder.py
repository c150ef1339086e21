import json
from dataclasses import replace

import numpy as np
import pytest

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ConfigurationError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.run_tables import plan_table
from heterps_core.planning.problem.problem_builder import (
    ESTIMATE_RELATIVE_ERROR,
    build_problem,
    profiles_for_larger_tables,
    unit_type,
)
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.analytic_profile import estimate_profile
from heterps_core.profiling.layer_profile import RowReading
from heterps_core.profiling.replica_path import ReplicaPath
from heterps_core.profiling.timing import Timing
from tests.heterps_core.profiling.builders import GRAPH, make_profile

HERE = replace(DEVICE_TYPES["cpu-c5"], memory_bytes=1e6, network_bandwidth_bytes_per_s=1e4)


def local_unit(*, batch_size=400, **others):
    terms = {"batch_size": batch_size, "price_usd_per_hour": 0.05, "max_units": 8}
    return unit_type(GRAPH, make_profile(), HERE, **terms, **others)


def build(profiles=None, units=None, *, batch_size=400, floor=10.0, **others):
    return build_problem(
        GRAPH,
        profiles or {"local-cpu": make_profile()},
        units or {"local-cpu": local_unit(batch_size=batch_size)},
        batch_size=batch_size,
        num_samples=1e4,
        num_epochs=2,
        throughput_floor_samples_per_s=floor,
        **others,
    )


def test_layers_carry_the_seconds_and_bytes_of_profile_and_graph():
    embedding, dense = build().layers

    assert embedding.compute_seconds == {"local-cpu": pytest.approx(1.0)}
    # 3000 bytes at 10,000/s and four messages of 1 ms.
    assert embedding.communication_seconds == {"local-cpu": pytest.approx(0.304)}
    assert (embedding.is_sharded, embedding.state_bytes, embedding.output_bytes_per_sample) == (
        True,
        8_500,
        60,
    )
    # A quarter of the update of 0.4 s, and of 2 * 1000 bytes at 10,000/s.
    assert dense.compute_seconds == {"local-cpu": pytest.approx(3.1)}
    assert dense.communication_seconds == {"local-cpu": pytest.approx(0.05)}
    assert (dense.is_sharded, dense.state_bytes) == (False, 3_000)


def test_the_trainers_step_charges_messages_and_bytes_to_the_processor_and_the_papers_step_to_the_link():
    path = ReplicaPath(
        message_seconds=2e-4, peer_seconds=5e-5, table_seconds=4e-4, byte_seconds=6e-10, relative_error=0.1
    )
    reading = RowReading(batch_ms=100.0, row_ms=1.0)
    profile = replace(make_profile(), measured_replica_path=path, reading=reading)
    problems = {
        model: build(
            {"local-cpu": profile},
            {
                "local-cpu": unit_type(
                    GRAPH,
                    profile,
                    HERE,
                    batch_size=400,
                    price_usd_per_hour=1.0,
                    max_units=8,
                    step_model=model,
                )
            },
            step_model=model,
        )
        for model in StepModel
    }

    units = {model: problem.device_types["local-cpu"] for model, problem in problems.items()}
    layers = {model: problem.layers for model, problem in problems.items()}
    found = units[StepModel.TRAINER]
    assert (found.exchange_seconds, found.exchange_seconds_per_peer) == (2e-4, 5e-5)
    assert (found.exchange_seconds_per_table, found.exchange_seconds_per_byte) == (4e-4, 6e-10)
    assert (found.boundary_seconds, found.boundary_seconds_per_byte) == (0.004, 2e-6)
    assert (found.sum_seconds_per_peer, found.sum_seconds_per_byte) == (0.003, 3e-6)
    assert found.later_reading_seconds == pytest.approx(0.1)
    assert found.later_reading_seconds_per_sample == pytest.approx(0.001)
    assert [layer.exchanged_bytes for layer in layers[StepModel.TRAINER]] == [3_000, 1_000]
    assert layers[StepModel.TRAINER][0].communication_seconds == {"local-cpu": pytest.approx(0.3)}
    assert (units[StepModel.PAPERS].exchange_seconds, units[StepModel.PAPERS].boundary_seconds) == (0, 0)
    assert layers[StepModel.PAPERS][0].exchanged_bytes == 0
    assert layers[StepModel.PAPERS][0].communication_seconds == {"local-cpu": pytest.approx(0.304)}


def test_half_as_much_crosses_a_boundary_in_bfloat16():
    """60 bytes a sample in float32, both ways, for 400 samples at 19,400 bytes/s: 2.47 s; a half of it is 1.24 s."""
    first = Stage(0, 0, "local-cpu", 1)
    full, half = (build(wire_dtype=dtype, floor=0.0) for dtype in ("float32", "bfloat16"))

    assert [layers[0].output_bytes_per_sample for layers in (full.layers, half.layers)] == [60, 30]
    seconds = [plan_table(problem, [first]).terms(np.ones(1)).across[0] for problem in (full, half)]
    assert seconds == pytest.approx([2 * 400 * 60 / 19_400, 400 * 60 / 19_400])


@pytest.mark.parametrize(("wire_dtype", "share"), [("float32", 1), ("bfloat16", 72 / 136)])
def test_replicas_exchange_rows_of_fewer_bytes_in_narrower_formats(wire_dtype, share):
    """Of a row of 16 numbers an index of 8 bytes, the row and its gradient; 3,000 bytes at 10,000/s in float32."""
    embedding = build(wire_dtype=wire_dtype).layers[0]

    assert embedding.communication_seconds == {"local-cpu": pytest.approx(0.3 * share + 0.004)}
    assert embedding.output_bytes_per_sample == (60 if share == 1 else 30)


def test_the_device_type_carries_terms_and_parallel_fractions():
    unit = build(batch_size=100).device_types["local-cpu"]

    assert (unit.price_usd_per_hour, unit.max_units) == (0.05, 8)
    assert (unit.memory_bytes, unit.bandwidth_bytes_per_s) == (1e6, 0.97 * 2e4)
    assert unit.compute_parallel_fraction == pytest.approx(0.9)
    # 3000 and 2000 bytes of rows, 2000 of gradients, 60 bytes a sample in each direction at the one boundary.
    assert unit.communication_parallel_fraction == pytest.approx((1 - 7_000 / 11_000) * 2)
    # In the trainer's step, of rows alone.
    unit = local_unit(batch_size=100, step_model=StepModel.TRAINER)
    assert unit.communication_parallel_fraction == pytest.approx((1 - 2_000 / 3_000) * 2)


def test_the_cost_model_gives_the_profiled_time_of_a_batch_back():
    problem = build()

    evaluation = evaluate(problem, [Stage(0, 1, "local-cpu", 1)])

    # Four micro-batches of 4 s and one dense update of 0.4 s.
    assert evaluation.stages[0].compute_seconds == pytest.approx(16.4)
    assert evaluation.throughput_samples_per_s == pytest.approx(400 / 16.4)


def test_a_cpu_reads_rows_beside_its_computing_and_a_cards_host_at_the_same_time_as_the_card():
    here = replace(make_profile(), reading=RowReading(batch_ms=100.0, row_ms=1.0, decoded_row_ms=4.0))
    names = {"local-cpu": HERE, "gpu-t4": DEVICE_TYPES["gpu-t4"]}
    profiles = {"local-cpu": here, "gpu-t4": estimate_profile(GRAPH, here, names["gpu-t4"])}
    terms = {"batch_size": 400, "step_model": StepModel.TRAINER, "decoded_share": 0.5}
    units = {
        name: unit_type(GRAPH, profiles[name], device_type, price_usd_per_hour=1.0, max_units=8, **terms)
        for name, device_type in names.items()
    }

    problem = build(profiles, units, **terms)

    # A quarter of the 100 ms of a batch of 400, and 100 rows of 1 + 4 / 2 ms.
    assert problem.layers[0].compute_seconds["local-cpu"] == pytest.approx(1.0 + 0.325)
    assert problem.layers[0].reading_seconds == {"gpu-t4": pytest.approx(0.325)}
    assert problem.layers[1].reading_seconds == {}
    card, several = (evaluate(problem, [Stage(0, 1, "gpu-t4", k)]).stages[0] for k in (1, 2))
    assert (card.seconds, card.reading_seconds) == (pytest.approx(1.3), pytest.approx(1.3))
    assert several.reading_seconds == pytest.approx(0.65)
    # The papers' step has no term beside computing and links.
    assert build(profiles, units, **terms | {"step_model": StepModel.PAPERS}).layers[0].reading_seconds == {}


def test_the_problem_meets_the_contract():
    problem = build()

    assert SchedulingProblem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


def test_measured_times_carry_half_the_spread_of_their_repeats():
    forward = Timing(median_ms=300.0, low_ms=250.0, high_ms=450.0, num_repeats=9)
    measured = make_profile()
    noisy = replace(measured, timings=(replace(measured.timings[0], forward=forward), measured.timings[1]))

    embedding, dense = build({"local-cpu": noisy}).layers

    # 200 ms between the percentiles, of 300 + 200 + 500 ms.
    assert embedding.compute_relative_spread == {"local-cpu": pytest.approx(0.1)}
    assert dense.compute_relative_spread == {"local-cpu": 0.0}


def test_estimated_times_carry_the_assumed_error():
    profiles = {"gpu-t4": estimate_profile(GRAPH, make_profile(), DEVICE_TYPES["gpu-t4"])}
    layers = build(profiles, {"gpu-t4": local_unit()}).layers

    assert [layer.compute_relative_spread for layer in layers] == [{"gpu-t4": ESTIMATE_RELATIVE_ERROR}] * 2


def test_an_estimate_carries_the_spread_of_what_it_follows_from_and_the_error_of_a_busy_machine():
    phases = {
        name: Timing(median_ms=100.0, low_ms=90.0, high_ms=150.0, num_repeats=9)
        for name in ("forward", "backward", "update")
    }
    noisy = [(replace(timings[0], **phases), timings[1]) for timings in (make_profile().timings,) * 2]
    measured = replace(make_profile(*noisy), clock_over_processor=4.0)
    layers = build(
        {"gpu-t4": estimate_profile(GRAPH, measured, DEVICE_TYPES["gpu-t4"])}, {"gpu-t4": local_unit()}
    ).layers

    # Each phase spreads by 60 % of its median, half of it to either side.
    wanted = [(0.3**2 + 0.5**2 + 0.2**2) ** 0.5, (0.5**2 + 0.2**2) ** 0.5]
    assert [layer.compute_relative_spread["gpu-t4"] for layer in layers] == pytest.approx(wanted)


def test_published_networks_carry_the_assumed_error_also_where_layers_are_measured():
    unit = unit_type(
        GRAPH, make_profile(), DEVICE_TYPES["cpu-c5"], batch_size=400, price_usd_per_hour=0.5, max_units=1
    )

    assert unit.communication_relative_spread == ESTIMATE_RELATIVE_ERROR


def test_types_of_the_terms_are_planned_with_and_other_profiles_are_not_needed():
    measured = make_profile()
    profiles = {name: estimate_profile(GRAPH, measured, DEVICE_TYPES[name]) for name in ("cpu-c5", "gpu-t4")}
    card = unit_type(
        GRAPH,
        profiles["gpu-t4"],
        DEVICE_TYPES["gpu-t4"],
        batch_size=400,
        price_usd_per_hour=0.5,
        max_units=2,
    )

    problem = build({"local-cpu": measured, **profiles}, {"gpu-t4": card})

    assert problem.device_type_names == ("gpu-t4",)
    assert problem.device_types["gpu-t4"].memory_bytes == 16 * 2**30
    assert problem.device_types["gpu-t4"].bandwidth_bytes_per_s == 2 * 0.97 * 625e6


@pytest.mark.parametrize(
    ("profiles", "units", "message"),
    [
        (
            {"local-cpu": make_profile()},
            {"gpu-t4": local_unit()},
            "gpu-t4 has none; there are profiles for: local-cpu",
        ),
        (
            {"local-cpu": replace(make_profile(), graph_fingerprint="other")},
            {"local-cpu": local_unit()},
            "profile it again",
        ),
        (
            {"local-cpu": make_profile(), "b": replace(make_profile(), batch_size=60, half_batch_size=30)},
            {"local-cpu": local_unit(), "b": local_unit()},
            "same batch size, got: local-cpu 100, b 60",
        ),
    ],
)
def test_refuses_profiles_that_do_not_fit(profiles, units, message):
    with pytest.raises(ConfigurationError, match=message):
        build(profiles, units)


def test_needs_a_device_type():
    with pytest.raises(ConfigurationError, match="at least one device type"):
        build_problem(
            GRAPH,
            {},
            {},
            batch_size=100,
            num_samples=1,
            num_epochs=1,
            throughput_floor_samples_per_s=0,
        )


def with_rows_of_tables_times(factor):
    layers = [
        replace(layer, parameter_bytes=layer.parameter_bytes * factor) if layer.is_sharded else layer
        for layer in GRAPH.layers
    ]
    return replace(GRAPH, layers=tuple(layers))


def test_a_profile_serves_the_same_model_with_larger_tables_and_only_memory_changes():
    planned = with_rows_of_tables_times(1000)
    profiles = profiles_for_larger_tables({"local-cpu": make_profile()}, measured=GRAPH, planned=planned)

    problem = build_problem(
        planned,
        profiles,
        {"local-cpu": local_unit()},
        batch_size=400,
        num_samples=1e4,
        num_epochs=2,
        throughput_floor_samples_per_s=10.0,
    )

    small = build()
    assert problem.layers[0].state_bytes > 900 * small.layers[0].state_bytes
    assert replace(problem.layers[0], state_bytes=0) == replace(small.layers[0], state_bytes=0)
    assert problem.layers[1] == small.layers[1]


def test_tables_that_no_cache_holds_make_embeddings_on_cpus_slower():
    profiles = profiles_for_larger_tables(
        {"cpu-c5": make_profile(), "gpu-t4": make_profile()},
        measured=GRAPH,
        planned=with_rows_of_tables_times(10_000),
    )

    (rows, dense), (rows_on_card, _) = (profiles[name].timings for name in ("cpu-c5", "gpu-t4"))
    before, dense_before = make_profile().timings
    assert rows.compute_ms(update_share=1.0) == 1.5 * before.compute_ms(update_share=1.0)
    assert profiles["cpu-c5"].half_batch_timings[0].update.median_ms == 1.5 * 260.0
    assert (dense, rows_on_card) == (dense_before, before)


def test_a_profile_does_not_serve_another_dense_layer():
    dense = replace(GRAPH.layers[1], parameter_bytes=8)

    with pytest.raises(ConfigurationError, match="other table sizes only"):
        profiles_for_larger_tables(
            {"local-cpu": make_profile()},
            measured=GRAPH,
            planned=replace(GRAPH, layers=(GRAPH.layers[0], dense)),
        )


def test_one_unit_is_planned_at_what_it_computes_as_it_talks_to_no_other():
    slow_link = replace(
        make_profile(), exchange_link=replace(make_profile().exchange_link, bandwidth_bytes_per_s=1.0)
    )
    problem = build({"local-cpu": slow_link})

    one, two = (evaluate(problem, [Stage(0, 1, "local-cpu", count)]).stages[0] for count in (1, 2))

    assert one.seconds == one.compute_seconds == pytest.approx(16.4)
    assert two.seconds == two.communication_seconds > 1_000
