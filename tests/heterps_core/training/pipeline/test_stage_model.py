"""More replicas than gain by it do not share the memory of a table."""

from __future__ import annotations

from typing import Any

import pytest

from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import MOST_IN_ONE_TABLE, TrainingConfig
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.transport.rank_layout import RankLayout

FEATURES = FeatureSpec(num_dense=1, slot_rows=(4, 4))


def build(num_replicas: int) -> ShardedTable:
    unusable: Any = object()
    place = StagePlace(layout=RankLayout((tuple(range(num_replicas)),)), link=unusable)
    config = TrainingConfig(batch_size=16, num_microbatches=1, num_epochs=1, seed=0)
    (table,) = build_stage_model(
        "lr", FEATURES, config, [Stage(0, 1, "cpu", num_replicas)], place
    ).tables.values()
    return table


def test_many_replicas_leave_the_link_unused_for_rows():
    assert type(build(MOST_IN_ONE_TABLE + 1)) is ShardedTable


def test_few_replicas_use_it():
    with pytest.raises(AttributeError, match="outbox"):
        build(MOST_IN_ONE_TABLE)
