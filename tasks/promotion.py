"""After a night: its model against the champion, on rows that neither was trained on, and what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from prefect import task
from prefect.cache_policies import NO_CACHE

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
from tasks.judging.baseline import Baseline
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
)
from tasks.records.champion import Champion, apply_decision, champion_of, decision_of, opponent_of
from tasks.records.model_registry import DataKind, RegisteredVersion, find_version, verified_folder

SHOWN_DIGITS = 12
"""Of a hash."""

Logits = npt.NDArray[np.float64]

logger = logging.getLogger(__name__)


@task(name="judge challenger", cache_policy=NO_CACHE)
def promote_if_better(
    workspace: Workspace,
    *,
    run_id: str,
    version: str,
    day: str | None,
    dataset: PreparedDataset,
    usd_per_million_samples: float | None,
    gates: PromotionGates,
    baseline: Baseline | str,
) -> PromotionDecision | str:
    """Let a new model become champion where it passes the gates; return the decision, or why it is not judged.

    Where the champion has been trained on a later day, as in a back-fill, it has seen the rows: the model is judged
    against the newest champion that had not, see `opponent_of`. Its decision is written down, and a later day that is
    back-filled goes on from it where it passed, but the champion stays: it knows days that this model does not.

    A model of synthetic rows is not judged where the champion is of real ones, nor one of rows without days where the
    champion is of days: a trial shall not end what serves.

    Args:
        day: That it was trained on; None where the data has no days.
        usd_per_million_samples: What its training cost; None where that is not known.
        baseline: On the same rows, or why there is none.

    Raises:
        CheckpointError: Files of a model are not those that were registered.
        ConfigurationError: The registry does not answer, or another model became champion meanwhile.
    """
    champion = champion_of(workspace)
    registered = find_version(workspace, version)
    if champion is not None and champion.data_kind > registered.data_kind:
        of = {DataKind.FILES: "given data", DataKind.DAYS: "days"}[champion.data_kind]
        return f"the champion, version {champion.version}, has been trained on {of}, and this is not"
    stays_champion = None
    if champion is not None and champion.day is not None and day is not None and champion.day > day:
        stays_champion, champion = champion.version, opponent_of(workspace, registered)
    decision = judge_challenger(
        workspace,
        run_id=run_id,
        version=version,
        dataset=dataset,
        folder=verified_folder(workspace, registered),
        champion=champion,
        usd_per_million_samples=usd_per_million_samples,
        gates=gates,
        baseline_logits=baseline.logits if isinstance(baseline, Baseline) else f"there is none: {baseline}",
        stays_champion=stays_champion,
    )
    apply_decision(workspace, decision)
    return decision


def judge_challenger(
    workspace: Workspace,
    *,
    run_id: str,
    version: str,
    dataset: PreparedDataset,
    folder: Path,
    champion: Champion | None,
    usd_per_million_samples: float | None,
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
        folder: Its exported model.
        champion: To judge against: the one of now, or of the day that is back-filled; None where there is none.
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
    case = _Case(registered, run_id, champion, dataset, gates, stays_champion)
    verdicts = [
        _gate_of_files(registered, folder),
        gate_of_rows(gates, num_rows=len(case.labels), num_clicks=case.num_clicks),
    ]
    if not all(verdict.is_met for verdict in verdicts):
        return case.decision(verdicts)
    logits = case.logits_of(folder)
    num_bad = float(np.count_nonzero(~np.isfinite(logits)))
    verdicts.append(GateVerdict.of("predictions that are not finite", num_bad, "at most", 0.0))
    if not verdicts[-1].is_met:
        return case.decision(verdicts)
    challenger = case.figures(logits, usd_per_million_samples)

    champion_logits = None
    if champion is not None and champion.data_kind < registered.data_kind:
        case.champion_counts_as_none = "which was trained on other data"
    elif champion is not None:
        try:
            champion_logits = case.logits_of(champion.folder)
        except ConfigurationError as error:
            remark = f"{error}; to begin again, remove the alias champion in MLflow"
            bound = f"those of version {champion.version}"
            verdicts.append(GateVerdict.of("columns of the rows", "others", "equal to", bound, remark))
            return case.decision(verdicts, challenger=challenger)
        if not np.isfinite(champion_logits).all():
            logger.warning("the champion, version %s, predicts what is not finite", champion.version)
            case.champion_counts_as_none = "whose predictions are not finite"
            champion_logits = None
    confidence = gates.promotion_confidence
    if champion is None or champion_logits is None:
        comparison = case.compare(logits, constant_logits(case.labels))
        verdicts.append(gate_against_mean_rate(comparison.log_loss_difference, confidence=confidence))
        against_baseline = (
            baseline_logits
            if isinstance(baseline_logits, str)
            else auc_difference(case.labels, logits, baseline_logits, confidence=confidence)
        )
        verdicts.append(gate_against_baseline(against_baseline, confidence=confidence))
        return case.decision(verdicts, challenger=challenger, comparison=comparison)
    kept = decision_of(find_version(workspace, champion.version))
    champion_usd = kept.challenger.usd_per_million_samples if kept and kept.challenger else None
    champion_figures = case.figures(champion_logits, champion_usd)
    comparison = case.compare(logits, champion_logits)
    verdicts += gates_against_champion(
        gates,
        comparison,
        challenger=challenger,
        champion=champion_figures,
        knows_newer_day=(registered.day or "") > (champion.day or ""),
    )
    return case.decision(verdicts, challenger=challenger, champion=champion_figures, comparison=comparison)


@dataclass
class _Case:
    """What stays the same while one challenger is judged; see `judge_challenger`."""

    registered: RegisteredVersion
    run_id: str
    champion: Champion | None
    dataset: PreparedDataset
    gates: PromotionGates
    stays_champion: str | None
    champion_counts_as_none: str = ""
    """Why, for people; empty where it counts, or there is none."""

    @cached_property
    def labels(self) -> npt.NDArray[np.uint8]:
        """[N] of the rows."""
        from heterps_core.serving.exported_model import held_out_labels

        return held_out_labels(self.dataset)

    @property
    def champion_version(self) -> str | None:
        """That it is judged against."""
        return None if self.champion is None else self.champion.version

    @property
    def num_clicks(self) -> int:
        """Of the rows."""
        return int(self.labels.sum(dtype=np.int64))

    def logits_of(self, folder: Path) -> Logits:
        """Return a model's logits of the rows."""
        from heterps_core.serving.exported_model import ClickPredictor, held_out_logits

        return held_out_logits(ClickPredictor(folder), self.dataset)

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
        return PairedComparison.of(
            self.labels, challenger, champion, confidence=self.gates.promotion_confidence
        )

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
            version=self.registered.version,
            run_id=self.run_id,
            champion_version=self.champion_version,
            is_promoted=self.stays_champion is None and all(verdict.is_met for verdict in verdicts),
            why=self._why(verdicts, champion, comparison),
            gates=tuple(verdicts),
            decided_at=datetime.now(UTC).isoformat(timespec="seconds"),
            confidence=self.gates.promotion_confidence,
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
        version, before = self.registered.version, self.champion_version
        missed = [verdict for verdict in verdicts if not verdict.is_met]
        if missed:
            stays = self.stays_champion or before
            kept = "there is still no champion" if stays is None else f"version {stays} stays champion"
            why = f"{kept}, as of version {version} the {'; the '.join(map(str, missed))}"
            if (
                champion is None
                or comparison is None
                or any(each.name not in MARGIN_GATES for each in missed)
            ):
                return why
            # For all that the rows say, both models may be equally good.
            is_undecided = comparison.auc_difference.high > 0.0 and comparison.log_loss_difference.low <= 0.0
            return f"{why}; more rows might tell them apart" if is_undecided else why
        assert comparison is not None
        log_loss = comparison.log_loss_difference.value
        rows = f"on {len(self.labels):,} rows that it has not seen"
        beside = f"while version {self.stays_champion}, which knows later days, stays champion"
        if champion is None:
            if self.stays_champion is not None:
                place = f"passed its gates, {beside}"
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
            if self.stays_champion is None
            else f"passed its gates against version {before}, {beside}"
        )
        return (
            f"version {version} {place}: {rows} its AUC differs by {auc.value:+.4f} "
            f"({auc.low:+.4f} to {auc.high:+.4f}) and its log-loss by {log_loss:+.4f}"
        )


def _gate_of_files(registered: RegisteredVersion, folder: Path) -> GateVerdict:
    remark = ""
    try:
        found = exported_sha256(folder)
    except CheckpointError as error:
        found, remark = "none", str(error)
    return GateVerdict(
        name="SHA-256 of the files",
        value=found[:SHOWN_DIGITS],
        bound=registered.sha256[:SHOWN_DIGITS],
        rule="equal to",
        is_met=found == registered.sha256,
        remark=remark,
    )
