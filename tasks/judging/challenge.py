"""Judging a new model: which gates it passes beside the champion, on rows that neither was trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.proposal.column_checks import leaks_of
from heterps_core.data.schema import DataSchema
from heterps_core.errors import DataError
from heterps_core.judging.held_out import HeldOutJudgement, ModelQuality
from heterps_core.judging.intervals import Estimate
from heterps_core.training.storage.exported_files import read_description
from infra.workspace import Workspace
from tasks.judging.baseline import Baseline
from tasks.judging.predicting_here import CannotPredictError, against_baseline, judge_here
from tasks.judging.promotion_gates import (
    BASELINE_GATE,
    MARGIN_GATES,
    GateVerdict,
    ModelFigures,
    PromotionDecision,
    PromotionGates,
)
from tasks.records.champion import Champion, decision_of
from tasks.records.model_registry import RegisteredVersion, find_version

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenger:
    """A registered version that may become champion, with its gates and its known figures."""

    version: str
    gates: PromotionGates
    usd_per_million_samples: float | None
    """Billed for its training; None where that is not known."""

    planned_usd_per_million_samples: float | None
    """By its plan, which is compared with the champion's."""

    baseline: Baseline | str | None
    """A logistic regression on a sample of the same rows, or why there is none; None where none was asked for."""

    judgement: HeldOutJudgement | None = None
    """Found by the workers that trained the model, beside version `judged_beside`."""

    judged_beside: str | None = None


def judge_challenger(
    workspace: Workspace,
    challenger: Challenger,
    dataset: PreparedDataset,
    *,
    folder: Path,
    champion: Champion | None,
    stays_champion: str | None = None,
) -> PromotionDecision:
    """Decide whether a version should become champion; nothing is changed yet, `apply_decision` does that.

    Both models predict the same rows: those that the data set holds out, or all of it where it holds out none. Each
    reads its own columns, with its own table sizes and numeric transform. Without a champion, the challenger must be
    better than the mean click rate of these rows, and not proven worse than the logistic regression. A champion that
    cannot predict these rows counts as none, since they lack its columns, its code is gone or its predictions are not
    finite, and so does one of a lesser kind of data.

    Args:
        folder: Its exported model, whose files were checked.
        champion: To judge against: the one of now, or of the day that is back-filled; None where there is none.
        stays_champion: Version that stays champion whatever the gates find, since it knows later days.

    Returns:
        The decision; the one of before where the version is champion already.

    Raises:
        UnknownNameError: There is no such version.
        ConfigurationError: The challenger's code cannot be imported, or has other layers than were exported.
        DataError: A source that must be read again is gone or has changed.
    """
    registered = find_version(workspace, challenger.version)
    earlier = decision_of(registered)
    if earlier is not None and champion is not None and champion.version == challenger.version:
        return earlier
    case = _Case(challenger, registered, champion, stays_champion, dataset, folder)
    case.judge()
    if case.passes:
        case.compare()
    return case.decision()


def _figures(quality: ModelQuality | None, paid: Challenger | ModelFigures | None) -> ModelFigures:
    """Return a model's figures on rows with clicks and others, with the known cost of its training."""
    assert quality is not None
    assert quality.auc is not None
    assert quality.calibration_ratio is not None
    return ModelFigures(
        auc=quality.auc,
        log_loss=quality.log_loss,
        calibration_ratio=quality.calibration_ratio,
        usd_per_million_samples=paid.usd_per_million_samples if paid else None,
        planned_usd_per_million_samples=paid.planned_usd_per_million_samples if paid else None,
    )


@dataclass
class _Case:
    """The state of judging one challenger; see `judge_challenger`."""

    challenger: Challenger
    registered: RegisteredVersion
    champion: Champion | None
    stays_champion: str | None
    dataset: PreparedDataset
    folder: Path
    verdicts: list[GateVerdict] = field(default_factory=list)
    opponent: Champion | None = None
    """The champion, unless it counts as none."""

    judgement: HeldOutJudgement | None = None
    leaks: str = ""
    """A remark on columns that alone tell the label; empty where none does."""

    champion_counts_as_none: str = ""
    """Why, for people; empty where it counts, or there is none."""

    columns_not_named: tuple[str, ...] = ()
    """Columns that the champion reads, but the schema does not name any more."""

    figures: ModelFigures | None = None
    champion_figures: ModelFigures | None = None
    auc_difference: Estimate | None = None
    log_loss_difference: Estimate | None = None

    @property
    def champion_version(self) -> str | None:
        """Version of the champion that the challenger is judged against."""
        return None if self.champion is None else self.champion.version

    @property
    def passes(self) -> bool:
        """All gates so far are met."""
        return all(verdict.is_met for verdict in self.verdicts)

    def judge(self) -> None:
        """Let the models predict, unless the workers have done so, and add the gates of a sound model."""
        judgement, self.opponent = self.challenger.judgement, self.champion
        if self.champion is not None and self.champion.data_kind < self.registered.data_kind:
            self._count_as_none("which was trained on other data")
        beside = self.challenger.judged_beside
        if judgement is None or (self.opponent is not None and self.opponent.version != beside):
            try:
                judgement = judge_here(self.dataset, self.folder, self.opponent)
            except CannotPredictError as error:
                self._count_as_none(f"which cannot predict these rows ({error})")
                judgement = judgement or judge_here(self.dataset, self.folder, None)
        self.judgement = judgement
        try:
            self.leaks = "; ".join(leaks_of(self.dataset))
        except DataError as problem:
            logger.warning("columns were not checked for leaks of the label: %s", problem)
        num_bad = float(judgement.num_not_finite)
        self.verdicts += [
            self.challenger.gates.of_rows(num_rows=judgement.num_rows, num_clicks=judgement.num_clicks),
            GateVerdict.of("predictions that are not finite", num_bad, "at most", 0.0),
        ]
        if self.opponent is not None and judgement.other_not_finite:
            logger.warning("the champion, version %s, predicts what is not finite", self.opponent.version)
            self._count_as_none("whose predictions are not finite")

    def compare(self) -> None:
        """Add the gates beside the opponent, or those of a model without one."""
        judgement, gates = self.judgement, self.challenger.gates
        confidence = gates.promotion_confidence
        assert judgement is not None
        self.figures = _figures(judgement.quality, self.challenger)
        if self.opponent is None:
            assert judgement.log_loss_above_mean_rate is not None
            self.log_loss_difference = judgement.log_loss_above_mean_rate.interval(confidence=confidence)
            self.verdicts.append(gates.against_mean_rate(self.log_loss_difference))
            if (baseline := self.challenger.baseline) is not None:
                difference = against_baseline(self.dataset, self.folder, baseline, confidence=confidence)
                self.verdicts.append(gates.against_baseline(difference))
            return
        assert judgement.auc_difference is not None
        assert judgement.log_loss_difference is not None
        own = DataSchema.from_json(read_description(self.opponent.folder)["schema"])
        named = self.dataset.manifest.schema.used_columns
        read = (*own.numeric_columns, *own.text_columns)
        self.columns_not_named = tuple(name for name in read if name not in named)
        kept = decision_of(self.opponent)
        self.champion_figures = _figures(judgement.other, kept.challenger if kept else None)
        self.auc_difference = judgement.auc_difference.interval(confidence=confidence)
        self.log_loss_difference = judgement.log_loss_difference.interval(confidence=confidence)
        self.verdicts += gates.against_champion(
            self.auc_difference,
            self.log_loss_difference,
            challenger=self.figures,
            champion=self.champion_figures,
            knows_newer_day=(self.registered.day or "") > (self.opponent.day or ""),
        )

    def decision(self) -> PromotionDecision:
        """Return the decision that the verdicts give."""
        judgement = self.judgement
        return PromotionDecision(
            version=self.registered.version,
            run_id=self.registered.run_id,
            champion_version=self.champion_version,
            is_promoted=self.stays_champion is None and self.passes,
            why=self._why() + (f"; but {self.leaks}: was it filled after the click?" if self.leaks else ""),
            gates=tuple(self.verdicts),
            decided_at=datetime.now(UTC).isoformat(timespec="seconds"),
            confidence=self.challenger.gates.promotion_confidence,
            num_rows=0 if judgement is None else judgement.num_rows,
            num_clicks=0 if judgement is None else judgement.num_clicks,
            challenger=self.figures,
            champion=self.champion_figures,
            auc_difference=self.auc_difference,
            log_loss_difference=self.log_loss_difference,
        )

    def _count_as_none(self, why: str) -> None:
        self.opponent, self.champion_counts_as_none = None, why

    def _why(self) -> str:
        missed = [verdict for verdict in self.verdicts if not verdict.is_met]
        return self._why_kept_out(missed) if missed else self._why_passed()

    def _why_kept_out(self, missed: Sequence[GateVerdict]) -> str:
        auc, log_loss = self.auc_difference, self.log_loss_difference
        stays = self.stays_champion or self.champion_version
        kept = "there is still no champion" if stays is None else f"version {stays} stays champion"
        why = f"{kept}, as of version {self.registered.version} the {'; the '.join(map(str, missed))}"
        if self.columns_not_named:
            why += (
                f"; the champion reads {', '.join(self.columns_not_named)}, which the schema does not name: if "
                f"it shall not, heterps rollback ends its service (--to none where it was the first champion)"
            )
        if auc is None or log_loss is None or any(each.name not in MARGIN_GATES for each in missed):
            return why
        # By these rows both models may be equally good.
        is_undecided = auc.high > 0.0 and log_loss.low <= 0.0
        return f"{why}; more rows might tell them apart" if is_undecided else why

    def _why_passed(self) -> str:
        auc, log_loss, last = self.auc_difference, self.log_loss_difference, self.verdicts[-1]
        before, judgement = self.champion_version, self.judgement
        assert judgement is not None
        assert log_loss is not None
        rows = f"on {judgement.num_rows:,} rows that it has not seen"
        beside = f"while version {self.stays_champion}, which knows later days, stays champion"
        if self.stays_champion is not None:
            against = "" if auc is None else f" against version {before}"
            place = f"passed its gates{against}, {beside}"
        elif before is None:
            place = "is the first champion"
        elif auc is None:
            place = f"follows version {before}, {self.champion_counts_as_none}, as champion"
        else:
            place = f"follows version {before} as champion"
        why = f"version {self.registered.version} {place}: {rows} its"
        if auc is not None:
            return (
                f"{why} AUC differs by {auc.value:+.4f} ({auc.low:+.4f} to {auc.high:+.4f}) and its log-loss by "
                f"{log_loss.value:+.4f}"
            )
        why += f" log-loss is {-log_loss.value:.4f} below that of a constant"
        if last.name != BASELINE_GATE:
            return why
        return f"{why}; AUC beside the logistic regression's: {last.remark}"
