"""A decision for people and for the record: as Markdown on the flow run's page, and as figures under stable names."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from infra.workspace import Workspace
from tasks.judging.promotion_gates import GateVerdict, ModelFigures, PromotionDecision
from tasks.records import tracking
from tasks.records.tracked_run import TrackedRun
from tasks.reports.tables import markdown_table


@task(name="publish decision", cache_policy=NO_CACHE)
def publish_decision(workspace: Workspace, run: TrackedRun, decision: PromotionDecision) -> None:
    """Write a decision that was applied to the record, and show it on the flow run's page."""
    text = decision_markdown(decision)
    tracking.record_metrics(workspace, run, decision_metrics(decision))
    tracking.record_document(workspace, run, "promotion.json", decision.to_json())
    tracking.record_text(workspace, run, "promotion.md", text)
    create_markdown_artifact(text, key="promotion", description=decision.why)


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


def decision_markdown(decision: PromotionDecision) -> str:
    """Return a decision as Markdown: the sentence first, then the two models, then every gate."""
    title = f"Version {decision.version} is {'promoted' if decision.is_promoted else 'not promoted'}"
    return "\n".join(
        [
            f"# {title}",
            "",
            f"{decision.why[0].upper()}{decision.why[1:]}.",
            "",
            f"Judged on {decision.num_rows:,} rows with {decision.num_clicks:,} clicks; intervals of "
            f"{decision.confidence:.0%}; decided at {decision.decided_at}.",
            "",
            *_models(decision),
            "## Gates",
            "",
            *markdown_table(
                ["gate", "found", "must be", "verdict", "remark"],
                [_gate_row(verdict) for verdict in decision.gates],
            ),
            "",
            "`heterps rollback` makes the champion before the one of now champion again."
            if decision.is_promoted
            else "`heterps champion` says who is champion.",
        ]
    )


def _models(decision: PromotionDecision) -> Sequence[str]:
    """Return the table of the figures of both models, or of the one that there is."""
    columns = [
        (f"{name}, version {version}", figures)
        for name, version, figures in (
            ("challenger", decision.version, decision.challenger),
            ("champion", decision.champion_version, decision.champion),
        )
        if figures is not None
    ]
    if not columns:
        return ()
    rows = [
        ["AUC", *(f"{figures.auc:.4f}" for _, figures in columns)],
        ["log-loss", *(f"{figures.log_loss:.4f}" for _, figures in columns)],
        ["predicted over observed clicks", *(f"{figures.calibration_ratio:.4f}" for _, figures in columns)],
        ["USD per million samples", *(_usd(figures) for _, figures in columns)],
    ]
    return (*markdown_table(["", *(name for name, _ in columns)], rows), "")


def _gate_row(verdict: GateVerdict) -> list[str]:
    return [
        verdict.name,
        "not known" if verdict.value is None else _shown(verdict.value),
        f"{verdict.rule} {_shown(verdict.bound)}",
        "met" if verdict.is_met else "**missed**",
        verdict.remark,
    ]


def _shown(figure: float | str) -> str:
    return figure if isinstance(figure, str) else f"{figure:.5g}"


def _usd(figures: ModelFigures) -> str:
    usd = figures.usd_per_million_samples
    return "not known" if usd is None else f"{usd:.4f}"
