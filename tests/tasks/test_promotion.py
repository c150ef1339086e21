"""What a night's model becomes, over a real registry; the gates themselves are tests/tasks/test_champion.py."""

import pytest

from tasks.champion import champion_of
from tasks.promotion import promote_if_better
from tasks.promotion_gates import PromotionGates
from tests.tasks.registry import FITTED, OLD, SHIFTED


def promote(models, version, *, day=None, usd=1.0):
    return promote_if_better.fn(
        models.workspace,
        run_id=f"run-{version}",
        version=version,
        day=day or f"2026-11-{version:0>2}",
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

    assert promote(models, OLD, day="2026-11-01") is None
    assert champion_of(models.workspace).version == FITTED


@pytest.mark.parametrize("usd", [None, 0.5])
def test_a_cost_that_nobody_knows_is_no_error(models, usd):
    decision = promote(models, FITTED, usd=usd)

    assert decision.is_promoted
    assert decision.challenger.usd_per_million_samples == usd
