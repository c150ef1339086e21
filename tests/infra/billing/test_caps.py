import pytest

from heterps_core.errors import BudgetExceededError
from infra.billing.caps import NOTHING_SPENT, Caps, Spent


@pytest.mark.parametrize(
    "caps",
    [
        Caps(),
        Caps(max_usd_per_hour=2.0),
        Caps(max_usd_per_run=10.0),
        Caps(max_usd_per_hour=2.0, max_usd_per_run=10.0),
    ],
)
def test_a_plan_at_the_cap_is_within_it(caps):
    caps.check(price_usd_per_hour=2.0, predicted_cost_usd=10.0, spent=NOTHING_SPENT)


def test_says_by_how_much_a_cap_is_exceeded():
    with pytest.raises(
        BudgetExceededError, match=r"within 2 USD per hour, but takes 2\.5: 0\.5 \(25%\) too much"
    ):
        Caps(max_usd_per_hour=2.0).check(price_usd_per_hour=2.5, predicted_cost_usd=1.0, spent=NOTHING_SPENT)


def test_the_month_counts_what_was_spent_before():
    caps = Caps(max_usd_per_month=10.0)
    caps.check(price_usd_per_hour=1.0, predicted_cost_usd=4.0, spent=Spent(month_usd=6.0))
    with pytest.raises(
        BudgetExceededError, match=r"within 10 USD per month, but takes 11: .* 7 USD of the month"
    ):
        caps.check(price_usd_per_hour=1.0, predicted_cost_usd=4.0, spent=Spent(month_usd=7.0))


def test_a_cost_that_is_not_a_number_is_refused():
    with pytest.raises(BudgetExceededError, match="USD per run"):
        Caps(max_usd_per_run=1.0).check(
            price_usd_per_hour=1.0, predicted_cost_usd=float("nan"), spent=NOTHING_SPENT
        )


def test_launches_that_failed_count_against_the_run_and_are_named():
    caps = Caps(max_usd_per_run=2.0)
    caps.check(price_usd_per_hour=1.0, predicted_cost_usd=1.5, spent=Spent(failed_launches_usd=0.5))

    with pytest.raises(BudgetExceededError, match=r"takes 2\.1: .*0\.6 USD went to launches that failed"):
        caps.check(price_usd_per_hour=1.0, predicted_cost_usd=1.5, spent=Spent(failed_launches_usd=0.6))
