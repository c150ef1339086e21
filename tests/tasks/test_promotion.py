"""What a night's model becomes, over a real registry; for the gates see records/test_champion.py."""

import json
import re
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from mlflow import MlflowClient

from heterps_core.data.proposal import column_checks
from heterps_core.judging.quality import measure_quality
from tasks.judging import challenge
from tasks.judging.challenge import Challenger
from tasks.judging.predicting_here import judge_here
from tasks.judging.promotion_gates import BASELINE_GATE, PromotionGates
from tasks.promotion import promote_if_better
from tasks.records import model_registry
from tasks.records.champion import champion_before, champion_of, roll_back
from tests.heterps_core.data.synthetic_rows import all_rows, held_out_labels
from tests.tasks.registry import EQUAL, FITTED, OLD, OTHER_TABLES, SHIFTED, baseline_of

pytestmark = pytest.mark.slow


def guesses(models):
    """A regression that has learned nothing."""
    return baseline_of(models.dataset, np.zeros(models.dataset.num_eval_rows))


def logits_of(models, version):
    """A version's logits of the held-out rows, added up by hand."""
    from safetensors.numpy import load_file

    dataset = models.dataset
    tensors = load_file(models.folder_of(version) / "model.safetensors")
    ids = all_rows(dataset).ids[dataset.num_train_rows :] + np.asarray(dataset.features.slot_offsets)
    slots = tensors["embedding.weight"][:, 0][ids].sum(axis=1, dtype=np.float64)
    dense = all_rows(dataset).dense[dataset.num_train_rows :] @ tensors["output.weight"][0, 26:]
    return slots + dense + tensors["output.bias"][0]


def promote(models, version, *, usd=1.0, baseline=None, **known):
    challenger = Challenger(
        version=version,
        gates=PromotionGates(),
        usd_per_million_samples=usd,
        planned_usd_per_million_samples=None,
        baseline=baseline or guesses(models),
        **known,
    )
    return promote_if_better.fn(models.workspace, challenger, models.dataset)


def test_a_better_model_becomes_champion_and_a_worse_one_does_not(models):
    models.crown(OLD)

    better, worse = promote(models, FITTED), promote(models, SHIFTED)

    assert (better.is_promoted, worse.is_promoted) == (True, False)
    assert champion_of(models.workspace).version == FITTED


def missed(decision):
    return [verdict.name for verdict in decision.gates if not verdict.is_met]


def is_of_day(models, version, day):
    """Let a version have been trained on another day."""
    MlflowClient(models.workspace.tracking_uri).set_model_version_tag("ctr", version, "heterps.day", day)


def test_a_back_filled_model_is_judged_against_the_champion_of_its_day_and_does_not_follow_the_one_of_now(
    models,
):
    models.crown(OLD, FITTED)
    is_of_day(models, FITTED, "2026-11-20")
    is_of_day(models, EQUAL, "2026-11-03")

    decision = promote(models, EQUAL)

    assert not decision.is_promoted
    assert missed(decision) == []
    assert decision.champion_version == OLD
    assert decision.auc_difference.low > 0
    assert "passed its gates against version 1, while version 2, which knows later days," in decision.why
    assert champion_of(models.workspace).version == FITTED
    kept = model_registry.find_version(models.workspace, EQUAL).tags
    assert json.loads(kept["heterps.decision"])["auc_difference"]["low"] == decision.auc_difference.low
    assert kept["heterps.promoted"] == "false"


def test_a_back_filled_day_goes_on_from_the_one_before_that_passed_and_not_from_one_that_did_not(models):
    models.crown(OLD, FITTED)
    is_of_day(models, FITTED, "2026-11-20")
    promote(models, EQUAL)
    worse = promote(models, SHIFTED)
    assert worse.champion_version == EQUAL
    assert "log-loss difference, upper end" in missed(worse)
    assert worse.why.startswith("version 2 stays champion, as of version 4 the log-loss")

    assert champion_before(models.workspace, date(2026, 11, 3)).version == OLD
    assert champion_before(models.workspace, date(2026, 11, 5)).version == EQUAL
    assert champion_before(models.workspace, date(2026, 11, 21)).version == FITTED
    assert roll_back(models.workspace).to.version == OLD


def test_a_back_filled_model_without_a_champion_of_its_day_is_judged_against_the_baseline(models):
    """As where the first night has trained the latest day, and the days before are back-filled then."""
    models.crown(OTHER_TABLES)
    is_of_day(models, OTHER_TABLES, "2026-11-20")

    better = promote(models, FITTED)
    worse = promote(models, OLD, baseline=baseline_of(models.dataset, logits_of(models, FITTED)))

    assert (better.champion_version, better.champion, missed(better)) == (None, None, [])
    assert "version 2 passed its gates, while version 6, which knows later days, stays" in better.why
    assert missed(worse) == [BASELINE_GATE]
    assert champion_of(models.workspace).version == OTHER_TABLES
    assert champion_before(models.workspace, date(2026, 11, 3)).version == FITTED


@pytest.mark.parametrize(("day", "is_promoted"), [("2026-11-03", True), ("2026-11-02", False), (None, False)])
def test_a_retrained_model_follows_only_where_it_knows_a_newer_day(models, day, is_promoted):
    """Versions 2 and 3 have the same weights: the difference is 0 and so is the interval around it."""
    models.crown(FITTED)
    if day is None:
        is_of_undated(models, FITTED, "/srv/clicks.tsv")
        is_of_undated(models, EQUAL, "/srv/clicks.tsv")
    else:
        is_of_day(models, EQUAL, day)

    decision = promote(models, EQUAL)

    assert (decision.auc_difference.low, decision.auc_difference.high) == (0.0, 0.0)
    assert decision.is_promoted is is_promoted
    assert champion_of(models.workspace).version == (EQUAL if is_promoted else FITTED)
    if not is_promoted:
        assert missed(decision) == ["AUC difference, lower end"]
        assert "must be above 0, but is 0" in decision.why
        assert "it knows no newer day than the champion" in decision.why
        assert "more rows" not in decision.why


def test_a_retrained_model_that_is_proven_better_follows(models):
    models.crown(OLD)
    is_of_day(models, FITTED, "2026-11-01")

    assert promote(models, FITTED).is_promoted


def test_a_first_model_that_is_proven_worse_than_the_logistic_regression_stays_out(models):
    fitted = logits_of(models, FITTED)

    decision = promote(models, OLD, baseline=baseline_of(models.dataset, fitted))

    labels = held_out_labels(models.dataset)
    difference = measure_quality(labels, logits_of(models, OLD)).auc - measure_quality(labels, fitted).auc
    assert not decision.is_promoted
    assert missed(decision) == [BASELINE_GATE]
    assert f"difference {difference:+.5f}" in decision.why
    assert champion_of(models.workspace) is None


def test_a_night_goes_on_from_what_only_the_baseline_kept_out_until_there_is_a_champion(models):
    better = baseline_of(models.dataset, logits_of(models, FITTED))
    promote(models, OLD, baseline=better)
    promote(models, SHIFTED)  # Worse than the mean click rate.

    assert champion_before(models.workspace, date(2026, 11, 1)) is None
    assert champion_before(models.workspace, date(2026, 11, 2)).version == OLD
    assert champion_before(models.workspace, date(2026, 11, 9)).version == OLD
    promote(models, EQUAL)
    assert champion_before(models.workspace, date(2026, 11, 9)).version == EQUAL


def test_a_first_model_that_is_worse_without_proof_becomes_champion_and_says_so(models):
    logits = logits_of(models, FITTED)
    # Two clicks that the regression ranks higher: too few to prove anything.
    better = logits.copy()
    better[np.flatnonzero(held_out_labels(models.dataset))[:2]] += 1.0

    decision = promote(models, FITTED, baseline=baseline_of(models.dataset, better))

    assert decision.is_promoted
    assert "below it but not proven so" in decision.why


def test_without_a_baseline_there_is_no_first_champion_and_the_reason_is_reported(models):
    decision = promote(models, FITTED, baseline="it failed with MemoryError: no room")

    assert missed(decision) == [BASELINE_GATE]
    assert "but is not known (there is none: it failed with MemoryError: no room)" in decision.why


def is_of_undated(models, version, data):
    """Let a version have been trained on rows without days."""
    client = MlflowClient(models.workspace.tracking_uri)
    client.delete_model_version_tag("ctr", version, "heterps.day")
    client.set_model_version_tag("ctr", version, "heterps.data", data)


@pytest.mark.parametrize(
    ("champions_data", "data", "why"),
    [
        (None, "synthetic click stream", "version 1, has been trained on days, and this is not"),
        (None, "/srv/clicks.tsv", "version 1, has been trained on days, and this is not"),
        ("/srv/clicks.tsv", "synthetic click stream", "version 1, has been trained on given data"),
    ],
)
def test_a_trial_does_not_take_the_place_of_what_serves(models, champions_data, data, why):
    models.crown(OLD)
    if champions_data is not None:
        is_of_undated(models, OLD, champions_data)
    is_of_undated(models, FITTED, data)

    judged = promote(models, FITTED)

    assert isinstance(judged, str)
    assert why in judged
    assert champion_of(models.workspace).version == OLD


def test_the_champion_of_a_trial_counts_as_none_for_the_first_model_of_real_data(models):
    """However good it is on its own rows; and its columns need not be those of the real ones."""
    models.crown(FITTED)
    is_of_undated(models, FITTED, "synthetic click stream")

    decision = promote(models, OLD)

    assert decision.is_promoted
    assert decision.champion is None
    assert "version 1 follows version 2, which was trained on other data, as champion" in decision.why
    assert champion_of(models.workspace).version == OLD


@pytest.mark.parametrize("usd", [None, 0.5])
def test_a_cost_that_nobody_knows_is_no_error(models, usd):
    decision = promote(models, FITTED, usd=usd)

    assert decision.is_promoted
    assert decision.challenger.usd_per_million_samples == usd


def test_what_the_workers_found_beside_the_champion_is_not_predicted_again(models, monkeypatch):
    models.crown(OLD)
    here = judge_here(models.dataset, models.folder_of(FITTED), champion_of(models.workspace))
    monkeypatch.setattr(challenge, "judge_here", None)

    decision = promote(models, FITTED, judgement=here, judged_beside=OLD)

    assert decision.is_promoted
    assert decision.auc_difference.value == here.auc_difference.value


def test_what_they_found_beside_another_model_is_left_aside(models):
    models.crown(OLD)
    beside_other = judge_here(
        models.dataset,
        models.folder_of(FITTED),
        replace(champion_of(models.workspace), folder=models.folder_of(SHIFTED)),
    )

    decision = promote(models, FITTED, judgement=beside_other, judged_beside=SHIFTED)

    assert decision.auc_difference.value != beside_other.auc_difference.value
    assert decision.champion.auc == pytest.approx(
        measure_quality(held_out_labels(models.dataset), logits_of(models, OLD)).auc, abs=1e-5
    )


def test_where_no_baseline_is_asked_for_the_mean_click_rate_decides(models):
    challenger = Challenger(
        version=FITTED,
        gates=PromotionGates(),
        usd_per_million_samples=1.0,
        planned_usd_per_million_samples=None,
        baseline=None,
    )
    decision = promote_if_better.fn(models.workspace, challenger, models.dataset)

    assert decision.is_promoted
    assert BASELINE_GATE not in [gate.name for gate in decision.gates]
    assert decision.why.endswith("below that of a constant")


def test_a_champion_whose_columns_tell_the_label_alone_says_so(models, monkeypatch):
    models.crown(OLD)
    monkeypatch.setattr(column_checks, "LEAK_AUC", 0.52)

    decision = promote(models, FITTED)

    assert decision.is_promoted
    assert re.search(r"; but \w+ tells the label alone \(AUC 0\.\d+\).*: was it filled after", decision.why)
