"""After a night: its model against the champion, on rows that neither was trained on, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from heterps_core.data.dataset import PreparedDataset
from infra.workspace import Workspace
from tasks.champion import PromotionDecision, PromotionGates, apply_decision, champion_of, judge_challenger
from tasks.model_registry import DataKind, find_version, verified_folder


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
) -> PromotionDecision | NotJudged:
    """Let a new model become champion where it passes the gates; return the decision.

    A model is not judged where the champion has been trained on a later day, as in a back-fill: it has seen the rows,
    and a model of yesterday shall not take its place. Nor is one of made-up rows where the champion is of real ones,
    or one of rows without days where the champion is of days: a trial shall not end what serves.

    Args:
        workspace: Where models are registered.
        run_id: That trained the model.
        version: Of the model.
        day: That it was trained on; None where the data has no days.
        dataset: Whose held-out rows decide.
        usd_per_million_samples: What the training cost; None where nobody knows.
        gates: What the model must show.

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
    if champion is not None and champion.day is not None and day is not None and champion.day > day:
        return NotJudged("the champion has been trained on later days")
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
    )
    apply_decision(workspace, decision)
    return decision
