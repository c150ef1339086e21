"""Fused layers compute what the layers of the chain compute one by one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.models import CTR_MODELS
from heterps_core.models.chain import build_chain, run_layers
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.training.gradients import products
from heterps_core.training.pipeline.stage_layers import StageLayers, general_layers

FEATURES = FeatureSpec(num_dense=5, slot_rows=(50,) * 8)
BATCH = ClickBatch(
    dense=torch.randn(40, 5, generator=torch.Generator().manual_seed(1)),
    ids=torch.randint(0, 50, (40, 8), generator=torch.Generator().manual_seed(2)),
    labels=torch.zeros(40),
)


def build_layers(model: str) -> list[nn.Module]:
    chain = build_chain(model, FEATURES, seed=3)
    for name, layer in chain.named_children():
        if isinstance(layer, SlotEmbedding):
            layer.attach_table(layer.new_table(name, RowWiseSGD(), seed=3))
    return list(chain.children())


def learn(model: str, precision: str | None, batch: ClickBatch = BATCH) -> tuple[Tensor, list[Tensor]]:
    """Return logits and, after one step of the tables, all gradients and rows; None: layer by layer."""
    layers = build_layers(model)
    fused = StageLayers(layers, precision=precision) if precision else None
    logits = run_layers(layers, batch, None) if fused is None else fused(batch, None)
    (logits * torch.arange(1.0, 41.0)[:, None]).mean().backward()
    if fused is not None:
        fused.weight_gradients.finish()
    learned = []
    for layer in layers:
        learned += [parameter.grad for parameter in layer.parameters()]
        if isinstance(layer, SlotEmbedding):
            layer.table.apply_gradients(learning_rate=1.0)
            learned.append(layer.table.weight_RD)
    return logits.detach(), learned


@pytest.mark.parametrize("model", CTR_MODELS)
@pytest.mark.parametrize("is_fused", [True, False])
def test_float32_gives_the_outputs_and_gradients_of_the_layers(model, is_fused, monkeypatch):
    if not is_fused:
        monkeypatch.setattr(products, "takes_onednn", lambda left, right: False)
    logits, learned = learn(model, "float32")

    expected_logits, expected = learn(model, None)

    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(learned, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def of_requests(num_candidates: int) -> ClickBatch:
    """The batch, with the first five ids alike in so many rows after one another."""
    ids = BATCH.ids.clone()
    ids[:, :5] = ids[::num_candidates, :5].repeat_interleave(num_candidates, 0)
    return replace(BATCH, ids=ids)


@pytest.mark.parametrize("model", ["matchnet", "2emb"])
def test_a_tower_learns_from_candidates_of_a_user_what_it_learns_row_by_row(model):
    logits, learned = learn(model, "float32", of_requests(8))

    expected_logits, expected = learn(model, None, of_requests(8))

    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(learned, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("num_candidates", "user_rows"), [(8, 5), (2, 20), (1, 40)])
def test_the_tower_of_a_user_runs_once_for_all_candidates(num_candidates, user_rows):
    stage = StageLayers(build_layers("matchnet"))

    stage(of_requests(num_candidates), None).sum().backward()

    products_of_weights = stage.weight_gradients._waiting
    rows = Counter((len(each.weight_OI), len(each.input_BI)) for each in products_of_weights)
    assert rows == Counter(
        [(width, rows) for width in (400, 400, 50) for rows in (user_rows, 40)] + [(1, 40)]
    )


@pytest.mark.parametrize("model", CTR_MODELS)
@pytest.mark.parametrize("is_fused", [True, False])
def test_bfloat16_is_near_and_leaves_no_float32(model, is_fused, monkeypatch):
    if not is_fused:
        monkeypatch.setattr(products, "takes_onednn", lambda left, right: False)
    logits, learned = learn(model, "bfloat16")

    expected_logits, expected = learn(model, None)

    # Eight bits of a bfloat16 are 0.4 % for each product; up to eight follow each other, and back again.
    for got, wanted in zip([logits, *learned], [expected_logits, *expected], strict=True):
        assert got.dtype == torch.float32
        assert (got - wanted).norm() <= 0.15 * wanted.norm()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_input_gets_its_gradient_and_may_have_no_rows(precision):
    layers = build_layers("ctrdnn")[3:]
    for num_rows in (0, 5):
        entering = torch.ones(num_rows, 400, requires_grad=True)

        StageLayers(layers, precision=precision)(BATCH, entering).sum().backward()

        assert entering.grad.shape == (num_rows, 400)
        assert entering.grad.dtype == torch.float32
    assert entering.grad.abs().sum() > 0


class SubclassOfLinear(nn.Linear):
    """What users bring: the product is torch's own."""


class OwnProduct(nn.Linear):
    def forward(self, activation):
        return activation @ self.weight.t()


@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.Sigmoid(), nn.GELU(), nn.GELU("tanh"), nn.Tanh(), nn.Identity()], ids=str
)
@pytest.mark.parametrize("shape", [(6, 7), (6, 4, 7), (0, 7)])
def test_any_fully_connected_layer_learns_the_same_with_the_activation_after_it(activation, shape):
    torch.manual_seed(1)
    linear = SubclassOfLinear(7, 3)
    entering = [torch.randn(shape).requires_grad_() for _ in range(2)]
    entering[1].data.copy_(entering[0].data)
    weights = torch.randn(*shape[:-1], 3)

    stage = StageLayers([nn.Sequential(linear, activation)])
    leaving = stage(BATCH, entering[0])
    (leaving * weights).sum().backward()
    waiting = len(stage.weight_gradients)
    stage.weight_gradients.finish()
    learned = [each.grad.clone() for each in linear.parameters()]
    linear.zero_grad()
    expected = activation(linear(entering[1]))
    (expected * weights).sum().backward()

    assert waiting == 1
    torch.testing.assert_close(leaving, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entering[0].grad, entering[1].grad, rtol=1e-5, atol=1e-6)
    for got, wanted in zip(learned, linear.parameters(), strict=True):
        torch.testing.assert_close(got, wanted.grad, rtol=1e-5, atol=1e-6)


def test_layers_of_the_general_path_are_named():
    chain = nn.Sequential(
        OrderedDict(
            fused=SubclassOfLinear(7, 7), own=OwnProduct(7, 7), relu=nn.ReLU(), hooked=nn.Linear(7, 1)
        )
    )
    chain.hooked.register_forward_hook(lambda *_: None)

    assert general_layers(chain) == ("own", "hooked")
    assert general_layers(build_chain("dcnv2", FEATURES, seed=0)) == ()
    assert general_layers(build_chain("rankmixer", FEATURES, seed=0))[0] == "tokens"


def test_a_layer_without_bias_is_fused_too():
    linear = nn.Linear(7, 3, bias=False)
    entering = torch.randn(5, 7)

    leaving = StageLayers([linear, nn.ReLU()])(BATCH, entering)

    torch.testing.assert_close(leaving, linear(entering).relu())
