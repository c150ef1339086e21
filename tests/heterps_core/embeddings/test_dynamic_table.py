"""A table with dynamic ids is, for every id, the table in which each id has a row by itself."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from heterps_core.data.features import BUCKET_ROWS, DynamicIds, FeatureSpec
from heterps_core.data.hashing import keys_of_hashes, mix
from heterps_core.embeddings.id_index import IdLayout
from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.embeddings.sharded_table import ShardedTable
from tests.worker_processes import connected, run_in_processes

FEATURES = FeatureSpec(
    num_dense=0,
    slot_rows=(2 * BUCKET_ROWS, 3 * BUCKET_ROWS),
    dynamic_ids=DynamicIds(min_sightings=2),
)
NUM_STEPS, BATCH_SIZE = 6, 48


def new_table(group=None) -> ShardedTable:
    return ShardedTable(
        name="table",
        num_rows=5 * BUCKET_ROWS,
        dimension=4,
        optimizer=RowWiseAdagrad(),
        seed=3,
        initial_standard_deviation=0.1,
        peers=connected(group),
        ids=IdLayout.of(FEATURES, (0, 1)),
        day=7,
    )


def ids_of_step(step: int) -> torch.Tensor:
    values = np.random.default_rng(step).zipf(1.3, (BATCH_SIZE, 2)).astype(np.uint64) % np.uint64(500)
    keys = [
        keys_of_hashes(mix(values[:, slot].copy()), slot=slot, hash_bits=FEATURES.hash_bits)
        for slot in (0, 1)
    ]
    return torch.from_numpy(np.stack(keys, 1))


def train(rank: int, num_replicas: int) -> dict[str, np.ndarray]:
    """Return the shard's tensors after some steps, in which every looked-up value is drawn to 1."""
    table = new_table(dist.group.WORLD if num_replicas > 1 else None)
    for step in range(NUM_STEPS):
        own = ids_of_step(step)[BATCH_SIZE * rank // num_replicas : BATCH_SIZE * (rank + 1) // num_replicas]
        out = table.lookup(own)
        (out - 1.0).square().sum().backward()
        table.apply_gradients(learning_rate=0.1)
    return {name: tensor.numpy().copy() for name, tensor in table.tensors().items()}


def train_and_save(rank: int, folder: str) -> None:
    np.savez(f"{folder}/{rank}.npz", **train(rank, 3))


def test_three_replicas_give_ids_the_rows_that_one_gives_them(tmp_path):
    alone = train(0, 1)

    run_in_processes(train_and_save, 3, str(tmp_path))

    parts = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(3)]
    assert [len(part["weight"]) // BUCKET_ROWS for part in parts] == [2, 2, 1]
    together = {name: np.concatenate([part[name] for part in parts]) for name in alone}
    for name in ("id_keys", "id_sightings", "id_last_seen_day"):
        assert (together[name] == alone[name]).all(), name
    np.testing.assert_allclose(together["weight"], alone["weight"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(together["accumulator"], alone["accumulator"], rtol=1e-5)


def test_ids_learn_as_in_a_table_with_one_row_for_each_and_one_for_those_seen_once():
    found, seen = train(0, 1), np.zeros(0, dtype=np.int64)
    table = new_table()
    start = table.weight_RD.clone()
    rows: dict[int, int] = {}
    counts: dict[int, int] = {}
    buckets = IdLayout.of(FEATURES, (0, 1)).bucket_rows
    keys = found["id_keys"] & ~(1 << 62)
    weight = torch.nn.Parameter(start)
    accumulator = torch.zeros(len(start))
    for step in range(NUM_STEPS):
        ids = ids_of_step(step)
        for key in ids.unique().tolist():
            counts[key] = counts.get(key, 0) + 1
            (place,) = np.flatnonzero(keys == key + 1)
            rows[key] = int(place) if counts[key] >= 2 else int(buckets(np.array([key]))[0])
        looked_up = torch.tensor([[rows[key] for key in pair] for pair in ids.tolist()])
        weight.grad = None
        (weight[looked_up] - 1.0).square().sum().backward()
        with torch.no_grad():
            touched = looked_up.unique()
            accumulator[touched] += weight.grad[touched].square().mean(1)
            weight[touched] -= 0.1 * weight.grad[touched] / (accumulator[touched].sqrt() + 1e-10)[:, None]
        seen = np.union1d(seen, ids.numpy())

    np.testing.assert_allclose(found["weight"], weight.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert set(keys[keys > 0] - 1) == set(seen.tolist())
    assert (found["id_last_seen_day"][found["id_keys"] > 0] == 7).all()


def test_predictions_change_nothing():
    table = new_table()
    before = {name: tensor.clone() for name, tensor in table.tensors().items()}

    with torch.no_grad():
        table.lookup(ids_of_step(0))

    assert all(torch.equal(tensor, before[name]) for name, tensor in table.tensors().items())
