from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import MEAN, NO_ID, FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.models.target_statistics import PRIOR_ROWS, TargetStatistics

ONE_VALUE = FeatureSpec(num_dense=1, slot_rows=(5, 4))
A_LIST = FeatureSpec(num_dense=1, slot_rows=(5, 4), slot_lengths=(1, 3), slot_poolings=(MEAN, MEAN))
SHARED = FeatureSpec(num_dense=1, slot_rows=(5, 5), slot_tables=(0, 0))
TWO_LABELS = FeatureSpec(num_dense=1, slot_rows=(5, 4), num_labels=2)


def made(features):
    layer = TargetStatistics(features, input_width=1)
    layer.attach_table(layer.new_table("statistics", RowWiseAdagrad(l2=0.1), seed=0))
    return layer


def drawn(features, *, num_rows, seed, has_weights=False):
    random = np.random.default_rng(seed)
    columns = []
    for rows, length in zip(features.slot_rows, features.slot_lengths, strict=True):
        ids = random.integers(rows, size=(num_rows, length))
        # Lists of any length, none too.
        ids[np.arange(length) >= random.integers(length + 1, size=num_rows)[:, None]] = NO_ID
        columns.append(random.integers(rows, size=(num_rows, 1)) if length == 1 else ids)
    labels = random.integers(2, size=(num_rows, features.num_labels)).astype(np.float32)
    return ClickBatch.from_numpy(
        np.zeros((num_rows, 1), np.float32),
        np.concatenate(columns, 1),
        labels[:, 0] if features.num_labels == 1 else labels,
        random.random(num_rows).astype(np.float32) if has_weights else None,
    )


def train(layer, batch):
    """Return what the layer adds to an activation of ones, after one step."""
    activation = torch.ones(batch.num_rows, 1, requires_grad=True)
    found = layer(batch, activation)
    # No gradient decides over what is counted.
    (found * torch.randn_like(found)).sum().backward()
    layer.table.apply_gradients(learning_rate=0.3)
    assert torch.equal(found[:, 0], torch.ones(batch.num_rows))
    return found[:, 1:].detach().numpy()


class Brute:
    """Counts by dictionaries."""

    def __init__(self, features):
        self.features, self.seen, self.clicked = features, Counter(), Counter()

    def keys(self, ids):
        for slot, columns in enumerate(self.features.id_columns):
            yield slot, [(slot, each) for each in ids[columns.start : columns.stop] if each != NO_ID]

    def rows(self, batch):
        weights = np.ones(batch.num_rows) if batch.weights is None else batch.weights.numpy()
        labels = batch.labels.numpy().reshape(batch.num_rows, -1)
        return zip(batch.ids.numpy(), weights.astype(float), labels.astype(float), strict=True)

    def add(self, batch):
        for ids, weight, labels in self.rows(batch):
            for key in ["all", *(key for _, keys in self.keys(ids) for key in keys)]:
                self.seen[key] += weight
                for number, label in enumerate(labels):
                    self.clicked[key, number] += weight * label

    def expected(self, batch, *, own=False):
        found = []
        for ids, weight, labels in self.rows(batch):
            found.append([])
            without = (weight, labels) if own else (0.0, 0.0 * labels)
            for _, keys in self.keys(ids):
                for number in range(len(labels)):
                    less = (without[0], without[0] * without[1][number])
                    rate = (self.clicked["all", number] - less[1] + 1) / (self.seen["all"] - less[0] + 2)
                    seen = sum(self.seen[key] - less[0] for key in keys)
                    clicked = sum(self.clicked[key, number] - less[1] for key in keys)
                    odds = (clicked + PRIOR_ROWS * rate) / (seen - clicked + PRIOR_ROWS * (1 - rate))
                    found[-1].append(10 * np.log(odds * (1 - rate) / rate))
        return np.array(found)


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("features", [ONE_VALUE, A_LIST, SHARED, TWO_LABELS])
def test_a_row_sees_the_labels_of_the_batches_before_its_own(features, has_weights):
    layer, brute = made(features), Brute(features)

    for step in range(5):
        batch = drawn(features, num_rows=30, seed=step, has_weights=has_weights)
        np.testing.assert_allclose(train(layer, batch), brute.expected(batch), rtol=1e-4, atol=1e-5)
        brute.add(batch)


def test_a_value_that_no_row_had_adds_nothing():
    layer = made(ONE_VALUE)
    batch = drawn(ONE_VALUE, num_rows=30, seed=0)
    train(layer, replace(batch, ids=batch.ids.clamp(max=2)))

    found = train(layer, replace(batch, ids=torch.full_like(batch.ids, 3)))

    assert not found.any()


def test_evaluation_counts_no_row():
    layer, batch = made(ONE_VALUE), drawn(ONE_VALUE, num_rows=30, seed=0)
    train(layer, batch)
    before = layer.table.weight_RD.clone()

    with torch.no_grad():
        first = layer.eval()(batch, torch.ones(30, 1))
    second = layer.eval()(replace(batch, labels=1 - batch.labels), torch.ones(30, 1))

    layer.table.apply_gradients(learning_rate=0.3)
    assert torch.equal(first, second)
    assert torch.equal(layer.table.weight_RD, before)


@pytest.mark.parametrize("features", [ONE_VALUE, A_LIST, TWO_LABELS])
def test_a_later_epoch_leaves_out_the_label_of_the_row_and_counts_nothing(features):
    layer, brute = made(features), Brute(features)
    batch = replace(drawn(features, num_rows=30, seed=0), weights=torch.rand(30))
    train(layer, batch)
    brute.add(batch)
    before = layer.table.weight_RD.clone()

    found = train(layer, replace(batch, is_repeated=True))

    np.testing.assert_allclose(found, brute.expected(batch, own=True), rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.table.weight_RD, before)


def test_micro_batches_count_as_one_batch():
    whole, parts = made(A_LIST), made(A_LIST)
    batch = drawn(A_LIST, num_rows=30, seed=0)
    train(whole, batch)

    for first in (0, 10, 20):
        part = batch.rows(first, first + 10)
        parts(part, torch.ones(10, 1, requires_grad=True)).sum().backward()
    parts.table.apply_gradients(learning_rate=0.3)

    torch.testing.assert_close(parts.table.weight_RD, whole.table.weight_RD)
