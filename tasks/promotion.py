"""After a night: its model becomes champion where it passes the gates, also one of a back-filled day."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from heterps_core.data.dataset import PreparedDataset
from heterps_core.errors import DataError
from infra.workspace import Workspace
from tasks.judging.challenge import Challenger, judge_challenger
from tasks.judging.promotion_gates import PromotionDecision
from tasks.records.champion import apply_decision, champion_of, opponent_of
from tasks.records.model_registry import DataKind, find_version, verified_folder
from tasks.steps import step

_RowsAfter = Callable[[str], AbstractContextManager[PreparedDataset | None]]

logger = logging.getLogger(__name__)


@step("judge challenger")
def promote_if_better(
    workspace: Workspace,
    challenger: Challenger,
    dataset: PreparedDataset,
    *,
    rows_after: _RowsAfter | None = None,
) -> PromotionDecision | str:
    """Let a new model become champion where it passes the gates; return the decision, or why it is not judged.

    Where the champion has been trained on a later day, as in a back-fill, it has seen the rows: the model is judged
    against the newest champion that had not, see `opponent_of`. Its decision is written down, and a later day that is
    back-filled goes on from it where it passed. It is judged a second time then, beside the champion on the rows of
    the day after the champion's, and follows where it is proven better on them; otherwise the champion stays, as it
    knows days that this model does not.

    A model of synthetic rows is not judged where the champion is of real ones, nor one of rows without days where the
    champion is of days: a trial shall not end what serves.

    Args:
        dataset: Its held-out rows judge. Where the workers judged beside another champion, both models predict here.
        rows_after: Gives the rows of the day after a day, or None where there are none; None does not look.

    Raises:
        CheckpointError: Files of a model are not those that were registered.
        ConfigurationError: The registry does not answer, or another model became champion meanwhile.
    """
    champion = champion_of(workspace)
    registered = find_version(workspace, challenger.version)
    if champion is not None and champion.data_kind > registered.data_kind:
        of = {DataKind.FILES: "given data", DataKind.DAYS: "days"}[champion.data_kind]
        return f"the champion, version {champion.version}, has been trained on {of}, and this is not"
    judge = partial(judge_challenger, workspace, folder=verified_folder(workspace, registered))
    day = registered.day
    if champion is None or champion.day is None or day is None or champion.day <= day:
        decision = judge(challenger, dataset, champion=champion)
    else:
        opponent = opponent_of(workspace, registered)
        decision = judge(challenger, dataset, champion=opponent, stays_champion=champion.version)
        if decision.passed_beside_champion and rows_after is not None:
            unjudged = replace(challenger, judgement=None, baseline=None)
            try:
                with rows_after(champion.day) as rows:
                    if rows is not None:
                        beside = judge(unjudged, rows, champion=champion)
                        decision = beside if beside.is_promoted else decision
            except DataError as problem:
                logger.warning(
                    "version %s stays champion, as newer rows cannot be read: %s", champion.version, problem
                )
    apply_decision(workspace, decision)
    return decision
