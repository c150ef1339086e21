"""The tables of a report, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from itertools import pairwise

from heterps_core.data.features import FeatureSpec
from heterps_core.models.chain import build_chain
from heterps_core.models.graph_block import GraphBlock, LiveTensor
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.planning.cost_model.evaluation import StageEvaluation
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.text_table import Table, usd_text
from heterps_core.units import MS_PER_S
from tasks.judging.baseline import Baseline
from tasks.judging.promotion_gates import PromotionDecision
from tasks.reports.run_report import PlanReport, RunReport, taken_text


def stages_table(report: PlanReport) -> Table:
    """Return the layers of each stage, its machines, its planned and measured time, and how long it waits.

    The share of waits is measured where the run has reported it, else the plan's.
    """
    problem, plan, evaluation = report.problem, report.chosen.plan, report.chosen.evaluation
    groups = report.provisioning.cloud_plan.groups
    step_seconds = problem.batch_size / plan.throughput_samples_per_s
    rows = []
    for index, part in enumerate(evaluation.stages):
        machines = [
            f"{each.count} x {each.offer.instance_type.name}" for each in groups if each.stage == index
        ]
        rows.append(
            [
                index,
                _layers_of(problem, part),
                f"{' + '.join(machines)} ({part.stage.units})",
                part.price_usd_per_hour,
                part.seconds * MS_PER_S,
                *_trained_cells(report, index, planned_idle=max(0.0, 1 - part.seconds / step_seconds)),
            ]
        )
    caption = (
        f"The plan of {plan.scheduler}{taken_text(report.searches, report.scheduler)}: "
        f"{problem.num_samples * problem.num_epochs:,.0f} samples in batches of {problem.batch_size:,} for "
        f"{usd_text(plan.cost_usd)}, at {plan.throughput_samples_per_s:,.0f} samples/s and "
        f"{plan.price_usd_per_hour:.4f} USD/hour"
    )
    columns = {"stage": "d", "layers": "", "machines": "", "USD/hour": ".4f", "ms/batch, planned": ".2f"}
    if not isinstance(report, RunReport):
        return Table(caption=caption, columns={**columns, "idle, planned": ".0%"}, rows=rows)
    if report.provisioning.is_dry_run:
        launched = " + ".join(str(stage.num_replicas) for stage in report.provisioning.launch_stages)
        planned = " + ".join(str(stage.num_replicas) for stage in plan.stages)
        caption += f". Workers here: {launched} for the plan's {planned}, batches of {report.batch_size:,}"
    trained = dict.fromkeys((f"predicted ({report.trained_where})", "measured"), ".2f")
    return Table(caption=caption, columns={**columns, **trained, "waited": ".0%"}, rows=rows)


def _trained_cells(report: PlanReport, index: int, *, planned_idle: float) -> list[float | None]:
    if not isinstance(report, RunReport):
        return [planned_idle]
    stage = report.stages[index]
    measured = None if stage.measured_seconds is None else stage.measured_seconds * MS_PER_S
    return [stage.predicted_seconds * MS_PER_S, measured, stage.idle_share]


def purchase_table(report: PlanReport) -> Table:
    """Return the machines that a plan would buy."""
    bought = report.provisioning.cloud_plan
    return Table(
        caption=f"Would be bought for {bought.price_usd_per_hour:.4f} USD/hour; nothing was",
        columns={
            "stage": "d",
            "count": "d",
            **dict.fromkeys(("instance", "market", "where"), ""),
            **dict.fromkeys(("USD/hour each", "USD/hour"), ".4f"),
            "price of": "s",
        },
        rows=[
            (
                group.stage,
                group.count,
                group.offer.instance_type.name,
                str(group.offer.market),
                group.offer.zone or group.offer.region,
                group.offer.price_usd_per_hour,
                group.price_usd_per_hour,
                group.offer.price_as_of[:10],
            )
            for group in bought.groups
        ],
    )


def search_table(report: PlanReport) -> Table:
    """Return the plan of each search method, the cheapest first."""
    searches = report.searches
    marks = {report.scheduler: " (asked for)"} | {searches.taken: " (chosen)"}
    return Table(
        caption="The plan of each method, and how many plans it has rated",
        columns={
            "method": "",
            "USD per run": ".6f",
            "samples/s": ",.0f",
            "gap": ".2%",
            "evaluations": ",d",
            "seconds": ".2f",
        },
        rows=[
            (
                f"{name}{marks.get(name, '')}",
                result.plan.cost_usd,
                result.plan.throughput_samples_per_s,
                result.plan.optimality_gap,
                result.plan.num_evaluations,
                result.search_seconds,
            )
            for name, result in sorted(searches.results.items(), key=lambda item: item[1].plan.cost_usd)
        ],
    )


def restarts_table(report: RunReport) -> Table:
    """Return each loss with the decision on it, and the time and money until the last step was trained again."""
    return Table(
        caption="Losses, how the run went on and why, and what passed until the last step was trained again",
        columns={
            **dict.fromkeys(("at", "lost"), ""),
            "steps": ",d",
            "decided": "",
            "seconds": ",.1f",
            "USD": ".6f",
        },
        rows=[
            (
                restart.loss.at[:19],
                restart.loss.what,
                restart.loss.lost_steps,
                restart.loss.decision or "the workers begin again",
                restart.seconds,
                restart.usd,
            )
            for restart in report.restarts
        ],
    )


def quality_table(report: RunReport) -> Table:
    """Return the model beside its baselines on held-out rows."""
    models = {
        report.model: report.quality,
        **{
            f"{report.model}, {name}": found
            for name, found in report.training.quality_of_other_labels.items()
        },
        **{name: found.quality for name, found in report.baselines.items() if isinstance(found, Baseline)},
        "best reachable": report.best_reachable,
    }
    return Table(
        caption=f"On the {report.num_eval_rows:,} latest rows, trained on the {report.num_train_rows:,} before",
        columns={"model": "", **dict.fromkeys(("AUC", "log-loss", "normalised entropy"), ".4f")},
        rows=[
            (name, found.auc, found.log_loss, found.normalized_entropy)
            for name, found in models.items()
            if found is not None
        ],
    )


def calibration_table(report: RunReport) -> Table:
    """Return predicted against observed clicks by tenths of the predictions; no rows where that is not known."""
    judgement = report.training.judgement
    bins = judgement.quality.deciles if judgement is not None and judgement.quality is not None else ()
    return Table(
        caption="Predicted against observed clicks, by tenths of the predictions",
        columns={"tenth": "d", "rows": ",d", "predicted": ".4f", "observed": ".4f"},
        rows=[(number, *astuple(each)) for number, each in enumerate(bins, start=1)],
    )


def judged_table(decision: PromotionDecision) -> Table:
    """Return the models of a decision beside one another; no rows where none could predict."""
    judged = {
        f"challenger, version {decision.version}": decision.challenger,
        f"champion, version {decision.champion_version}": decision.champion,
    }
    return Table(
        caption=f"Judged on {decision.num_rows:,} rows with {decision.num_clicks:,} clicks",
        # After the name, the fields of `ModelFigures`.
        columns={
            "model": "",
            **dict.fromkeys(("AUC", "log-loss", "predicted over observed clicks"), ".4f"),
            **dict.fromkeys(("billed USD per million samples", "planned USD per million samples"), ".4f"),
        },
        rows=[(name, *astuple(figures)) for name, figures in judged.items() if figures is not None],
    )


def gates_table(decision: PromotionDecision) -> Table:
    """Return every gate of a decision with its verdict."""
    return Table(
        caption=f"Gates, with intervals of {decision.confidence:.0%}",
        columns={"gate": "", "found": "s", "must be": "", "verdict": "", "remark": ""},
        rows=[
            (
                gate.name,
                _shown(gate.value),
                f"{gate.rule} {_shown(gate.bound)}",
                "met" if gate.is_met else "missed",
                gate.remark,
            )
            for gate in decision.gates
        ],
    )


def cuts_table(model: str, features: FeatureSpec, stages: Sequence[Stage]) -> Table | None:
    """Return the tensors at each cut with their shape for one sample; None where a plan has one stage.

    A layer of a Sequential gives one tensor, which has the layer's name. Beside them stands what the stage after the
    cut makes again, as that is cheaper than to send it.
    """
    layers = list(build_chain(model, features, seed=0).named_children())
    rows = []
    for before, after in pairwise(stages):
        name, layer = layers[before.last_layer]
        outputs = layer.outputs if isinstance(layer, GraphBlock | SlotEmbedding) else ()
        earlier, stage = (
            [layer for _, layer in part if isinstance(layer, GraphBlock)]
            for part in (layers[: after.first_layer], layers[after.first_layer : after.last_layer + 1])
        )
        made = {node.name for block in earlier for node in block.graph.nodes}
        again = dict.fromkeys(each for block in stage for each in block.made_again if each.name in made)
        cut = f"{name} | {layers[after.first_layer][0]}"
        rows.append((cut, _tensors_text(outputs) or name, _tensors_text(again) or "-"))
    columns = {"cut": "", "tensors": "", "made again": ""}
    return Table(caption="What crosses each cut", columns=columns, rows=rows) if rows else None


def _tensors_text(tensors: Iterable[LiveTensor]) -> str:
    return ", ".join(f"{each.name} {'x'.join(map(str, each.shape))}" for each in tensors)


def _layers_of(problem: SchedulingProblem, part: StageEvaluation) -> str:
    """Return a stage's layers by number, as explanations name them, and by name."""
    first, last = part.stage.first_layer, part.stage.last_layer
    if first == last:
        return f"{first} {problem.layers[first].name}"
    return f"{first}..{last} {problem.layers[first].name} .. {problem.layers[last].name}"


def _shown(figure: float | str | None) -> str | None:
    return f"{figure:.5g}" if isinstance(figure, float | int) else figure
