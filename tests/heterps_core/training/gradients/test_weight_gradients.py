"""Gradients of weights wait until there is time, and none is lost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.training.gradients import products
from heterps_core.training.gradients.weight_gradients import WeightGradients
from heterps_core.training.pipeline.stage_layers import StageLayers
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import RankLayout
from tests.bare_stage import CONFIG, bare_stage

NUM_ROWS = 24


def make_batch(num_rows: int = NUM_ROWS) -> ClickBatch:
    return ClickBatch(
        dense=torch.empty(num_rows, 0), ids=torch.empty(num_rows, 0), labels=torch.arange(num_rows) % 2.0
    )


def make_layers() -> list[nn.Module]:
    # 13 inputs are no multiple of a register, 16 are one.
    torch.manual_seed(4)
    return [nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 1)]


def linears(layers: list[nn.Module]) -> list[nn.Linear]:
    return [layer for layer in layers if isinstance(layer, nn.Linear)]


def make_runner(layers: list[nn.Module], entering: Tensor) -> StageRunner:
    """Return the last of two stages; what comes from the first is always there."""
    place = StagePlace(layout=RankLayout(((0,), (1,))), stage=1, neighbours={0: []})
    runner = StageRunner(bare_stage(layers, input_width=13), CONFIG, place)
    runner._before = FirstStage(entering)  # type: ignore[assignment]
    return runner


class FirstStage:
    """Gives rows in order, says that none but the first micro-batch has come, and keeps the gradients."""

    silence_limit_s = 1.0
    packed = None

    def __init__(self, entering: Tensor) -> None:
        self._entering = entering
        self._num_given = 0
        self.gradients: list[Tensor] = []
        self.waiting_products: list[int] = []
        self.weight_gradients: WeightGradients | None = None

    def receive(self, num_rows: int) -> FirstStage:
        return self

    def is_there(self) -> bool:
        return False

    def wait(self) -> Tensor:
        assert self.weight_gradients is not None
        self.waiting_products.append(len(self.weight_gradients))
        rows = self._entering.chunk(self._num_chunks)[self._num_given]
        self._num_given += 1
        return rows.clone()

    def send(self, rows: Tensor, num_rows: int, counts_BS: Tensor | None) -> None:
        assert self.weight_gradients is not None
        self.waiting_products.append(len(self.weight_gradients))
        self.gradients.append(rows.clone())

    def end_step(self, *, is_drained: bool) -> None:
        pass

    def begin(self, runner: StageRunner, num_chunks: int) -> None:
        self.weight_gradients, self._num_chunks = runner._run_layers.weight_gradients, num_chunks


def train(layers: list[nn.Module], entering: Tensor, num_microbatches: int) -> tuple[list[float], FirstStage]:
    runner = make_runner(layers, entering)
    first: FirstStage = runner._before  # type: ignore[assignment]
    first.begin(runner, num_microbatches)
    batch = make_batch()
    (losses,) = runner.train_step(
        [
            MicroBatch(len(labels), ClickBatch(dense=batch.dense, ids=batch.ids, labels=labels))
            for labels in batch.labels.chunk(num_microbatches)
        ]
    )
    assert not runner._run_layers.weight_gradients
    return losses, first


def plain_gradients(layers: list[nn.Module], entering: Tensor) -> tuple[list[Tensor | None], Tensor]:
    for layer in layers:
        layer.zero_grad()
    entering = entering.clone().requires_grad_()
    logits = nn.Sequential(*layers)(entering)
    nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), make_batch().labels).backward()
    assert entering.grad is not None
    return [parameter.grad for layer in layers for parameter in layer.parameters()], entering.grad


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_gradients_are_those_of_plain_autograd(num_microbatches):
    layers, entering = make_layers(), torch.randn(NUM_ROWS, 13)

    _, first = train(layers, entering, num_microbatches)

    found = [parameter.grad for layer in layers for parameter in layer.parameters()]
    expected, expected_input = plain_gradients(layers, entering)
    torch.testing.assert_close(torch.cat(first.gradients), expected_input)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_products_wait_while_there_is_work_and_run_while_a_message_is_awaited():
    _, first = train(make_layers(), torch.randn(NUM_ROWS, 13), 3)

    # At each gradient that leaves, the products of its three layers wait; at each message, none does any more.
    assert first.waiting_products == [0, 3, 0, 3, 0, 3]


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")])
def test_a_frozen_parameter_gets_no_gradient_and_the_others_keep_theirs(frozen):
    layers, entering = make_layers(), torch.randn(NUM_ROWS, 13)
    for name in frozen:
        getattr(layers[0], name).requires_grad_(False)

    train(layers, entering, 2)

    found = [parameter.grad for layer in layers for parameter in layer.parameters()]
    expected, _ = plain_gradients(layers, entering)
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted)


def test_a_loss_that_is_no_number_is_handed_back_and_leaves_nothing_waiting():
    entering = torch.randn(NUM_ROWS, 13)
    entering[-1] = math.nan

    # Without ReLU, of which oneDNN makes 0 of what is no number.
    losses, _ = train(make_layers()[::2], entering, 2)

    assert math.isfinite(losses[0])
    assert math.isnan(losses[1])


def test_what_was_worked_out_before_stays_where_gradients_are_not_cleared():
    layers, entering = make_layers(), torch.randn(NUM_ROWS, 13)
    train(layers, entering, 2)
    once = [parameter.grad.clone() for layer in layers for parameter in layer.parameters()]

    train(layers, entering, 2)

    for got, wanted in zip(
        [parameter.grad for layer in layers for parameter in layer.parameters()], once, strict=True
    ):
        torch.testing.assert_close(got, 2 * wanted)


def test_a_stage_without_others_works_products_out_at_once():
    layers = make_layers()
    runner = StageRunner(bare_stage(layers, input_width=13), CONFIG)

    runner._run_layers(make_batch(), torch.randn(NUM_ROWS, 13)).sum().backward()

    assert len(runner._run_layers.weight_gradients) == 0


def test_a_weight_has_no_gradient_before_its_product_is_worked_out():
    layers = make_layers()
    run = StageLayers(layers)

    run(make_batch(), torch.randn(NUM_ROWS, 13)).sum().backward()

    assert len(run.weight_gradients) == 3
    assert all(linear.weight.grad is None for linear in linears(layers))
    run.weight_gradients.finish()
    assert len(run.weight_gradients) == 0
    assert all(linear.weight.grad is not None for linear in linears(layers))


def test_onednn_gets_the_rows_of_a_packed_activation_side_by_side(monkeypatch):
    packed_BW, gradient_BO = torch.randn(128, 150), torch.randn(128, 90)
    weight_OI = torch.nn.Parameter(torch.randn(90, 140))
    given = []

    def by_onednn(left, right, bias, activation):
        given.append(right)
        return left @ right.t()

    monkeypatch.setattr(products, "_is_amd", lambda: True)
    monkeypatch.setattr(products, "_has_onednn", lambda dtype: True)
    monkeypatch.setattr(products, "_by_onednn", by_onednn)
    products.add_weight_gradient(weight_OI, gradient_BO, packed_BW[:, :140])

    torch.testing.assert_close(weight_OI.grad, gradient_BO.t() @ packed_BW[:, :140])
    assert [right.t().is_contiguous() for right in given] == [True]


@pytest.mark.parametrize("is_amd", [True, False])
@pytest.mark.parametrize("num_rows", [3, 700])
def test_products_of_any_size_on_any_processor_are_those_of_torch(num_rows, is_amd, monkeypatch):
    monkeypatch.setattr(products, "_is_amd", lambda: is_amd)
    generator = torch.Generator().manual_seed(2)
    entering, gradient = (torch.randn(num_rows, width, generator=generator) for width in (45, 40))
    linear = nn.Linear(45, 40)

    leaving = products.linear(entering, linear.weight, linear.bias, "relu")
    for _ in range(2):
        products.add_weight_gradient(linear.weight, gradient, entering)

    torch.testing.assert_close(leaving, linear(entering).relu())
    torch.testing.assert_close(linear.weight.grad, 2 * gradient.t() @ entering, rtol=1e-5, atol=1e-3)
