import threading
import time

import numpy as np
import pytest
import torch

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import DataError, TrainingError
from heterps_core.judging.quality import WHERE_DIVERGED
from heterps_core.models.chain import build_chain
from heterps_core.models.row_dropout import keys_of_rows
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.gradients.finite_gradients import check_losses
from heterps_core.training.job import TrainingConfig
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.pipeline.stage_place import ALONE
from heterps_core.training.replica_batches import BATCHES_AHEAD, BatchFeed
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.data.synthetic_rows import prepare
from tests.waiting import wait_for

EVEN_THEN_ODD = np.concatenate([np.arange(0, 16, 2), np.arange(1, 16, 2)])
FEATURES = FeatureSpec(num_dense=1, slot_rows=(10, 4), slot_names=("user", "item"))


def batch(*ids: tuple[int, int]) -> ClickBatch:
    return ClickBatch(
        dense=torch.zeros(len(ids), 1),
        ids=torch.tensor(ids, dtype=torch.int64).reshape(-1, 2),
        labels=torch.zeros(len(ids)),
    )


def test_every_batch_comes_once_in_order_and_from_another_thread():
    threads = set()

    def prepare(position: int) -> int:
        threads.add(threading.get_ident())
        return position * position

    assert list(BatchFeed(prepare, range(50))) == [(number, number**2) for number in range(50)]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_batches_are_prepared_while_one_is_used_but_not_more_than_a_few():
    prepared = []

    def prepare(position: int) -> int:
        prepared.append(position)
        return position

    batches = iter(BatchFeed(prepare, range(100)))
    next(batches)
    wait_for(lambda: len(prepared) >= 1 + BATCHES_AHEAD)

    assert prepared == list(range(1 + BATCHES_AHEAD))


def test_small_batches_that_are_read_together_are_those_that_were_asked_for(tmp_path):
    source = tmp_path / "clicks.tsv"
    write_click_stream(source, num_rows=300, seed=1)
    dataset, model = prepare(source, tmp_path / "prepared"), "ctrdnn(dropout=0.1)"
    config = TrainingConfig(batch_size=16, num_microbatches=2, num_epochs=2, seed=5)
    num_layers = len(build_chain(model, dataset.features, seed=5))
    stages = [Stage(0, num_layers - 1, "cpu", 1)]
    loop = TrainingLoop.of(model, dataset, config, stages, ALONE, run=RunDirectory(""))

    for epoch, index in ((0, 0), (0, 1), (0, 9), (1, 9), (1, 2), (0, 14)):
        parts = loop.batches.training_batch(TrainingCursor(epoch, index))

        rows = dataset.batch_rows(epoch, index, batch_size=16, seed=5, positions=EVEN_THEN_ODD)
        expected = dataset.batch(rows)
        assert [part.num_rows for part in parts] == [8, 8]
        assert torch.cat([part.batch.ids for part in parts]).equal(expected.ids)
        assert torch.cat([part.batch.labels for part in parts]).equal(expected.labels)
        keys = torch.cat([part.row_keys for part in parts])
        assert keys.equal(keys_of_rows(rows, seed=5, epoch=epoch))


def test_an_error_comes_when_its_batch_is_due():
    def prepare(position: int) -> int:
        if position == 3:
            raise DataError("clicks", "is torn")
        return position

    batches = iter(BatchFeed(prepare, range(10)))
    assert [next(batches)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError):
        next(batches)


def test_the_time_without_a_batch_is_counted():
    def prepare(position: int) -> int:
        time.sleep(0.02)
        return position

    feed = BatchFeed(prepare, range(5))

    assert len(list(feed)) == 5
    # Nothing is done with the batches, so nearly all of it is waited for.
    assert feed.waited_s > 0.05


def test_the_micro_batch_whose_loss_is_no_number_is_named():
    config = TrainingConfig(batch_size=4, num_microbatches=2, num_epochs=1, seed=0)
    check_losses([0.3, 0.4], step=1, config=config)
    check_losses([], step=1, config=config)

    with pytest.raises(
        TrainingError, match=r"is inf in micro-batch 2 of 2 of step 7 .*dense_learning_rate 0.001"
    ) as caught:
        check_losses([0.3, float("inf")], step=7, config=config)

    assert str(caught.value).endswith(WHERE_DIVERGED)
