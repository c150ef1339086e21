"""Whether a model became champion: both models and every gate as tables, and the figures under stable names."""

from __future__ import annotations

from dataclasses import astuple

from heterps_core.text_table import Table
from tasks.judging.promotion_gates import PromotionDecision

# Behind the name, the fields of `ModelFigures`.
MODEL_COLUMNS = {
    "model": "",
    "AUC": ".4f",
    "log-loss": ".4f",
    "predicted over observed clicks": ".4f",
    "billed USD per million samples": ".4f",
    "planned USD per million samples": ".4f",
}
GATE_COLUMNS = {"gate": "", "found": "s", "must be": "", "verdict": "", "remark": ""}


def decision_tables(decision: PromotionDecision) -> list[Table]:
    """Return the models that were judged beside one another, and every gate; without those that there are none of."""
    judged = {
        f"challenger, version {decision.version}": decision.challenger,
        f"champion, version {decision.champion_version}": decision.champion,
    }
    models = [(name, *astuple(figures)) for name, figures in judged.items() if figures is not None]
    gates = [
        (
            gate.name,
            _shown(gate.value),
            f"{gate.rule} {_shown(gate.bound)}",
            "met" if gate.is_met else "missed",
            gate.remark,
        )
        for gate in decision.gates
    ]
    tables = (
        Table(
            caption=f"Judged on {decision.num_rows:,} rows with {decision.num_clicks:,} clicks",
            columns=MODEL_COLUMNS,
            rows=models,
        ),
        Table(
            caption=f"Gates, with intervals of {decision.confidence:.0%}", columns=GATE_COLUMNS, rows=gates
        ),
    )
    return [table for table in tables if table.rows]


def decision_metrics(decision: PromotionDecision) -> dict[str, float | None]:
    """Return a decision's figures under their stable names; None for the champion's where there was none.

    Few, since each name makes MLflow's table slower; the whole decision is in `promotion.json`.
    """
    auc, champion = decision.auc_difference, decision.champion
    return {
        "promotion/auc_difference": auc.value if auc else None,
        "promotion/auc_difference_low": auc.low if auc else None,
        "promotion/auc_difference_high": auc.high if auc else None,
        "promotion/log_loss_difference": decision.log_loss_difference.value
        if champion and decision.log_loss_difference
        else None,
        "champion/auc": champion.auc if champion else None,
        "champion/log_loss": champion.log_loss if champion else None,
    }


def _shown(figure: float | str | None) -> str | None:
    return f"{figure:.5g}" if isinstance(figure, float | int) else figure
