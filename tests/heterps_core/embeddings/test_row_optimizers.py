"""Row updates against NumPy written out."""

import numpy as np
import pytest
import torch

from heterps_core.embeddings.row_optimizers import (
    ROW_OPTIMIZERS,
    RowWiseAdagrad,
    RowWiseAdam,
    RowWiseSGD,
    _sum_repeated_rows,
    get_row_optimizer,
    sum_by_row,
)
from heterps_core.errors import UnknownNameError


def test_gradients_of_repeated_rows_are_summed():
    rows = torch.tensor([7, 2, 7, 0, 2, 7])
    gradients = torch.arange(12, dtype=torch.float32).view(6, 2)

    distinct, summed = _sum_repeated_rows(rows, gradients)

    assert distinct.tolist() == [0, 2, 7]
    assert summed.tolist() == [[6, 7], [2 + 8, 3 + 9], [0 + 4 + 10, 1 + 5 + 11]]


def test_no_rows_are_no_update():
    rows, gradients = _sum_repeated_rows(torch.empty(0, dtype=torch.int64), torch.empty(0, 4))

    assert rows.shape == (0,)
    assert gradients.shape == (0, 4)


def test_row_wise_adagrad_follows_its_formula_over_three_steps():
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(10, 4)).astype(np.float32)
    accumulator = np.full(10, RowWiseAdagrad.INITIAL_ACCUMULATOR, dtype=np.float64)
    optimizer = RowWiseAdagrad()
    trained, state = torch.from_numpy(weight.copy()), optimizer.new_state(10, 4)
    for _ in range(3):
        rows = np.array([1, 4, 9])
        gradients = generator.normal(size=(3, 4)).astype(np.float32)
        optimizer.update(
            trained, state, torch.from_numpy(rows), torch.from_numpy(gradients), learning_rate=0.1
        )
        accumulator[rows] += (gradients.astype(np.float64) ** 2).mean(1)
        weight[rows] -= 0.1 * gradients / (np.sqrt(accumulator[rows])[:, None] + RowWiseAdagrad.EPSILON)

    np.testing.assert_allclose(trained.numpy(), weight, rtol=1e-5)
    np.testing.assert_allclose(state["accumulator"].numpy(), accumulator, rtol=1e-5)


@pytest.mark.parametrize("dimension", [1, 4])
def test_row_wise_adam_is_adam_on_the_batches_that_touch_a_row(dimension):
    generator = torch.Generator().manual_seed(0)
    optimizer = RowWiseAdam()
    trained = torch.randn(3, dimension, generator=generator)
    state = optimizer.new_state(3, dimension)
    plain = [torch.nn.Parameter(row.clone()) for row in trained]
    adams = [torch.optim.Adam([row], lr=0.1) for row in plain]
    for step in range(40):
        # Row 0 is in every batch, row 1 in every third, row 2 comes late.
        rows = [0] + [1] * (step % 3 == 0) + [2] * (step > 30)
        # Elements of one size: then the mean of their squares is the square of each.
        sizes = torch.randn(len(rows), 1, generator=generator).expand(-1, dimension)
        gradients = sizes * torch.tensor([1.0, -1.0, 1.0, -1.0])[:dimension]
        optimizer.update(trained, state, torch.tensor(rows), gradients, learning_rate=0.1)
        for row, gradient in zip(rows, gradients, strict=True):
            plain[row].grad = gradient.clone()
            adams[row].step()

    torch.testing.assert_close(trained, torch.stack([row.detach() for row in plain]), rtol=1e-5, atol=1e-5)
    assert state["num_updates"].tolist() == [40, 14, 9]


def test_row_wise_adam_takes_the_mean_of_squares_over_a_row():
    weight = torch.zeros(1, 2)

    RowWiseAdam().update(
        weight,
        RowWiseAdam().new_state(1, 2),
        torch.tensor([0]),
        torch.tensor([[3.0, 4.0]]),
        learning_rate=1.0,
    )

    # By hand: the corrected mean is the gradient, the corrected square is (9 + 16) / 2.
    torch.testing.assert_close(weight, torch.tensor([[-3.0, -4.0]]) / 12.5**0.5)


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_state_is_as_large_as_it_says(name):
    optimizer = get_row_optimizer(name)

    state = optimizer().new_state(7, 16)

    assert sum(tensor.nbytes for tensor in state.values()) == 7 * optimizer.state_bytes_per_row(16)
    assert all(len(tensor) == 7 for tensor in state.values())


def test_sgd_subtracts_the_gradient_times_the_learning_rate():
    weight = torch.ones(3, 2)

    RowWiseSGD().update(weight, {}, torch.tensor([2]), torch.tensor([[1.0, 4.0]]), learning_rate=0.5)

    assert weight.tolist() == [[1, 1], [1, 1], [0.5, -1]]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_penalty_pulls_a_row_once_a_step_however_often_it_occurs(parts):
    weight = torch.tensor([[2.0, -4.0], [2.0, -4.0], [2.0, -4.0]])
    part = (torch.tensor([[1], [1]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))

    RowWiseSGD(l2=0.1).update_repeated(weight, {}, [part] * parts, learning_rate=0.5)

    # By hand: the gradients of occurrences add up, a tenth of the row comes once; others stay.
    pulled = [2 - 0.5 * (parts + 0.2), -4 - 0.5 * (parts - 0.4)]
    torch.testing.assert_close(weight, torch.tensor([[2.0, -4.0], pulled, [2.0, -4.0]]))


def test_an_unknown_optimizer_names_the_known_ones():
    with pytest.raises(UnknownNameError, match="rowwise-adagrad, rowwise-adam, sgd"):
        get_row_optimizer("adagrad")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dimension", [1, 4])
def test_the_sum_by_row_adds_the_parts_one_after_the_other(dimension, dtype):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 9, (6, 3), generator=generator) for _ in range(2)]
    # Columns of a wider activation.
    wide = [torch.randn(6, 3 * dimension + 2, generator=generator).to(dtype) for _ in range(2)]
    gradients = [each[:, : 3 * dimension] for each in wide]

    found = sum_by_row(list(zip(rows, gradients, strict=True)), 10, dimension)

    expected = np.zeros((10, dimension), dtype=np.float32)
    for rows_BS, gradients_BX in zip(rows, gradients, strict=True):
        values = gradients_BX.float().numpy().reshape(-1, dimension)
        np.add.at(expected, rows_BS.numpy().reshape(-1), values)
    assert found.tolist() == expected.tolist()
