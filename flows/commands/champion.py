"""`heterps champion`: which version serves, since when, how good and how expensive it is, and the last decisions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heterps_core.errors import CheckpointError
from heterps_core.text_table import Table
from infra.workspace import Workspace

if TYPE_CHECKING:
    from tasks.judging.promotion_gates import ModelFigures, PromotionDecision
    from tasks.records.model_registry import RegisteredVersion

HELP = """\
Show which version of the model is champion, since when, its quality and cost, and the last decisions.

Quality is that on the rows by which it was promoted, which it had not seen then. The files are checked against the
hash that they were registered with. Where MLFLOW_TRACKING_URI names the record of runs, the champion is loaded by
mlflow.pyfunc.load_model("models:/ctr@champion").

examples:
  heterps champion
  heterps champion --last 30
  heterps champion --json

exit status: 0, also where there is no champion yet; 2 where the record of runs does not answer; 6 where the
champion's files were changed or damaged.
"""

DEFAULT_LAST = 7
COLUMNS = {
    "version": "s",
    "day": "",
    "outcome": "",
    "AUC": ".4f",
    "AUC less the champion's": "s",
    "USD/million": ".4f",
    "run": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Standing:
    """A version with the decision on it and whether it is champion now."""

    registered: RegisteredVersion
    decision: PromotionDecision | None
    is_champion: bool

    @property
    def outcome(self) -> str:
        from tasks.records.champion import is_rolled_back
        from tasks.records.mlflow_names import PROMOTED_TAG

        if self.is_champion:
            return "champion"
        if is_rolled_back(self.registered):
            return "rolled back"
        if self.decision is not None and self.decision.passed_beside_champion:
            return "back-filled"
        promoted = self.registered.tags.get(PROMOTED_TAG)
        return {"true": "promoted", "false": "kept out", None: "not decided"}[promoted]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--last",
        type=_positive,
        default=DEFAULT_LAST,
        metavar="N",
        help="versions to show (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Print the champion and the last decisions.

    Raises:
        CheckpointError: The champion's files were changed or damaged; what is known was printed before.
        ConfigurationError: The record of runs does not answer.
    """
    from tasks.judging.promotion_judgement import decision_of
    from tasks.records import model_registry
    from tasks.records.mlflow_names import CHAMPION_ALIAS

    workspace = Workspace.locate()
    champion = model_registry.version_called(workspace, CHAMPION_ALIAS)
    standings = [
        _Standing(
            registered=registered,
            decision=decision_of(registered),
            is_champion=champion is not None and registered.version == champion.version,
        )
        for registered in model_registry.registered_versions(workspace)
    ]
    problem = None
    if champion is not None:
        try:
            model_registry.verified_folder(workspace, champion)
        except CheckpointError as error:
            problem = error
    current = next((standing for standing in standings if standing.is_champion), None)
    shown = standings[: options.last]
    if options.json:
        document = {
            "champion": None
            if current is None
            else {**_as_json(current), "files_are_whole": problem is None},
            "versions": [_as_json(standing) for standing in shown],
        }
        print(json.dumps(document, indent=2))
    else:
        print("\n".join([*_champion_lines(current), *_decision_lines(shown)]), flush=True)
    if problem is not None:
        raise problem


def _champion_lines(current: _Standing | None) -> list[str]:
    if current is None:
        return ["there is no champion yet"]
    registered, decision = current.registered, current.decision
    day = f" on {registered.day}" if registered.day else ""
    lines = [
        f"champion: version {registered.version} ({registered.model}), since {_since(registered)}",
        f"  trained by run {registered.run_id}{day}",
    ]
    if decision is not None and decision.challenger is not None:
        lines.append(f"  {_figures_text(decision.challenger)} on {decision.num_rows:,} rows it had not seen")
    if decision is not None:
        lines.append(f"  {decision.why}")
    return lines


def _decision_lines(standings: Sequence[_Standing]) -> list[str]:
    if not standings:
        return []
    rows = []
    for standing in standings:
        registered, decision = standing.registered, standing.decision
        auc = decision.auc_difference if decision else None
        figures = decision.challenger if decision else None
        rows.append(
            [
                registered.version,
                registered.day,
                standing.outcome,
                figures.auc if figures else None,
                f"{auc.value:+.4f} ({auc.low:+.4f} to {auc.high:+.4f})" if auc else None,
                figures.usd_per_million_samples if figures else None,
                registered.run_id,
            ]
        )
    lines = ["", *Table(columns=COLUMNS, rows=rows).lines()]
    decisions = [standing.decision for standing in standings if standing.decision]
    if not decisions:
        return lines
    last = max(decisions, key=lambda decision: decision.decided_at)
    return [*lines, f"  last decision: {last.why}"]


def _as_json(standing: _Standing) -> dict[str, Any]:
    from tasks.records.champion import ROLLED_BACK_TAG, SINCE_TAG

    registered = standing.registered
    return {
        "version": registered.version,
        "run_id": registered.run_id,
        "model": registered.model,
        "day": registered.day,
        "registered_at": registered.registered_at.isoformat(timespec="seconds"),
        "outcome": standing.outcome,
        "champion_since": registered.tags.get(SINCE_TAG),
        "rolled_back_at": registered.tags.get(ROLLED_BACK_TAG),
        "decision": None if standing.decision is None else standing.decision.to_json(),
    }


def _since(registered: RegisteredVersion) -> str:
    from tasks.records.champion import SINCE_TAG

    return registered.tags.get(SINCE_TAG, "a time that was not written down")


def _figures_text(figures: ModelFigures) -> str:
    return (
        f"AUC {figures.auc:.4f}, log-loss {figures.log_loss:.4f}, predicted over observed clicks "
        f"{figures.calibration_ratio:.3f}, {_usd_text(figures)} USD per million samples"
    )


def _usd_text(figures: ModelFigures | None) -> str:
    usd = figures.usd_per_million_samples if figures else None
    return "-" if usd is None else f"{usd:.4f}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
