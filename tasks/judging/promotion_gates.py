"""Promotion of a challenger to champion: gates, their verdicts, and the decision.

The gates are for a champion that is trained again every night while the data drifts. There the larger risk is a model
that grows old, not one that is hardly better: a challenger that knows a newer day need not prove a gain, but that it
loses no more than a margin (non-inferiority). Without a proven gain it may not cost more; and one that knows no newer
day than the champion, such as a retrained one, must prove a gain in any case. Where there is no champion to compare
with, a challenger must be better than the mean click rate, and must not be proven worse than a logistic regression.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.judging.intervals import Estimate

AUC_GATE = "AUC difference, lower end"
LOG_LOSS_GATE = "log-loss difference, upper end"
BASELINE_GATE = "AUC less the logistic regression's, upper end"
CALIBRATION_GATE = "calibration error"
COST_GATE = "cost over the champion's"
MARGIN_GATES = (AUC_GATE, LOG_LOSS_GATE)
"""Gates that more rows make easier to meet."""

COMPARISON_GATES = frozenset({*MARGIN_GATES, BASELINE_GATE, CALIBRATION_GATE, COST_GATE})
"""Gates that compare a sound model with another one."""

RULES = {
    "at least": operator.ge,
    "at most": operator.le,
    "above": operator.gt,
    "below": operator.lt,
    "equal to": operator.eq,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GateVerdict:
    """The verdict of one gate."""

    name: str
    value: float | str | None
    """None where it is not known."""

    bound: float | str
    rule: str
    """How the value must stand to the bound, one of `RULES`."""

    is_met: bool
    remark: str = ""
    """Explains the value to a person."""

    @classmethod
    def of(
        cls, name: str, value: float | str, rule: str, bound: float | str, remark: str = ""
    ) -> GateVerdict:
        """Return the verdict that the rule alone gives."""
        is_met = RULES[rule](value, bound)
        return cls(name=name, value=value, bound=bound, rule=rule, is_met=is_met, remark=remark)

    def __str__(self) -> str:
        value, bound = (
            f"{figure:.5g}" if isinstance(figure, float) else figure for figure in (self.value, self.bound)
        )
        return (
            f"{self.name} must be {self.rule} {bound}, "
            f"{'is' if self.is_met else 'but is'} {'not known' if value is None else value}"
            + (f" ({self.remark})" if self.remark else "")
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """One model's quality on the rows of a decision, and what its training cost."""

    auc: float
    log_loss: float
    calibration_ratio: float
    usd_per_million_samples: float | None
    """Billed; None where it is not known."""

    planned_usd_per_million_samples: float | None = None
    """By the plan of its run; None in decisions that were written before it was kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionGates:
    """Bounds that a challenger must keep, each against the champion on the same rows, which neither has seen."""

    min_auc_gain: float = -0.001
    """The lower end of the AUC difference's interval must not be below it. The margin is the smallest difference that
    is held to matter among click models (Song et al., AutoInt, CIKM 2019, section 5.1, with earlier sources)."""

    max_log_loss_increase: float = 0.001
    """Nats per row; the upper end of the log-loss difference's interval must not be above it. Margin as for AUC."""

    max_calibration_increase: float = 0.1
    """How much farther from 1 than the champion's the ratio of predicted to observed clicks may be. Bids are made of
    probabilities, and AUC does not see whether all of them are too high."""

    max_cost_ratio: float = 1.5
    """Planned cost over the champion's above which a challenger must have a proven gain: an AUC interval above 0. So
    prices that have risen for good do not keep an old champion for ever, and an expensive model does not replace a
    cheap equal."""

    min_positives: int = 30
    """Clicks, and rows without a click, below which nothing is decided: the intervals are normal approximations."""

    promotion_confidence: float = 0.95
    """Confidence of the two-sided intervals, in (0, 1)."""

    def against_champion(
        self,
        auc: Estimate,
        log_loss: Estimate,
        *,
        challenger: ModelFigures,
        champion: ModelFigures,
        knows_newer_day: bool,
    ) -> tuple[GateVerdict, ...]:
        """Return the verdicts of the gates against a champion.

        Args:
            auc: AUC of the challenger less that of the champion, on the same rows; log-loss alike.
            knows_newer_day: The challenger was trained on a later day than the champion; otherwise, also where the
                data has no days, it must be proven better.
        """
        interval = f"{self.promotion_confidence:.0%} interval"
        auc_remark = f"difference {auc.value:+.5f}, {interval} to {auc.high:+.5f}"
        auc_rule, auc_bound = "at least", self.min_auc_gain
        if not knows_newer_day:
            auc_remark += "; it knows no newer day than the champion, so it must be proven better"
            auc_rule, auc_bound = "above", max(self.min_auc_gain, 0.0)
        errors = [abs(figures.calibration_ratio - 1.0) for figures in (challenger, champion)]
        calibration_remark = (
            f"predicted over observed clicks {challenger.calibration_ratio:.4f}, "
            f"the champion's {champion.calibration_ratio:.4f}"
        )
        return (
            GateVerdict.of(AUC_GATE, auc.low, auc_rule, auc_bound, auc_remark),
            GateVerdict.of(
                LOG_LOSS_GATE,
                log_loss.high,
                "at most",
                self.max_log_loss_increase,
                self._in_words(log_loss),
            ),
            GateVerdict.of(
                CALIBRATION_GATE,
                errors[0],
                "at most",
                errors[1] + self.max_calibration_increase,
                calibration_remark,
            ),
            self._of_cost(challenger, champion, has_gain=auc.low > 0.0),
        )

    def against_mean_rate(self, difference: Estimate) -> GateVerdict:
        """Return the verdict on a first champion: it must be better than the mean click rate of the rows."""
        name = "log-loss against the mean click rate, upper end"
        return GateVerdict.of(name, difference.high, "below", 0.0, self._in_words(difference))

    def against_baseline(self, difference: Estimate | str) -> GateVerdict:
        """Return whether a first champion is no worse than a logistic regression: missed where it is proven worse.

        A model that is worse on these rows, though that is not proven, passes with that as the remark: where rows
        are few, there would otherwise be no champion from which the next day could go on.

        Args:
            difference: AUC of the challenger less that of the logistic regression, or why there is none.
        """
        if isinstance(difference, str):
            return GateVerdict(
                name=BASELINE_GATE, value=None, bound=0.0, rule="at least", is_met=False, remark=difference
            )
        remark = self._in_words(difference)
        if difference.value < 0.0 <= difference.high:
            remark += ", below it but not proven so"
        return GateVerdict.of(BASELINE_GATE, difference.high, "at least", 0.0, remark)

    def of_rows(self, *, num_rows: int, num_clicks: int) -> GateVerdict:
        """Return whether there are rows enough to decide by."""
        rarer = float(min(num_clicks, num_rows - num_clicks))
        remark = f"{num_clicks:,} clicks in {num_rows:,} rows"
        least = float(self.min_positives)
        return GateVerdict.of("clicks, or rows without one", rarer, "at least", least, remark)

    def _of_cost(self, challenger: ModelFigures, champion: ModelFigures, *, has_gain: bool) -> GateVerdict:
        ours, theirs, kind = _compared_costs(challenger, champion)
        ratio = _cost_ratio(ours, theirs)
        is_cheap = ratio is not None and ratio <= self.max_cost_ratio
        remark = (
            "a cost is not known" if ours is None or theirs is None else f"{kind} {ours:.4g} USD per million"
        )
        if not is_cheap and has_gain:
            remark += "; the gain in AUC is proven, which may cost more"
        return GateVerdict(
            name=COST_GATE,
            value=ratio,
            bound=self.max_cost_ratio,
            rule="at most",
            is_met=is_cheap or has_gain,
            remark=remark,
        )

    def _in_words(self, difference: Estimate) -> str:
        interval = f"{self.promotion_confidence:.0%} interval"
        return f"difference {difference.value:+.5f}, {interval} from {difference.low:+.5f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionDecision(JsonDocument):
    """Whether a version becomes champion, and why."""

    json_form = JsonForm(what="decision", version=1)

    version: str
    run_id: str
    champion_version: str | None
    """Version that it was judged against; None where there was none."""

    is_promoted: bool
    why: str
    """One sentence."""

    gates: tuple[GateVerdict, ...]
    decided_at: str
    """ISO 8601, UTC."""

    confidence: float
    num_rows: int
    num_clicks: int
    challenger: ModelFigures | None
    """None where it was not judged by its predictions."""

    champion: ModelFigures | None
    auc_difference: Estimate | None
    """The challenger's less the champion's; None where there was none to compare with."""

    log_loss_difference: Estimate | None
    """The challenger's less the champion's, or less that of the rows' mean click rate where there was none."""

    @property
    def passed_beside_champion(self) -> bool:
        """It passed all gates, and is not champion only because the champion knows later days."""
        return not self.is_promoted and bool(self.gates) and all(gate.is_met for gate in self.gates)

    @property
    def missed_comparison_alone(self) -> bool:
        """The model is sound; only the champion or the logistic regression kept it out."""
        missed = {gate.name for gate in self.gates if not gate.is_met}
        return bool(missed) and missed <= COMPARISON_GATES

    def metrics(self) -> dict[str, float | None]:
        """Return the figures under their stable names; None for the champion's where there was none.

        Few, since each name makes MLflow's table slower; the whole decision is in `promotion.json`.
        """
        auc, champion = self.auc_difference, self.champion
        return {
            "promotion/auc_difference": auc.value if auc else None,
            "promotion/auc_difference_low": auc.low if auc else None,
            "promotion/auc_difference_high": auc.high if auc else None,
            "promotion/log_loss_difference": self.log_loss_difference.value
            if champion and self.log_loss_difference
            else None,
            "champion/auc": champion.auc if champion else None,
            "champion/log_loss": champion.log_loss if champion else None,
        }


def _compared_costs(
    challenger: ModelFigures, champion: ModelFigures
) -> tuple[float | None, float | None, str]:
    """Return the costs of a million samples that are compared, the challenger's first, and their kind.

    Planned costs are those of the machines that each model asks for. A bill holds besides how busy the machine of a
    dry run was, or how often spot machines were lost: the same model trained again was billed 1.87 times as much.
    Bills are compared only where a plan's cost is not known of both.
    """
    ours, theirs = challenger.planned_usd_per_million_samples, champion.planned_usd_per_million_samples
    if ours is not None and theirs is not None:
        return ours, theirs, "planned"
    return challenger.usd_per_million_samples, champion.usd_per_million_samples, "billed"


def _cost_ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return one cost over another; None where one is not known, or only the other is nothing."""
    if ours is None or theirs is None:
        return None
    if theirs == 0.0:
        return 1.0 if ours == 0.0 else None
    return ours / theirs
