"""What a night's model becomes, over a real registry; the gates themselves are tests/tasks/test_champion.py."""

import pytest
from mlflow import MlflowClient

from tasks.champion import champion_of
from tasks.promotion import NotJudged, promote_if_better
from tasks.promotion_gates import PromotionGates
from tests.tasks.registry import FITTED, OLD, SHIFTED


def promote(models, version, *, day="2026-11-30", usd=1.0):
    return promote_if_better.fn(
        models.workspace,
        run_id=f"run-{version}",
        version=version,
        day=day,
        dataset=models.dataset,
        usd_per_million_samples=usd,
        gates=PromotionGates(),
    )


def test_a_better_model_becomes_champion_and_a_worse_one_does_not(models):
    models.crown(OLD)

    better, worse = promote(models, FITTED), promote(models, SHIFTED)

    assert (better.is_promoted, worse.is_promoted) == (True, False)
    assert champion_of(models.workspace).version == FITTED


def test_a_model_of_an_earlier_day_than_the_champions_is_not_judged(models):
    models.crown(FITTED)  # Of 2026-11-02.

    assert promote(models, OLD, day="2026-11-01") == NotJudged("the champion has been trained on later days")
    assert champion_of(models.workspace).version == FITTED


def is_of_undated(models, version, data):
    """Let a version have been trained on rows without days."""
    client = MlflowClient(models.workspace.tracking_uri)
    client.delete_model_version_tag("ctr", version, "heterps.day")
    client.set_model_version_tag("ctr", version, "heterps.data", data)


@pytest.mark.parametrize(
    ("champions_data", "data", "why"),
    [
        (None, "made-up click stream", "version 1, has been trained on days, and this is not"),
        (None, "/srv/clicks.tsv", "version 1, has been trained on days, and this is not"),
        ("/srv/clicks.tsv", "made-up click stream", "version 1, has been trained on given data"),
    ],
)
def test_a_trial_does_not_take_the_place_of_what_serves(models, champions_data, data, why):
    models.crown(OLD)
    if champions_data is not None:
        is_of_undated(models, OLD, champions_data)
    is_of_undated(models, FITTED, data)

    judged = promote(models, FITTED, day=None)

    assert isinstance(judged, NotJudged)
    assert why in judged.why
    assert champion_of(models.workspace).version == OLD


def test_the_champion_of_a_trial_counts_as_none_for_the_first_model_of_real_data(models):
    """However good it is on its own rows; and its columns need not be those of the real ones."""
    models.crown(FITTED)
    is_of_undated(models, FITTED, "made-up click stream")

    decision = promote(models, OLD, day="2026-11-01")

    assert decision.is_promoted
    assert decision.champion is None
    assert "version 1 follows version 2, which was trained on other data, as champion" in decision.why
    assert champion_of(models.workspace).version == OLD


@pytest.mark.parametrize("usd", [None, 0.5])
def test_a_cost_that_nobody_knows_is_no_error(models, usd):
    decision = promote(models, FITTED, usd=usd)

    assert decision.is_promoted
    assert decision.challenger.usd_per_million_samples == usd
