"""After a night: its model becomes champion where it passes the gates, also one of a back-filled day."""

from __future__ import annotations

from heterps_core.data.dataset import PreparedDataset
from infra.workspace import Workspace
from tasks.judging.challenge import Challenger, judge_challenger
from tasks.judging.promotion_gates import PromotionDecision
from tasks.records.champion import apply_decision, champion_of, opponent_of
from tasks.records.model_registry import DataKind, find_version, verified_folder
from tasks.steps import step


@step("judge challenger")
def promote_if_better(
    workspace: Workspace, challenger: Challenger, dataset: PreparedDataset
) -> PromotionDecision | str:
    """Let a new model become champion where it passes the gates; return the decision, or why it is not judged.

    Where the champion has been trained on a later day, as in a back-fill, it has seen the rows: the model is judged
    against the newest champion that had not, see `opponent_of`. Its decision is written down, and a later day that is
    back-filled goes on from it where it passed. The champion stays, as it knows days that this model does not.

    A model of synthetic rows is not judged where the champion is of real ones, nor one of rows without days where the
    champion is of days: a trial shall not end what serves.

    Args:
        dataset: Its held-out rows judge. Where the workers judged beside another champion, both models predict here.

    Raises:
        CheckpointError: Files of a model are not those that were registered.
        ConfigurationError: The registry does not answer, or another model became champion meanwhile.
    """
    champion = champion_of(workspace)
    registered = find_version(workspace, challenger.version)
    if champion is not None and champion.data_kind > registered.data_kind:
        of = {DataKind.FILES: "given data", DataKind.DAYS: "days"}[champion.data_kind]
        return f"the champion, version {champion.version}, has been trained on {of}, and this is not"
    opponent, stays_champion = champion, None
    if champion is not None and (champion.day or "") > (registered.day or champion.day or ""):
        opponent, stays_champion = opponent_of(workspace, registered), champion.version
    decision = judge_challenger(
        workspace,
        challenger,
        dataset,
        folder=verified_folder(workspace, registered),
        champion=opponent,
        stays_champion=stays_champion,
    )
    apply_decision(workspace, decision)
    return decision
