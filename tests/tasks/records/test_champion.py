"""Who becomes champion, whatever is killed in between, and the way back; over a real registry."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date

import numpy as np
import pytest

from heterps_core.errors import CheckpointError, ConfigurationError, UnknownNameError
from heterps_core.judging.quality import measure_quality
from heterps_core.serving.exported_model import ClickPredictor
from infra.workspace import Workspace
from tasks.judging.promotion_gates import PromotionDecision, PromotionGates
from tasks.records import model_registry
from tasks.records.champion import apply_decision, champion_before, champion_of, roll_back
from tasks.records.mlflow_names import EXPERIMENT
from tests.heterps_core.data.synthetic_rows import all_rows, held_out_labels
from tests.heterps_core.serving.builders import raw_columns
from tests.tasks.registry import BROKEN, EQUAL, FITTED, OLD, OTHER_TABLES, SHIFTED

pytestmark = pytest.mark.slow


def gate(decision, name):
    (verdict,) = [verdict for verdict in decision.gates if verdict.name.startswith(name)]
    return verdict


def missed(decision):
    return [verdict.name for verdict in decision.gates if not verdict.is_met]


def test_a_workspace_without_records_has_no_champion_and_stays_empty(tmp_path):
    empty = Workspace(root=tmp_path)

    assert champion_of(empty) is None
    with pytest.raises(ConfigurationError, match="but there is none yet"):
        roll_back(empty)
    assert list(tmp_path.iterdir()) == []


def test_the_first_model_that_beats_the_mean_click_rate_becomes_champion(models):
    decision = models.judge(FITTED, usd=0.5)
    assert models.champion is None
    apply_decision(models.workspace, decision)

    champion = champion_of(models.workspace)
    assert (champion.version, champion.run_id, champion.day) == (FITTED, "run-2", "2026-11-02")
    assert json.loads((champion.folder / "model.json").read_text())["model"] == champion.model
    rate = held_out_labels(models.dataset).mean()
    entropy = -rate * np.log(rate) - (1 - rate) * np.log(1 - rate)
    assert decision.log_loss_difference.value == pytest.approx(decision.challenger.log_loss - entropy)
    assert decision.why.startswith("version 2 is the first champion: on 4,000 rows that it has not seen")


@pytest.mark.parametrize(
    ("day", "version"),
    [("2026-11-04", FITTED), ("2026-11-03", FITTED), ("2026-11-02", OLD), ("2026-11-01", FITTED)],
)
def test_a_day_goes_on_from_the_newest_champion_that_knows_only_days_before_it(models, day, version):
    """Versions 1 and 2 were trained on the first two days; where none fits, the champion of now is named."""
    models.crown(OLD)
    models.crown(FITTED)

    assert champion_before(models.workspace, date.fromisoformat(day)).version == version


def test_nothing_goes_on_from_a_champion_that_was_rolled_back(models):
    models.crown(OLD)
    models.crown(FITTED)
    models.crown(EQUAL)
    roll_back(models.workspace, to=OLD)
    models.crown(SHIFTED)

    # Version 2 was champion too, and nobody took it back; version 3 was.
    assert champion_before(models.workspace, date(2026, 11, 4)).version == FITTED


def test_nothing_goes_on_where_there_is_no_champion(models):
    assert champion_before(models.workspace, date(2026, 11, 4)) is None


def test_a_first_model_that_is_worse_than_the_mean_click_rate_stays_out(models):
    decision = models.decide(SHIFTED)

    assert missed(decision) == ["log-loss against the mean click rate, upper end"]
    assert decision.why.startswith("there is still no champion, as of version 4 the log-loss against")
    assert models.champion is None


def test_a_better_challenger_follows_and_a_worse_one_does_not(models):
    models.crown(OLD)
    better = models.decide(FITTED)

    assert better.is_promoted
    assert models.champion == FITTED
    assert better.champion_version == OLD
    assert better.auc_difference.low > 0
    assert "version 2 follows version 1 as champion" in better.why

    # The same two models the other way round.
    worse = models.judge(EQUAL, champion=replace(champion_of(models.workspace), folder=models.folder_of(OLD)))
    assert worse.auc_difference == better.auc_difference
    kept_out = models.decide(SHIFTED)
    assert models.champion == FITTED
    assert "log-loss difference, upper end" in missed(kept_out)
    assert kept_out.why.startswith("version 2 stays champion, as of version 4 the log-loss difference")


def test_a_worse_challenger_does_not_follow(models):
    models.crown(FITTED)

    decision = models.decide(OLD)

    assert models.champion == FITTED
    assert "AUC difference, lower end" in missed(decision)
    assert decision.auc_difference.high < 0


def test_figures_are_those_of_the_weights_added_up_by_hand(models):
    from safetensors.numpy import load_file

    dataset = models.dataset
    tensors = load_file(models.folder_of(OLD) / "model.safetensors")
    ids = all_rows(dataset).ids[dataset.num_train_rows :] + np.asarray(dataset.features.slot_offsets)
    dense = all_rows(dataset).dense[dataset.num_train_rows :]
    slots = tensors["embedding.weight"][:, 0][ids].sum(axis=1, dtype=np.float64)
    logits = slots + dense @ tensors["output.weight"][0, 26:] + tensors["output.bias"][0]

    figures = models.judge(OLD).challenger

    quality = measure_quality(held_out_labels(dataset), logits)
    assert figures.auc == pytest.approx(quality.auc, abs=1e-5)
    assert figures.log_loss == pytest.approx(quality.log_loss, abs=1e-5)
    clicks = (1 / (1 + np.exp(-logits))).sum() / held_out_labels(dataset).sum()
    assert figures.calibration_ratio == pytest.approx(clicks, abs=1e-5)


def test_an_equal_challenger_that_is_too_dear_stays_out_and_a_better_one_may_cost_more(models):
    models.crown(OLD)
    better = models.decide(FITTED, usd=5.0)
    assert better.is_promoted
    assert "the gain in AUC is proven" in gate(better, "cost").remark

    equal = models.judge(EQUAL, usd=8.0)

    assert missed(equal) == ["cost over the champion's"]
    assert gate(equal, "cost").value == pytest.approx(8.0 / 5.0)
    assert models.judge(EQUAL, usd=7.4).is_promoted


def test_a_challenger_of_unknown_cost_must_be_better(models):
    models.crown(FITTED)

    equal = models.judge(EQUAL, usd=None)

    assert missed(equal) == ["cost over the champion's"]
    assert equal.challenger.usd_per_million_samples is None
    assert json.loads(json.dumps(equal.to_json(), allow_nan=False))["is_promoted"] is False


def test_it_is_said_where_only_more_rows_could_tell(models):
    models.crown(FITTED)
    # Version 6 is better by 0.0285, with an interval from 0.022 to 0.035.
    strict = PromotionGates(min_auc_gain=0.03, max_cost_ratio=1.0)

    undecided = models.judge(OTHER_TABLES, gates=strict)
    too_dear = models.judge(EQUAL, usd=2.0, gates=strict)

    assert missed(undecided) == ["AUC difference, lower end"]
    assert undecided.why.endswith("; more rows might tell them apart")
    assert "more rows" not in too_dear.why
    assert "more rows" not in models.judge(EQUAL, gates=strict).why
    assert "more rows" not in models.judge(OLD, gates=strict).why


def test_a_model_that_foresees_too_many_clicks_stays_out_though_it_ranks_as_well(models):
    models.crown(FITTED)

    decision = models.judge(SHIFTED)

    assert missed(decision) == ["log-loss difference, upper end", "calibration error"]
    assert decision.auc_difference.value == pytest.approx(0.0, abs=1e-6)


def test_predictions_that_are_not_finite_are_never_promoted(models):
    decision = models.decide(BROKEN, gates=PromotionGates(min_auc_gain=-1.0))

    assert missed(decision) == ["predictions that are not finite"]
    assert gate(decision, "predictions").value == models.dataset.num_eval_rows
    assert models.champion is None


def test_a_champion_whose_predictions_are_not_finite_counts_as_none(models):
    model_registry.call_version(models.workspace, BROKEN, "champion")

    decision = models.decide(FITTED)

    assert models.champion == FITTED
    assert "follows version 5, whose predictions are not finite, as champion" in decision.why


def test_too_few_clicks_decide_nothing(models):
    num_clicks = int(held_out_labels(models.dataset).sum())

    decision = models.judge(FITTED, gates=PromotionGates(min_positives=num_clicks + 1))

    assert missed(decision) == ["clicks, or rows without one"]


def test_a_champion_of_other_tables_and_another_transform_is_compared_all_the_same(models):
    models.crown(OTHER_TABLES)

    decision = models.judge(FITTED)

    columns = raw_columns(models.clicks, slice(-models.dataset.num_eval_rows, None))
    probabilities = ClickPredictor(models.folder_of(OTHER_TABLES)).predict(columns)
    quality = measure_quality(held_out_labels(models.dataset), np.log(probabilities / (1 - probabilities)))
    assert decision.champion.auc == pytest.approx(quality.auc, abs=1e-6)
    assert decision.champion.log_loss == pytest.approx(quality.log_loss, abs=1e-6)


def test_a_version_that_is_damaged_after_it_was_judged_is_not_promoted(models):
    models.crown(OLD)
    decision = models.judge(FITTED)

    with (
        models.damaged(FITTED),
        pytest.raises(
            CheckpointError, match="version 2 of ctr must have the files that it was registered with"
        ),
    ):
        apply_decision(models.workspace, decision)

    assert models.champion == OLD


def test_a_damaged_champion_is_reported_and_can_be_left(models):
    models.crown(OLD, FITTED)

    with models.damaged(FITTED):
        with pytest.raises(CheckpointError, match=r"version 2 of ctr .* go back with heterps rollback"):
            champion_of(models.workspace)
        roll_back(models.workspace)

    assert models.champion == OLD


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda text: text.replace("tasks.click_model", "os.path"), "MLmodel names the loader 'os.path'"),
        (lambda text: text.replace("data:", "date:"), "MLmodel cannot be read"),
        (lambda text: "", "MLmodel cannot be read"),
        (lambda text: "{", "MLmodel cannot be read"),
    ],
)
def test_an_exchanged_loader_and_a_damaged_description_are_reported(models, changed, message):
    models.crown(FITTED)
    path = models.folder_of(FITTED).parents[1] / "MLmodel"
    whole = path.read_text()
    path.write_text(changed(whole))

    try:
        with pytest.raises(CheckpointError, match=message):
            champion_of(models.workspace)
    finally:
        path.write_text(whole)


def test_a_decision_against_an_earlier_champion_is_refused(models):
    models.crown(OLD)
    decision = models.judge(FITTED)
    models.crown(EQUAL)

    with pytest.raises(ConfigurationError, match="judged against, 1, but champion is now 3; judge it again"):
        apply_decision(models.workspace, decision)

    assert models.champion == EQUAL


def test_applying_a_decision_again_changes_nothing_even_after_a_roll_back(models):
    models.crown(OLD)
    decision = models.decide(FITTED)
    roll_back(models.workspace)

    apply_decision(models.workspace, decision)

    assert models.champion == OLD


def test_roll_backs_go_from_champion_to_champion_and_end_at_the_first(models):
    models.crown(OLD, FITTED)
    models.decide(SHIFTED)
    models.crown(OTHER_TABLES)

    went = [roll_back(models.workspace) for _ in range(2)]

    assert [(step.from_version, step.to.version) for step in went] == [(OTHER_TABLES, FITTED), (FITTED, OLD)]
    assert models.champion == OLD
    with pytest.raises(ConfigurationError, match="but it was the first; name one with --to: 6, 2"):
        roll_back(models.workspace)
    assert roll_back(models.workspace, to=OTHER_TABLES).from_version == OLD
    assert models.champion == OTHER_TABLES


def test_after_a_roll_back_the_next_champion_leads_back_to_where_it_came_from(models):
    models.crown(OLD, FITTED, EQUAL)
    roll_back(models.workspace)
    models.crown(OTHER_TABLES)

    assert roll_back(models.workspace).to.version == FITTED


def test_a_roll_back_leads_to_earlier_champions_only(models):
    models.crown(OLD, FITTED)
    models.decide(SHIFTED)

    with pytest.raises(ConfigurationError, match="version 2 is champion already"):
        roll_back(models.workspace, to=FITTED)
    for never in (SHIFTED, "99", "latest"):
        with pytest.raises(
            UnknownNameError, match=f"'{never}' is not a known earlier champion; known are: 1"
        ):
            roll_back(models.workspace, to=never)

    assert models.champion == FITTED


def test_a_roll_back_to_damaged_files_is_refused(models):
    models.crown(OLD, FITTED, EQUAL)

    with (
        models.damaged(FITTED),
        pytest.raises(CheckpointError, match="champion is still 3, others to go back to with --to are: 1"),
    ):
        roll_back(models.workspace)

    assert models.champion == EQUAL


class KilledError(BaseException):
    """Stands for a SIGKILL: nothing catches it."""


def run_until_killed(monkeypatch, action, *, num_writes):
    """Run `action` until the write after `num_writes` would reach MLflow."""
    from mlflow import MlflowClient

    left = num_writes

    def counted(write):
        def write_or_die(*arguments, **keywords):
            nonlocal left
            if left == 0:
                raise KilledError
            left -= 1
            return write(*arguments, **keywords)

        return write_or_die

    with monkeypatch.context() as patch:
        for name in ("set_model_version_tag", "set_registered_model_alias", "set_tag"):
            patch.setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))
        with pytest.raises(KilledError):
            action()


@pytest.mark.parametrize("num_writes", range(5))
def test_whatever_is_killed_leaves_the_old_or_the_new_champion_and_can_be_made_up_for(
    models, monkeypatch, num_writes
):
    models.crown(OLD)
    decision = models.judge(FITTED)

    run_until_killed(monkeypatch, lambda: apply_decision(models.workspace, decision), num_writes=num_writes)

    # Decision and time first, then the alias.
    assert models.champion == (OLD if num_writes < 3 else FITTED)
    models.decide(FITTED)
    assert models.champion == FITTED
    assert model_registry.find_version(models.workspace, FITTED).tags["heterps.promoted"] == "true"
    assert roll_back(models.workspace).to.version == OLD


@pytest.mark.parametrize("num_writes", range(4))
def test_a_killed_roll_back_leaves_the_one_or_the_other(models, monkeypatch, num_writes):
    models.crown(OLD, FITTED)

    run_until_killed(monkeypatch, lambda: roll_back(models.workspace), num_writes=num_writes)

    assert models.champion == (FITTED if num_writes < 2 else OLD)


def test_a_champion_that_was_not_marked_before_a_kill_can_still_be_gone_back_to(models, monkeypatch):
    models.crown(OLD)
    decision = models.judge(FITTED)
    run_until_killed(monkeypatch, lambda: apply_decision(models.workspace, decision), num_writes=3)
    models.crown(EQUAL)

    assert roll_back(models.workspace, to=FITTED).to.version == FITTED


def test_the_run_that_trained_a_version_says_whether_it_was_promoted(models):
    from mlflow import MlflowClient

    models.crown(FITTED)
    models.decide(SHIFTED)

    client = MlflowClient(tracking_uri=models.workspace.tracking_uri)
    runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    tags = {run.data.tags["heterps.run_id"]: run.data.tags.get("heterps.promoted") for run in runs}
    assert (tags["run-1"], tags["run-2"], tags["run-4"]) == (None, "true", "false")


def test_a_decision_is_read_back_as_it_was_written(models):
    models.crown(OLD)
    decision = models.judge(FITTED)

    assert PromotionDecision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
