import numpy as np
import torch

from heterps_core.data.batch import ClickBatch


def test_tensors_have_the_types_that_models_expect():
    batch = ClickBatch.from_numpy(
        np.array([[0.5, 1.5]], dtype=np.float32),
        np.array([[3, 2**31 - 1]], dtype=np.int32),
        np.array([1], dtype=np.uint8),
    )

    assert batch.dense.dtype == torch.float32
    assert batch.ids.dtype == torch.int64
    assert batch.labels.dtype == torch.float32
    assert batch.ids.tolist() == [[3, 2**31 - 1]]
    assert (batch.labels.tolist(), batch.num_rows) == ([1.0], 1)


def test_arrays_of_the_right_type_are_not_copied():
    dense = np.zeros((2, 3), dtype=np.float32)
    batch = ClickBatch.from_numpy(dense, np.zeros((2, 1), dtype=np.int64), np.zeros(2, dtype=np.float32))

    dense[1, 2] = 7.0

    assert batch.dense[1, 2] == 7.0


def test_a_batch_without_dense_columns_keeps_its_rows():
    batch = ClickBatch.from_numpy(
        np.zeros((4, 0), dtype=np.float32), np.ones((4, 2), dtype=np.int32), np.zeros(4, dtype=np.uint8)
    )

    assert batch.dense.shape == (4, 0)
