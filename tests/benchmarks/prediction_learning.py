"""How much nearer predictions come by what earlier runs have shown, on runs that the correction has not seen.

The plans are those of `prediction_error`, predicted and measured as there, and taken as nights one after the other:
each prediction is corrected by what the plans before it had shown, or left alone where no correction has proven
itself. Every plan differs from the others, so this is harder than nights that repeat a plan.
With `--keep` the folder of `prediction_error` is used, and what was measured there is not measured again.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heterps_core.planning.calibration.correction import as_share, replay
from heterps_core.planning.calibration.run_speed import AnsweredPrediction, workers_text
from heterps_core.profiling.machine import this_machine
from tests.benchmarks.prediction_error import (
    RandomPlan,
    draw_plans,
    figure,
    make_dataset,
    measured_samples_per_s,
    predicted_samples_per_s,
)


def run(*, seed: int = 0, num_cases: int = 20, keep: Path | None = None) -> list[dict[str, Any]]:
    """Measure, print a table and return its figures in the form of the benchmark contract."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        dataset = make_dataset(folder)
        plans = draw_plans(dataset.features, num_plans=num_cases, seed=seed)
        answers = []
        for index, plan in enumerate(plans):
            predicted = predicted_samples_per_s(plan, dataset, folder / "profiles", seed)
            measured = measured_samples_per_s(plan, dataset, folder, seed)
            answers.append(answer_of(plan, index, predicted=predicted, measured=measured))
            print(f"{plan!s:<42}{predicted:>10,.0f}{measured:>10,.0f}  samples/s", flush=True)
    factors = replay(answers)
    print(f"\n{'plan':<42}{'corrected by':>13}{'off without':>13}{'off with':>10}")
    for plan, answer, factor in zip(plans, answers, factors, strict=True):
        print(
            f"{plan!s:<42}{factor:>13.3f}{math.expm1(answer.log_ratio):>+13.1%}"
            f"{math.expm1(answer.log_ratio - math.log(factor)):>+10.1%}"
        )
    return figures_of(answers)


def answer_of(plan: RandomPlan, index: int, *, predicted: float, measured: float) -> AnsweredPrediction:
    """Return a plan's prediction and its answer as the night of this number, in samples/s."""
    return AnsweredPrediction(
        run_id=f"plan {index:04d}",
        path=(this_machine().fingerprint(), plan.model, workers_text(plan.stages)),
        predicted_seconds=plan.batch_size / predicted,
        measured_seconds=plan.batch_size / measured,
    )


def figures_of(answers: Sequence[AnsweredPrediction]) -> list[dict[str, Any]]:
    """Return mean, median and worst error without and with what was learned, and print them."""
    figures = []
    for kind, errors in (
        ("without", [abs(answer.log_ratio) for answer in answers]),
        (
            "with",
            [
                abs(answer.log_ratio - math.log(factor))
                for answer, factor in zip(answers, replay(answers), strict=True)
            ],
        ),
    ):
        for name, value in (
            ("mean", statistics.fmean(errors)),
            ("median", statistics.median(errors)),
            ("worst", max(errors)),
        ):
            figures.append(figure(f"step_time_error_{name}_{kind}_learning", as_share(value)))
    print(
        f"{len(answers)} nights: " + ", ".join(f"{entry['name']} {entry['value']:.1%}" for entry in figures)
    )
    return figures
