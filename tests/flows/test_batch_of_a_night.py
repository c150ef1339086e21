"""The batch of a night to a target AUC, by a curve of a known law and plans whose cost follows from their samples."""

from dataclasses import replace

import pytest

from flows.night import quality
from flows.night.plan import NightPlan
from flows.night.run import OpenedRun
from flows.parameters import TrainParameters
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace
from tasks.records.mlflow_names import TrackedRun
from tasks.records.run_files import saved_parameters
from tasks.running.start import NEW_MODEL
from tests.heterps_core.planning.test_quality_curve import samples_of, trainings
from tests.tasks.report_builders import make_plan_report

RUN_ID = "20261128-0000-00000001"


@pytest.fixture
def opened(tmp_path, monkeypatch):
    path = write_click_stream(tmp_path / "clicks.tsv", num_rows=100_000 // 20, seed=1).path
    dataset = prepare_dataset(path, schema=CRITEO_SCHEMA, out_dir=tmp_path / "prepared")
    dataset.manifest = replace(dataset.manifest, num_train_rows=60_000)
    tracked = TrackedRun(mlflow_run_id="0" * 32, experiment_id="1", run_id=RUN_ID)
    report = make_plan_report(provider="aws")

    def plan_night(run):
        chosen = report.chosen
        samples = run.asked.max_samples or 60_000
        # A step costs as much as 100 samples do.
        usd = 1e-6 * samples * (1 + 100 / run.planned_batch_size)
        found = replace(chosen, plan=replace(chosen.plan, cost_usd=usd, cost_lower_bound_usd=usd))
        searches = replace(report.searches, results={"exact": found})
        return NightPlan(replace(report, searches=searches), None, None, None, None)

    monkeypatch.setattr(quality, "plan_night", plan_night)
    monkeypatch.setattr(quality, "measure_points", lambda *_: tuple(trainings()))

    def run_of(**asked):
        workspace = Workspace(root=tmp_path / "home").create()
        return OpenedRun(
            workspace, RUN_ID, False, TrainParameters(**asked), tracked, NEW_MODEL, None, dataset
        )

    return run_of


def test_the_cheapest_batch_to_a_target_is_planned_kept_and_explained(opened):
    costs = {size: 1e-6 * samples_of(0.78, size) * (1 + 100 / size) for size in (32, 128)}
    run, plan = quality.plan_with_batch(opened(target_auc=0.78))

    assert run.batch_size == run.asked.batch_size == min(costs, key=costs.__getitem__) == 128
    assert plan.report.chosen.plan.cost_usd == pytest.approx(costs[128], rel=0.1)
    saved = saved_parameters(run.workspace, RUN_ID)
    assert (saved["batch_size"], saved["max_samples"]) == (128, run.asked.max_samples)
    for part in (
        "AUC 0.7800 needs",
        "in batches of 128 for",
        "other batches: 32",
        "the fastest plan costs",
        "extrapolated from 9 trainings of at most 16,000 samples",
    ):
        assert part in plan.report.batch_choice


def test_a_target_out_of_reach_names_the_best_one_and_its_cost(opened):
    with pytest.raises(
        ConfigurationError, match=r"within reach of the 60,000 samples, got 0.9; .* USD; lower it"
    ):
        quality.plan_with_batch(opened(target_auc=0.9))


def test_without_a_curve_or_with_a_batch_nothing_is_chosen(opened, monkeypatch):
    seen = []
    monkeypatch.setattr(quality, "plan_night", seen.append)

    for asked in ({}, {"batch_size": 64}):
        run, _ = quality.plan_with_batch(opened(**asked))
        assert run.asked == TrainParameters(**asked)
        assert run is seen[-1]
