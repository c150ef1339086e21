"""Batches to a target: which are planned, and that the ones left out would not have been cheaper."""

from functools import partial

import numpy as np
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError, InfeasiblePlanError
from heterps_core.planning.quality_curve import QualityCurve
from heterps_core.training.job import TrainingConfig
from tasks.planning.samples_to_quality import (
    QUALITY_MARGIN,
    BatchOption,
    measure_points,
    options_of,
    plans_of_batches,
)
from tests.heterps_core.planning.test_quality_curve import samples_of, trainings

config_of = partial(TrainingConfig, num_microbatches=1, num_epochs=1, seed=0)


def prepared(folder, labels=None):
    path = write_click_stream(folder / "clicks.tsv", num_rows=8_000, seed=3).path
    if labels is not None:
        rows = path.read_text().splitlines()
        path.write_text("\n".join(labels + row[1:] for row in rows) + "\n")
    return prepare_dataset(path, schema=CRITEO_SCHEMA, out_dir=folder / "prepared")


def test_short_trainings_see_a_twentieth_of_the_rows_and_are_judged_on_training_rows(tmp_path, monkeypatch):
    dataset = prepared(tmp_path)
    read = set()
    gathered = dataset._rows.gather
    monkeypatch.setattr(dataset._rows, "gather", lambda rows: read.update(rows.tolist()) or gathered(rows))

    points = measure_points.fn(dataset, "lr", lambda batch_size: config_of(batch_size=batch_size))

    assert {point.num_samples for point in points} <= {80, 160, 320}
    assert all(point.num_samples >= 30 * point.batch_size for point in points)
    assert min(row for row in read if row >= 320) == 6_400 - 1_280
    assert max(read) == dataset.num_train_rows - 1 == 6_399


def test_rows_with_one_label_are_refused_in_a_line(tmp_path):
    with pytest.raises(ConfigurationError, match="all of the latest 1,280 training rows have the same label"):
        measure_points.fn(prepared(tmp_path, labels="0"), "lr", lambda size: config_of(batch_size=size))


def test_batches_to_a_target_are_those_whose_samples_the_rows_hold():
    curve = QualityCurve.of(trainings())

    options = options_of(curve, target_auc=0.78, num_samples=60_000)

    assert options == sorted(options, key=lambda option: -option.batch_size)
    for option in options:
        assert option.num_samples <= 60_000
        assert option.num_samples == pytest.approx(samples_of(0.78, option.batch_size), rel=0.2)
    assert options[0].batch_size == 128
    assert options_of(curve, target_auc=0.815, num_samples=60_000) == []


def test_without_a_target_batches_that_lose_little_quality_stay():
    curve = QualityCurve.of(trainings())

    options = options_of(curve, target_auc=None, num_samples=10**8)

    aucs = [curve.auc_after(10**8, size) for size in (64, 256, 1_024, 4_096)]
    assert [each.batch_size for each in options][::-1] == [
        64 << 2 * at for at, auc in enumerate(aucs) if auc >= max(aucs) - QUALITY_MARGIN
    ]


def test_the_cheapest_of_planned_batches_is_the_cheapest_of_all():
    generator = np.random.default_rng(0)
    num_left_out = 0
    for _ in range(200):
        sizes = [1 << power for power in range(12, 4, -1)]
        samples = sorted(generator.integers(10_000, 200_000, len(sizes)), reverse=True)
        options = [
            BatchOption(batch_size=b, num_samples=n, needed=None) for b, n in zip(sizes, samples, strict=True)
        ]
        usd_per_sample = np.cumsum(generator.exponential(1.0, len(sizes)))
        costs = dict(zip(sizes, usd_per_sample * samples, strict=True))

        def usd_of(option, costs=costs):
            return costs[option.batch_size]

        plans, bounds_usd = plans_of_batches(options, usd_of, float)

        assert min(plans.values()) == min(costs.values())
        assert plans.keys() | bounds_usd.keys() == costs.keys()
        assert all(bound <= costs[size] for size, bound in bounds_usd.items())
        num_left_out += len(bounds_usd)
    assert num_left_out > 200


def test_batches_without_a_plan_are_passed_over():
    def plan(option):
        if option.batch_size > 256:
            raise InfeasiblePlanError("memory", f"a batch of {option.batch_size}")
        return 1.0

    options = [BatchOption(batch_size=size, num_samples=1_000, needed=None) for size in (512, 256)]

    assert plans_of_batches(options, plan, float) == ({256: 1.0}, {})
    with pytest.raises(InfeasiblePlanError, match="512"):
        plans_of_batches(options[:1], plan, float)
