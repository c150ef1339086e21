"""After a night: its model against the champion, on rows that neither was trained on, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.data.dataset import PreparedDataset
from infra.workspace import Workspace
from tasks.judging.baseline import Baseline, NoBaseline
from tasks.judging.promotion_gates import PromotionDecision, PromotionGates
from tasks.judging.promotion_judgement import judge_challenger
from tasks.records.champion import apply_decision, champion_of, opponent_of
from tasks.records.model_registry import DataKind, find_version, verified_folder


@dataclass(frozen=True, slots=True)
class NotJudged:
    """A model that may not take the champion's place, however good it is."""

    why: str


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
    baseline: Baseline | NoBaseline,
) -> PromotionDecision | NotJudged:
    """Let a new model become champion where it passes the gates; return the decision.

    Where the champion has been trained on a later day, as in a back-fill, it has seen the rows: the model is judged
    against the newest champion that had not, see `opponent_of`. Its decision is written down, and a later day that is
    back-filled goes on from it where it passed, but the champion stays: it knows days that this model does not.

    A model of synthetic rows is not judged where the champion is of real ones, nor one of rows without days where the
    champion is of days: a trial shall not end what serves.

    Args:
        day: That it was trained on; None where the data has no days.

    Raises:
        CheckpointError: Files of a model are not those that were registered.
        ConfigurationError: The registry does not answer, or another model became champion meanwhile.
    """
    champion = champion_of(workspace)
    registered = find_version(workspace, version)
    if champion is not None and champion.data_kind > registered.data_kind:
        of = {DataKind.FILES: "given data", DataKind.DAYS: "days"}[champion.data_kind]
        return NotJudged(
            f"the champion, version {champion.version}, has been trained on {of}, and this is not"
        )
    stays_champion = None
    if champion is not None and champion.day is not None and day is not None and champion.day > day:
        stays_champion, champion = champion.version, opponent_of(workspace, registered)
    folder = verified_folder(workspace, registered)
    decision = judge_challenger(
        workspace,
        run_id=run_id,
        version=version,
        eval_dataset=dataset,
        challenger_folder=folder,
        champion=champion,
        challenger_usd_per_million_samples=math.nan
        if usd_per_million_samples is None
        else usd_per_million_samples,
        gates=gates,
        baseline_logits=baseline.logits
        if isinstance(baseline, Baseline)
        else f"there is none: {baseline.why}",
        stays_champion=stays_champion,
    )
    apply_decision(workspace, decision)
    return decision
