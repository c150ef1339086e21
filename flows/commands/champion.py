"""Show which version of the model is champion, since when, its quality and cost, and the last decisions.

Quality is that on the rows by which it was promoted, which it had not seen then. The files are checked against the
hash that they were registered with, as by heterps.load_champion() in Python; mlflow.pyfunc.load_model checks nothing.

examples:
  heterps champion
  heterps champion --last 30
  heterps champion --json

exit status: 0, also where there is no champion yet; 2 where the record of runs does not answer; 6 where the
champion's files were changed or damaged.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flows.commands import whole_number
from heterps_core.errors import CheckpointError
from heterps_core.text_table import Table
from infra.workspace import Workspace
from tasks.records.mlflow_names import CHAMPION_ALIAS, Tag

if TYPE_CHECKING:
    from tasks.judging.promotion_gates import PromotionDecision
    from tasks.records.model_registry import RegisteredVersion


_DEFAULT_LAST = 7
_MOST_SHOWN = 1_000
_COLUMNS = {
    "version": "s",
    "day": "",
    "outcome": "",
    "AUC": ".4f",
    "AUC less the champion's": "s",
    "USD/million": ".4f",
    "run": "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--last",
        type=whole_number(_MOST_SHOWN),
        default=_DEFAULT_LAST,
        metavar="N",
        help="versions to show (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Print the champion and the last decisions."""
    from tasks.records import model_registry
    from tasks.records.champion import decision_of

    workspace = Workspace.locate()
    champion = model_registry.version_called(workspace, CHAMPION_ALIAS)
    problem = None
    if champion is not None:
        try:
            model_registry.verified_folder(workspace, champion)
        except CheckpointError as error:
            problem = error
    judged = [(version, decision_of(version)) for version in model_registry.registered_versions(workspace)]
    current = next((each for each in judged if champion and each[0].version == champion.version), None)
    outcomes = [_outcome(*each, is_champion=each is current) for each in judged]
    if options.json:
        documents = [_as_json(*each, outcome) for each, outcome in zip(judged, outcomes, strict=True)]
        serving = documents[judged.index(current)] if current else None
        document = {
            "champion": serving and {**serving, "files_are_whole": problem is None},
            "versions": documents[: options.last],
        }
        print(json.dumps(document, indent=2))
    else:
        lines = _champion_lines(*current) if current else ["there is no champion yet"]
        print("\n".join([*lines, *_decision_lines(judged[: options.last], outcomes)]), flush=True)
    if problem is not None:
        raise problem


def _outcome(registered: RegisteredVersion, decision: PromotionDecision | None, *, is_champion: bool) -> str:
    from tasks.records.champion import is_rolled_back

    if is_champion:
        return "champion"
    if is_rolled_back(registered):
        return "rolled back"
    if decision is not None and decision.passed_beside_champion:
        return "back-filled"
    return {"true": "promoted", "false": "kept out", None: "not decided"}[registered.tags.get(Tag.PROMOTED)]


def _champion_lines(registered: RegisteredVersion, decision: PromotionDecision | None) -> list[str]:

    since = registered.tags.get(Tag.SINCE, "a time that was not written down")
    day = f" on {registered.day}" if registered.day else ""
    lines = [
        f"champion: version {registered.version} ({registered.model}), since {since}",
        f"  trained by run {registered.run_id}{day}",
    ]
    if decision is not None and (figures := decision.challenger) is not None:
        usd = figures.usd_per_million_samples
        lines.append(
            f"  AUC {figures.auc:.4f}, log-loss {figures.log_loss:.4f}, predicted over observed clicks "
            f"{figures.calibration_ratio:.3f}, {'-' if usd is None else f'{usd:.4f}'} USD per million samples on "
            f"{decision.num_rows:,} rows it had not seen"
        )
    if decision is not None:
        lines.append(f"  {decision.why}")
    return lines


def _decision_lines(
    judged: Sequence[tuple[RegisteredVersion, PromotionDecision | None]], outcomes: Sequence[str]
) -> list[str]:
    if not judged:
        return []
    rows = []
    for (registered, decision), outcome in zip(judged, outcomes, strict=False):
        auc = decision.auc_difference if decision else None
        figures = decision.challenger if decision else None
        rows.append(
            [
                registered.version,
                registered.day,
                outcome,
                figures.auc if figures else None,
                f"{auc.value:+.4f} ({auc.low:+.4f} to {auc.high:+.4f})" if auc else None,
                figures.usd_per_million_samples if figures else None,
                registered.run_id,
            ]
        )
    lines = ["", *Table(columns=_COLUMNS, rows=rows).lines()]
    last = max((each for _, each in judged if each), key=lambda each: each.decided_at, default=None)
    return [*lines, f"  last decision: {last.why}"] if last else lines


def _as_json(
    registered: RegisteredVersion, decision: PromotionDecision | None, outcome: str
) -> dict[str, Any]:

    return {
        "version": registered.version,
        "run_id": registered.run_id,
        "model": registered.model,
        "day": registered.day,
        "registered_at": registered.registered_at.isoformat(timespec="seconds"),
        "outcome": outcome,
        "champion_since": registered.tags.get(Tag.SINCE),
        "rolled_back_at": registered.tags.get(Tag.ROLLED_BACK),
        "decision": decision and decision.to_json(),
    }
