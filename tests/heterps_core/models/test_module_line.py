"""A module with branches becomes a chain that computes the same wherever it is cut, or is refused with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.errors import ConfigurationError
from heterps_core.models.chain import build_chain, load_builder, run_layers
from heterps_core.models.graph_block import GraphBlock, tensor_name
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.tracing import trace_chain
from heterps_core.training.pipeline.stage_layers import StageLayers
from tests.heterps_core.training.reference import plain_model

FEATURES = FeatureSpec(num_dense=2, slot_rows=(5, 7, 9))
WIDTH = 3 * 4 + 2
BATCH = ClickBatch(
    dense=torch.randn(6, 2, generator=torch.Generator().manual_seed(0)),
    ids=torch.randint(0, 5, (6, 3), generator=torch.Generator().manual_seed(1)),
    labels=torch.tensor([0.0, 1.0] * 3),
)


class Model(nn.Module):
    """What the models here have in common; each has a forward of its own."""

    def __init__(self, features: FeatureSpec) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(features, dimension=4)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, 8)
        self.output = nn.Linear(WIDTH, 1)


class Branches(Model):
    def __init__(self, features: FeatureSpec) -> None:
        super().__init__(features)
        self.late = SlotEmbedding(features, dimension=2, slots=[1], include_dense=False)
        self.scale = nn.Parameter(torch.full((3, 4), 0.5))
        self.output = nn.Linear(8 + 4 + 2, 1)

    def forward(self, batch):
        columns = self.embedding(batch)
        vectors = columns[:, :12].unflatten(1, (3, 4))
        residual = columns + F.gelu(self.hidden(columns))
        pooled = (vectors * self.scale).sum(1)
        small = torch.sigmoid(self.other(residual))
        return self.output(torch.cat([small, pooled, self.late(batch)], 1)) + columns[:, -1:]


class TwiceTheSameWeights(Model):
    def forward(self, batch):
        once = self.hidden(self.embedding(batch)).relu()
        return self.output(self.hidden(once + 1))


class SumOfColumns(nn.Module):
    def forward(self, columns):
        return columns.sum(1, keepdim=True)


class WritesInPlace(Model):
    def __init__(self, features: FeatureSpec) -> None:
        super().__init__(features)
        self.sum = SumOfColumns()

    def forward(self, batch):
        columns = self.hidden(self.embedding(batch))
        columns.add_(self.sum(columns))
        return self.output(columns)


class AsksForValuesInside(Model):
    def __init__(self, features: FeatureSpec) -> None:
        super().__init__(features)
        self.inside = AsksForValues()

    def forward(self, batch):
        return self.output(self.inside(self.embedding(batch)))


class AsksForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, columns):
        return self.linear(columns) if columns.sum() > 0 else self.linear(-columns)


class MakesAMask(Model):
    def forward(self, batch):
        columns = self.embedding(batch)
        is_large = columns > 0
        hidden = self.hidden(columns)
        return self.output(hidden.masked_fill(is_large, 0.0))


class SharesAMask(Model):
    """A mask from sizes, positions and a column, as attention over a history has, used in two layers."""

    def __init__(self, features: FeatureSpec) -> None:
        super().__init__(features)
        del self.hidden, self.other
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.output = nn.Linear(12, 1)
        self.register_buffer("causal", torch.ones(3, 3).tril())

    def forward(self, batch):
        columns = self.embedding(batch)
        vectors = columns[:, :12].unflatten(1, (3, 4))
        is_there = torch.arange(vectors.size(1), device=columns.device) < 3 * columns[:, -1:].abs()
        mask = (is_there.unsqueeze(1) * self.causal).expand(columns.shape[0], -1, -1)
        for layer in (self.first, self.second):
            vectors = vectors + layer((vectors @ vectors.transpose(1, 2) * mask) @ vectors)
        return self.output(vectors.flatten(1) * (is_there.to(vectors.dtype).sum(1, keepdim=True) + 1))


class DrawsAMask(SharesAMask):
    def forward(self, batch):
        columns = self.embedding(batch)
        vectors = columns[:, :12].unflatten(1, (3, 4))
        noise = torch.rand_like(columns[:, -1:]).unsqueeze(2)
        return self.output((self.second(self.first(vectors) * noise) * noise).flatten(1))


MODELS = [Branches, TwiceTheSameWeights, WritesInPlace, AsksForValuesInside, MakesAMask, SharesAMask]


def path_of(model):
    return f"{__name__}:{model.__name__}"


def with_tables(model):
    chain = build_chain(path_of(model), FEATURES, seed=3)
    for name, layer in chain.named_children():
        if isinstance(layer, SlotEmbedding):
            layer.attach_table(layer.new_table(name, RowWiseSGD(), seed=3))
    return chain


def learned_by_the_module(model):
    """Return logits, and what each parameter and each row of tables learns from them, in plain torch."""
    plain = plain_model(path_of(model), FEATURES, seed=3)
    logits = plain(BATCH)
    (logits * torch.arange(1.0, 7.0)).mean().backward()
    layer_names = {path: f"{name}.weight" for name, path in plain.table_paths.items()}
    gradients = {
        layer_names.get(path, path.removeprefix("chain.")): value.grad
        for path, value in plain.named_parameters()
    }
    return {"logits": logits.detach()[:, None], **gradients}


def learned_in_stages(model, cuts):
    """Return the same of a chain whose stages exchange packed activations."""
    chain = with_tables(model)
    layers = list(chain)
    ends = zip([0, *cuts], [*cuts, len(layers)], strict=True)
    stages = [StageLayers(layers[first:stop]) for first, stop in ends]
    logits = None
    for stage in stages:
        logits = stage(BATCH, logits)
    (logits * torch.arange(1.0, 7.0)[:, None]).mean().backward()
    for stage in stages:
        stage.weight_gradients.finish()
    found = {"logits": logits.detach()}
    for name, layer in chain.named_children():
        found |= {tensor_name(name, layer, key): value.grad for key, value in layer.named_parameters()}
        if isinstance(layer, SlotEmbedding):
            before = layer.table.weight_RD.clone()
            layer.table.apply_gradients(learning_rate=1.0)
            found[f"{name}.weight"] = before - layer.table.weight_RD
    return found


@pytest.mark.parametrize("model", MODELS)
def test_a_module_learns_the_same_whole_or_cut_anywhere(model):
    expected = learned_by_the_module(model)
    num_layers = len(with_tables(model))

    for cuts in ([], *([cut] for cut in range(1, num_layers)), range(1, num_layers)):
        found = learned_in_stages(model, cuts)

        used = {name: value for name, value in expected.items() if value is not None}
        assert found.keys() == used.keys()
        for name, value in used.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_layers_bear_the_names_of_the_module_and_carry_each_live_tensor_once():
    chain = build_chain(path_of(Branches), FEATURES, seed=0)

    assert [name for name, _ in chain.named_children()] == [
        "embedding",
        "hidden",
        "mul",
        "other",
        "late",
        "output",
    ]
    live = [sorted(value.width for value in layer.outputs) for layer in chain]
    # The flat columns and what the hidden layer adds; vectors, a view of the columns, do not travel beside them.
    assert live == [[14], [14, 14], [4, 14, 14], [4, 8, 14], [2, 4, 8, 14], [1]]
    graph = trace_chain("m", chain, dense_optimizer_values_per_parameter=0, row_optimizer=RowWiseSGD)
    assert [layer.output_bytes_per_sample for layer in graph.layers] == [4 * sum(widths) for widths in live]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (TwiceTheSameWeights, ["embedding", "hidden", "output"]),
        # The sum is written over what the hidden layer gave.
        (WritesInPlace, ["embedding", "hidden", "output"]),
        (AsksForValuesInside, ["embedding", "inside", "output"]),
        # A mask is no float32 tensor.
        (MakesAMask, ["embedding", "hidden", "output"]),
    ],
)
def test_layers_are_merged_where_a_boundary_cannot_be_cut(model, names):
    chain = build_chain(path_of(model), FEATURES, seed=0)

    assert [name for name, _ in chain.named_children()] == names


def test_a_mask_is_made_again_in_each_layer_from_the_column_that_it_follows():
    chain = build_chain(path_of(SharesAMask), FEATURES, seed=0)

    live = [sorted(value.width for value in layer.outputs) for layer in chain]
    again = [[value.shape for value in layer.made_again] for layer in list(chain)[1:]]
    assert [name for name, _ in chain.named_children()] == ["embedding", "first", "second", "output"]
    # The vectors, and what follows from the last column, of which each layer makes its mask.
    assert live == [[14], [1, 12], [12], [1]]
    # The mask, and what it is made of for the output.
    assert again == [[], [(3, 3), (3,)], []]
    stage = StageLayers(list(chain)[1:])
    assert str(stage._run.__self__.code).count("torch.arange") == 1


def test_random_numbers_are_drawn_once():
    chain = build_chain(path_of(DrawsAMask), FEATURES, seed=0)

    assert not any(layer.made_again for layer in list(chain)[1:])


@pytest.mark.parametrize("model", [Branches, SharesAMask])
def test_checkpoints_name_parameters_as_the_module_does(model):
    chain = build_chain(path_of(model), FEATURES, seed=0)
    module = load_builder(path_of(model))(FEATURES)

    found = {
        tensor_name(name, layer, key): value.shape
        for name, layer in chain.named_children()
        for key, value in layer.state_dict().items()
    }

    assert found == {name: value.shape for name, value in module.state_dict().items()}
    assert isinstance(chain.output, GraphBlock)


class ReadsTheBatch(Model):
    def forward(self, batch):
        return self.output(self.embedding(batch)) + batch.dense[:, :1]


class AsksForValuesOutside(Model):
    def forward(self, batch):
        columns = self.embedding(batch)
        if columns.sum() > 0:
            columns = -columns
        return self.output(columns)


class AsksForTheMode(Model):
    def forward(self, batch):
        return self.output(F.dropout(self.embedding(batch), 0.5, self.training))


class MakesAConstantByTheMode(Model):
    def forward(self, batch):
        return self.output(self.embedding(batch)) * (
            torch.tensor(2.0) if self.training else torch.tensor(1.0)
        )


class MakesARandomConstant(Model):
    def forward(self, batch):
        return self.output(self.embedding(batch) + torch.randn(14))


class WritesAcrossAnEmbedding(Branches):
    def forward(self, batch):
        columns = self.hidden(self.embedding(batch))
        late = self.late(batch)
        columns.add_(1.0)
        return self.output(columns) + late[:, :1]


class LooksUpTwice(Model):
    def forward(self, batch):
        return self.output(self.embedding(batch) + self.embedding(batch))


class TakesTwo(Model):
    def forward(self, batch, other):
        return self.output(self.embedding(batch))


class HasNoEmbedding(Model):
    def forward(self, batch):
        return self.output.weight.sum()


class Misfits(Model):
    def forward(self, batch):
        return self.output(self.other(self.embedding(batch)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ReadsTheBatch, r"batch must be given to embeddings alone.*dense.*last columns of a SlotEmbedding"),
        (
            AsksForValuesOutside,
            r"same for all values.*line \d+ of test_module_line.py.*control flow.*Module of its own",
        ),
        (AsksForTheMode, r"must not ask for self\.training.*torch\.nn\.Dropout"),
        (MakesAConstantByTheMode, r"must not ask for self\.training"),
        (MakesARandomConstant, "must not .* draw random numbers"),
        (
            WritesAcrossAnEmbedding,
            r"cut at its embedding late, but add_ writes in place to hidden; look rows up",
        ),
        (LooksUpTwice, "embedding embedding .* must be called once"),
        (TakesTwo, "must take the batch alone, but takes batch, other"),
        (HasNoEmbedding, "must have a SlotEmbedding"),
        (Misfits, r"layer 'output' of the model .* cannot take an input of shape \(rows, 8\)"),
    ],
)
def test_what_cannot_be_traced_or_cut_is_refused_with_rule_place_and_way_out(model, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        build_chain(path_of(model), FEATURES, seed=0)

    assert "\n" not in str(refused.value)


def test_a_layer_alone_computes_what_it_computes_in_its_stage():
    chain = with_tables(Branches)
    torch.testing.assert_close(
        run_layers(chain, BATCH, None), StageLayers(list(chain))(BATCH, None), rtol=1e-6, atol=1e-6
    )


def test_a_block_takes_no_rows():
    chain = with_tables(Branches)
    entering = torch.zeros(0, sum(value.width for value in chain.hidden.inputs), requires_grad=True)

    leaving: Tensor = StageLayers(list(chain)[1:4])(BATCH, entering)
    leaving.sum().backward()

    assert leaving.shape == (0, 4 + 8 + 14)
    assert entering.grad.shape == entering.shape
