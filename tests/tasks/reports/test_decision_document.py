from dataclasses import replace

from heterps_core.judging.intervals import Estimate
from tasks.judging.promotion_gates import GateVerdict, ModelFigures, PromotionDecision
from tasks.reports.decision_document import decision_metrics, decision_tables
from tasks.reports.document import Document, Section, markdown


def figures(auc, usd, planned_usd=None):
    return ModelFigures(
        auc=auc,
        log_loss=0.45,
        calibration_ratio=1.02,
        usd_per_million_samples=usd,
        planned_usd_per_million_samples=planned_usd,
    )


DECISION = PromotionDecision(
    version="7",
    run_id="20261121-0430-1a2b3c4d",
    champion_version="6",
    is_promoted=False,
    why="version 6 stays champion, as of version 7 the cost over the champion's must be at most 1.5, but is 2",
    gates=(
        GateVerdict(
            name="AUC difference, lower end", value=-0.0002, bound=-0.0005, rule="at least", is_met=True
        ),
        GateVerdict(
            name="cost over the champion's",
            value=2.0,
            bound=1.5,
            rule="at most",
            is_met=False,
            remark="a | b",
        ),
        GateVerdict(
            name="SHA-256 of the files", value=None, bound="78f4b5173829", rule="equal to", is_met=True
        ),
    ),
    decided_at="2026-11-21T04:50:00+00:00",
    confidence=0.95,
    num_rows=40_000,
    num_clicks=10_000,
    challenger=figures(0.7812, 0.2, 0.3),
    champion=figures(0.7810, 0.1),
    auc_difference=Estimate(value=0.0002, low=-0.0002, high=0.0006),
    log_loss_difference=Estimate(value=-0.0001, low=-0.0003, high=0.0001),
)


def text_of(decision):
    tables = Section(title="Models and gates", blocks=decision_tables(decision))
    return markdown(Document(title="Decision", summary=decision.why, sections=[tables]))


def test_the_tables_have_both_models_and_every_gate_with_its_verdict():
    lines = text_of(DECISION).splitlines()

    assert (
        "| model | AUC | log-loss | predicted over observed clicks | billed USD per million samples "
        "| planned USD per million samples |" in lines
    )
    assert "| challenger, version 7 | 0.7812 | 0.4500 | 1.0200 | 0.2000 | 0.3000 |" in lines
    assert "| champion, version 6 | 0.7810 | 0.4500 | 1.0200 | 0.1000 | - |" in lines
    assert r"| cost over the champion's | 2 | at most 1.5 | missed | a \| b |" in lines
    assert "| SHA-256 of the files | - | equal to 78f4b5173829 | met |  |" in lines


def test_the_figures_have_stable_names():
    assert {name: value for name, value in decision_metrics(DECISION).items() if value is not None} == {
        "promotion/auc_difference": 0.0002,
        "promotion/auc_difference_low": -0.0002,
        "promotion/auc_difference_high": 0.0006,
        "promotion/log_loss_difference": -0.0001,
        "champion/auc": 0.7810,
        "champion/log_loss": 0.45,
    }


def test_a_first_champion_has_no_figures_of_a_comparison():
    first = replace(
        DECISION,
        champion_version=None,
        champion=None,
        auc_difference=None,
        is_promoted=True,
        why="version 7 is first",
    )

    metrics = decision_metrics(first)
    text = text_of(first)

    assert set(metrics.values()) == {None}
    assert "| challenger, version 7 | 0.7812 |" in text
    assert "| champion" not in text


def test_a_model_that_could_not_be_judged_has_gates_only():
    text = text_of(replace(DECISION, challenger=None, champion=None))

    assert "AUC |" not in text
    assert "**Gates, " in text
