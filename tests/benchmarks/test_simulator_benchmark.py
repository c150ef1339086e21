from tests.benchmarks.simulator import agreement, draw_plans, straggler_costs


def test_the_closed_form_leaves_filling_and_draining_out():
    figures = {figure["name"]: figure["value"] for figure in agreement(draw_plans(2, seed=0))}

    assert 0 < figures["simulator_flushed_median_error_percent"] < 100


def test_a_straggler_costs_throughput_wherever_it_is():
    figures = straggler_costs(draw_plans(1, seed=0))

    assert {figure["name"].split("_stage_")[0] for figure in figures} >= {"straggler_2x_first"}
    # Of two times slower, no more than half can be lost.
    assert all(-1e-6 <= figure["value"] <= 50 for figure in figures)
