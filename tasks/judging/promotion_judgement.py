"""Judges a challenger on labelled rows that neither model has seen: predictions, figures, gates, and one sentence."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heterps_core.data.dataset import PreparedDataset
from heterps_core.errors import CheckpointError, ConfigurationError
from heterps_core.judging.quality import (
    PairedComparison,
    auc_difference,
    calibration_ratio,
    constant_logits,
    measure_quality,
)
from heterps_core.training.storage.exported_files import exported_sha256
from infra.workspace import Workspace
from tasks.judging.promotion_gates import (
    MARGIN_GATES,
    GateVerdict,
    ModelFigures,
    PromotionDecision,
    PromotionGates,
    gate_against_baseline,
    gate_against_mean_rate,
    gate_of_rows,
    gates_against_champion,
    known_usd,
)
from tasks.records.model_registry import RegisteredVersion, find_version

if TYPE_CHECKING:
    from tasks.records.champion import Champion

DECISION_TAG = "heterps.decision"

_SHOWN_DIGITS = 12
"""Of a hash."""

Logits = npt.NDArray[np.float64]

logger = logging.getLogger(__name__)


def judge_challenger(
    workspace: Workspace,
    *,
    run_id: str,
    version: str,
    eval_dataset: PreparedDataset,
    challenger_folder: Path,
    champion: Champion | None,
    challenger_usd_per_million_samples: float,
    gates: PromotionGates,
    baseline_logits: Logits | str,
    stays_champion: str | None = None,
) -> PromotionDecision:
    """Decide whether a version should become champion; nothing is changed yet, `apply_decision` does that.

    Both models predict the same rows: those that the data set holds out, or all of it where it holds out none. The
    champion may have other table sizes or another numeric transform: the rows are then read from their sources as it
    reads them. Without a champion, the challenger must be better than the mean click rate of these rows, and not
    proven worse than the logistic regression. A champion whose predictions are not finite counts as none, and so does
    one of a lesser kind of data.

    Args:
        champion: To judge against: the one of now, or of the day that is back-filled; None where there is none.
        challenger_usd_per_million_samples: What its training cost; not finite where nobody knows.
        baseline_logits: [N] of the logistic regression on the same rows, or why there are none.
        stays_champion: Version that stays champion whatever the gates find, since it knows later days.

    Returns:
        The decision; the one of before where the version is champion already.

    Raises:
        UnknownNameError: There is no such version.
        ConfigurationError: The challenger has other columns than the rows.
        DataError: A source that must be read again is gone or has changed.
    """
    registered = find_version(workspace, version)
    earlier = decision_of(registered)
    if earlier is not None and champion is not None and champion.version == version:
        return earlier
    case = _Case(registered, run_id, champion, eval_dataset, gates, stays_champion)
    usd = known_usd(challenger_usd_per_million_samples)
    verdicts = [
        _gate_of_files(registered, challenger_folder),
        gate_of_rows(gates, num_rows=len(case.labels), num_clicks=case.num_clicks),
    ]
    if not all(verdict.is_met for verdict in verdicts):
        return case.decision(verdicts)
    challenger_logits = case.logits_of(challenger_folder)
    verdicts.append(_gate_of_finite(challenger_logits))
    if not verdicts[-1].is_met:
        return case.decision(verdicts)
    challenger = case.figures(challenger_logits, usd)

    champion_logits = None
    if champion is not None and champion.data_kind < registered.data_kind:
        case.champion_counts_as_none = "which was trained on other data"
    elif champion is not None:
        try:
            champion_logits = case.logits_of(champion.folder)
        except ConfigurationError as error:
            verdicts.append(_gate_of_columns(champion, error))
            return case.decision(verdicts, challenger=challenger)
        if not np.isfinite(champion_logits).all():
            logger.warning("the champion, version %s, predicts what is not finite", champion.version)
            case.champion_counts_as_none = "whose predictions are not finite"
            champion_logits = None
    if champion is None or champion_logits is None:
        comparison = case.compare(challenger_logits, constant_logits(case.labels))
        verdicts.append(
            gate_against_mean_rate(comparison.log_loss_difference, confidence=gates.promotion_confidence)
        )
        against_baseline = (
            baseline_logits
            if isinstance(baseline_logits, str)
            else auc_difference(
                case.labels, challenger_logits, baseline_logits, confidence=gates.promotion_confidence
            )
        )
        verdicts.append(gate_against_baseline(against_baseline, confidence=gates.promotion_confidence))
        return case.decision(verdicts, challenger=challenger, comparison=comparison)
    kept = decision_of(find_version(workspace, champion.version))
    champion_usd = kept.challenger.usd_per_million_samples if kept and kept.challenger else None
    champion_figures = case.figures(champion_logits, champion_usd)
    comparison = case.compare(challenger_logits, champion_logits)
    verdicts += gates_against_champion(
        gates,
        comparison,
        challenger=challenger,
        champion=champion_figures,
        knows_newer_day=(registered.day or "") > (champion.day or ""),
    )
    return case.decision(verdicts, challenger=challenger, champion=champion_figures, comparison=comparison)


def decision_of(registered: RegisteredVersion) -> PromotionDecision | None:
    """Return the decision that was written down for a version, or None."""
    text = registered.tags.get(DECISION_TAG)
    return None if text is None else PromotionDecision.from_json(json.loads(text))


class _Case:
    """What stays the same while one challenger is judged; see `judge_challenger`."""

    def __init__(
        self,
        registered: RegisteredVersion,
        run_id: str,
        champion: Champion | None,
        dataset: PreparedDataset,
        gates: PromotionGates,
        stays_champion: str | None,
    ) -> None:
        from heterps_core.serving.exported_model import held_out_labels

        self._registered, self._run_id = registered, run_id
        self._champion_version = None if champion is None else champion.version
        self._dataset, self._gates = dataset, gates
        self._stays_champion = stays_champion
        self.champion_counts_as_none = ""
        """Why, for people; empty where it counts, or there is none."""
        self.labels = held_out_labels(dataset)
        self.num_clicks = int(self.labels.sum(dtype=np.int64))

    def logits_of(self, folder: Path) -> Logits:
        """Return a model's logits of the rows."""
        from heterps_core.serving.exported_model import ClickPredictor, held_out_logits

        return held_out_logits(ClickPredictor(folder), self._dataset)

    def figures(self, logits: Logits, usd_per_million_samples: float | None) -> ModelFigures:
        """Return a model's figures on rows with clicks and others."""
        quality, calibration = measure_quality(self.labels, logits), calibration_ratio(self.labels, logits)
        assert quality.auc is not None
        assert calibration is not None
        return ModelFigures(
            auc=quality.auc,
            log_loss=quality.log_loss,
            calibration_ratio=calibration,
            usd_per_million_samples=usd_per_million_samples,
        )

    def compare(self, challenger: Logits, champion: Logits) -> PairedComparison:
        """Return differences with intervals of the gates' confidence."""
        confidence = self._gates.promotion_confidence
        return PairedComparison.of(self.labels, challenger, champion, confidence=confidence)

    def decision(
        self,
        verdicts: Sequence[GateVerdict],
        *,
        challenger: ModelFigures | None = None,
        champion: ModelFigures | None = None,
        comparison: PairedComparison | None = None,
    ) -> PromotionDecision:
        """Return the decision that the verdicts give."""
        return PromotionDecision(
            version=self._registered.version,
            run_id=self._run_id,
            champion_version=self._champion_version,
            is_promoted=self._stays_champion is None and all(verdict.is_met for verdict in verdicts),
            why=self._why(verdicts, champion, comparison),
            gates=tuple(verdicts),
            decided_at=datetime.now(UTC).isoformat(timespec="seconds"),
            confidence=self._gates.promotion_confidence,
            num_rows=len(self.labels),
            num_clicks=self.num_clicks,
            challenger=challenger,
            champion=champion,
            auc_difference=comparison.auc_difference if comparison and champion else None,
            log_loss_difference=comparison.log_loss_difference if comparison else None,
        )

    def _why(
        self,
        verdicts: Sequence[GateVerdict],
        champion: ModelFigures | None,
        comparison: PairedComparison | None,
    ) -> str:
        version, before = self._registered.version, self._champion_version
        missed = [str(verdict) for verdict in verdicts if not verdict.is_met]
        stays = self._stays_champion or before
        if missed:
            kept = "there is still no champion" if stays is None else f"version {stays} stays champion"
            undecided = (
                "; more rows might tell them apart"
                if champion is not None and comparison is not None and _is_undecided(verdicts, comparison)
                else ""
            )
            return f"{kept}, as of version {version} the {'; the '.join(missed)}{undecided}"
        assert comparison is not None
        log_loss = comparison.log_loss_difference.value
        rows = f"on {len(self.labels):,} rows that it has not seen"
        if champion is None:
            if self._stays_champion is not None:
                place = f"passed its gates, {self._beside}"
            elif before is None:
                place = "is the first champion"
            else:
                place = f"follows version {before}, {self.champion_counts_as_none}, as champion"
            return (
                f"version {version} {place}: {rows} its log-loss is {-log_loss:.4f} below that of a constant; AUC "
                f"beside the logistic regression's: {verdicts[-1].remark}"
            )
        auc = comparison.auc_difference
        place = (
            f"follows version {before} as champion"
            if self._stays_champion is None
            else f"passed its gates against version {before}, {self._beside}"
        )
        return (
            f"version {version} {place}: {rows} its AUC differs by {auc.value:+.4f} "
            f"({auc.low:+.4f} to {auc.high:+.4f}) and its log-loss by {log_loss:+.4f}"
        )

    @property
    def _beside(self) -> str:
        return f"while version {self._stays_champion}, which knows later days, stays champion"


def _is_undecided(verdicts: Sequence[GateVerdict], comparison: PairedComparison) -> bool:
    """Tell whether all that was missed is a margin, by models that may be equally good for all that the rows say."""
    auc, log_loss = comparison.auc_difference, comparison.log_loss_difference
    only_margins = all(verdict.is_met or verdict.name in MARGIN_GATES for verdict in verdicts)
    return only_margins and auc.high > 0.0 and log_loss.low <= 0.0


def _gate_of_files(registered: RegisteredVersion, folder: Path) -> GateVerdict:
    remark = ""
    try:
        found = exported_sha256(folder)
    except CheckpointError as error:
        found, remark = "none", str(error)
    return GateVerdict(
        name="SHA-256 of the files",
        value=found[:_SHOWN_DIGITS],
        bound=registered.sha256[:_SHOWN_DIGITS],
        rule="equal to",
        is_met=found == registered.sha256,
        remark=remark,
    )


def _gate_of_finite(logits: npt.NDArray[Any]) -> GateVerdict:
    num_bad = len(logits) - int(np.isfinite(logits).sum())
    return GateVerdict(
        name="predictions that are not finite",
        value=float(num_bad),
        bound=0.0,
        rule="at most",
        is_met=num_bad == 0,
    )


def _gate_of_columns(champion: Champion, error: ConfigurationError) -> GateVerdict:
    return GateVerdict(
        name="columns of the rows",
        value="others",
        bound=f"those of version {champion.version}",
        rule="equal to",
        is_met=False,
        remark=f"{error}; to begin again, remove the alias champion in MLflow",
    )
