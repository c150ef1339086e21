"""A planned and a finished run of the small problem, as the flow would hand them to its last steps."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from heterps_core.data.distinct_values import ColumnValues, IdTurnover, tables_table
from heterps_core.judging.held_out import CalibrationBin, HeldOutJudgement, ModelQuality
from heterps_core.judging.quality import ClickQuality
from heterps_core.planning.calibration import Calibration, Correction, RunSpeed, StageSpeed
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.simulate.dry_run import DryRunPrediction
from heterps_core.training.job import TrainingConfig
from heterps_core.training.step_metrics import StepMetrics
from heterps_core.training.storage.store import StorageUsage
from heterps_core.training.training_run import TrainingRun
from infra.billing.bill import Bill, BillLine
from infra.billing.caps import Caps
from tasks.judging.baseline import LIGHTGBM, LOGISTIC_REGRESSION
from tasks.provisioning import find_offers, provision
from tasks.records.mlflow_names import Tag, TrackedRun
from tasks.records.past_runs import PastRun
from tasks.reports.run_report import PlanReport, RunReport
from tasks.scheduling import Searches, explain_choice, simulate_choice
from tests.tasks.builders import make_problem, make_result

RUN_ID = "20261121-0230-00000001"
STEP_SECONDS, NUM_STEPS, ROWS = 0.025, 40, 100


def make_plan_report(
    *,
    run_id=RUN_ID,
    tracked=None,
    provider="local",
    data="clicks <of> a day",
    predicted_step_seconds=0.020,
):
    problem = make_problem()
    result = make_result(problem)
    prediction = DryRunPrediction(
        evaluation=evaluate(problem, result.plan.stages),
        work_seconds=predicted_step_seconds,
        step_seconds=predicted_step_seconds,
    )
    return PlanReport(
        run_id=run_id,
        model="ctrdnn",
        data=data,
        num_train_rows=NUM_STEPS * ROWS,
        num_eval_rows=500,
        problem=problem,
        searches=Searches(results={"exact": result}, without_plan={}, taken="exact"),
        scheduler="exact",
        explanation=explain_choice.fn(problem, result),
        simulation=simulate_choice.fn(problem, result),
        provisioning=provision.fn(
            result.plan, find_offers.fn(["cpu-c7i", "gpu-t4"]), provider=provider, caps=Caps()
        ),
        tracked=tracked or TrackedRun(mlflow_run_id="0" * 32, experiment_id="1", run_id="r"),
        config=TrainingConfig(batch_size=ROWS, num_microbatches=1, num_epochs=1, seed=0),
        prediction=prediction if provider == "local" else None,
        correction=Correction(),
        hardware="machine" if provider == "local" else "cpu-c7i | gpu-t4",
        tables=tables_table([ColumnValues(name="C1", missing_share=0.0, num_values=700)], [1_024]),
        day="2026-11-20",
    )


def make_training(*, step_seconds=STEP_SECONDS, idle_shares=None):
    steps = tuple(
        StepMetrics(step=step, epoch=0, num_samples=ROWS, loss=0.7 / step, elapsed_s=step * step_seconds)
        for step in range(1, NUM_STEPS + 1)
    )
    return TrainingRun(
        is_complete=True,
        steps=steps,
        num_attempts=1,
        num_repeated_steps=0,
        trained_seconds=NUM_STEPS * step_seconds,
        repeated_seconds=0.0,
        throughput_samples_per_s=ROWS / step_seconds,
        undisturbed_throughput_samples_per_s=ROWS / step_seconds,
        idle_shares={0: 0.2, 1: 0.6} if idle_shares is None else idle_shares,
        memory_bytes={0: (800_000_000, 600_000_000)},
        storage=StorageUsage(),
        judgements={
            "label": HeldOutJudgement(
                num_rows=500,
                num_clicks=130,
                num_not_finite=0,
                quality=ModelQuality(
                    auc=0.7432,
                    log_loss=0.5012,
                    calibration_ratio=1.02,
                    normalized_entropy=0.87,
                    deciles=(CalibrationBin(num_rows=50, predicted=0.021, observed=0.02),),
                ),
                log_loss_above_mean_rate=None,
            )
        },
    )


NO_BASELINE = "the training rows are all of one class"


def make_bill(*, run_id=RUN_ID):
    """Half a minute on one machine a stage, at 0.36 and 0.72 USD/hour."""
    lines = tuple(
        BillLine(
            stage=stage,
            device_type=device_type,
            instance_type=instance,
            market="on-demand",
            count=1,
            instance_seconds=30.0,
            price_usd_per_hour=price,
            price_as_of="2026-11-01",
            price_source="bundled",
            usd=price / 120,
            ended_because="run finished",
            is_waste=False,
        )
        for stage, (device_type, instance, price) in enumerate(
            [("cpu-c7i", "c7i.large", 0.36), ("gpu-t4", "g4dn.xlarge", 0.72)]
        )
    )
    return Bill(
        run_id=run_id,
        provider="local",
        lines=lines,
        services=(),
        is_dry_run=True,
        computed_at="2026-11-21T02:31:00+00:00",
    )


ID_TURNOVER = tuple(
    IdTurnover(
        column=column, table_rows=1_024, num_ids=number, num_with_row=200, num_admitted=70, num_evicted=30
    )
    for column, number in (("user", 512), ("item", 256))
)


def make_run_report(
    *,
    planned=None,
    learning=None,
    training=None,
    baseline=NO_BASELINE,
    trees=None,
    id_turnover=(),
    restarts=(),
):
    planned = planned or make_plan_report()
    if learning is not None and planned.prediction is not None:
        learned = learning.correction("machine", model=planned.problem.model)
        planned = replace(planned, correction=learned)
    return RunReport.of(
        planned,
        learning=learning or Calibration(),
        training=training or make_training(),
        baselines={LOGISTIC_REGRESSION: baseline} | ({} if trees is None else {LIGHTGBM: trees}),
        best_reachable=ClickQuality(auc=0.7500, log_loss=0.4900, num_rows=500),
        bills=(make_bill(run_id=planned.run_id),),
        id_turnover=id_turnover,
        restarts=restarts,
    )


def make_speed(run_id, *, measured_seconds=0.025, hardware="machine", workers=(1, 1), is_dry_run=True):
    """A run of the small problem, predicted at 20 ms a step; on rented machines its stages are as long as that."""
    stage_seconds = 0.010 if is_dry_run else 0.020
    return RunSpeed(
        run_id=run_id,
        model="tiny",
        hardware=hardware,
        is_dry_run=is_dry_run,
        predicted_step_seconds=0.020,
        correction_factor=1.0,
        measured_step_seconds=measured_seconds,
        stages=tuple(
            StageSpeed(
                device_type=device_type,
                num_replicas=count,
                predicted_seconds=stage_seconds,
                measured_seconds=stage_seconds * measured_seconds / 0.020,
            )
            for device_type, count in zip(("cpu-c7i", "gpu-t4"), workers, strict=True)
        ),
    )


def make_night(index, *, speed=None, **changes):
    """One of a series of nights that become a little better."""
    started_at = datetime(2026, 10, 1, 2, 30, tzinfo=UTC) + timedelta(days=index)
    run_id = f"{started_at:%Y%m%d-%H%M}-{index:08d}"
    values = {
        "tracked": TrackedRun(mlflow_run_id=f"{index:032d}", experiment_id="1", run_id=run_id),
        "name": f"ctrdnn exact {run_id}",
        "status": "FINISHED",
        "started_at": started_at,
        "tags": {
            Tag.PROMOTED: str(index % 2 == 0).lower(),
            Tag.SPEED: json.dumps((speed or make_speed(run_id)).to_json()),
        },
        "parameters": {
            "model": "ctrdnn",
            "method": "exact",
            "device_types": "cpu-c7i | gpu-t4",
            "replicas": "4 | 1",
        },
        "metrics": {
            "cost/billed_usd": 0.01 + 0.0001 * index,
            "cost/billed_usd_per_million_samples": 2.5 - 0.01 * index,
            "measured/undisturbed_throughput_samples_per_s": 4_000.0 + 10 * index,
            "quality/auc": 0.74 + 0.0001 * index,
            "quality/best_reachable_auc": 0.75,
            "search/optimality_gap": 0.0,
        },
    }
    return PastRun(**{**values, **changes})
