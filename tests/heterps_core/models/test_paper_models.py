"""The click models of the HeterPS paper: how many layers they have, and what each of them computes."""

import pytest
import torch

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.errors import ConfigurationError
from heterps_core.models import sized_model
from heterps_core.models.chain import build_chain, run_layers
from heterps_core.models.graph_block import tensor_name
from heterps_core.models.slot_embedding import SlotEmbedding

FEATURES = FeatureSpec(num_dense=13, slot_rows=(50,) * 26)
SMALL = FeatureSpec(num_dense=1, slot_rows=(4, 5, 6, 7))


def chain_with_tables(model, features=SMALL):
    chain = build_chain(model, features, seed=1)
    for name, layer in chain.named_children():
        if isinstance(layer, SlotEmbedding):
            layer.attach_table(layer.new_table(name, RowWiseAdagrad(), seed=1))
    return chain


def row_of(chain, name, first_row, row):
    return chain.get_submodule(name).table.weight_RD[first_row + row]


BATCH = ClickBatch(dense=torch.tensor([[0.5]]), ids=torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("model", "num_layers", "num_embeddings"),
    [("ctrdnn-16", 16, 1), ("matchnet", 16, 2), ("2emb", 10, 2), ("nce", 5, 3), ("ctrdnn", 8, 1)],
)
def test_a_model_has_as_many_layers_as_in_the_paper(model, num_layers, num_embeddings):
    chain = build_chain(model, FEATURES, seed=0)

    assert len(chain) == num_layers
    assert sum(isinstance(layer, SlotEmbedding) for layer in chain) == num_embeddings


@pytest.mark.parametrize(
    ("model", "hidden_widths", "shapes"),
    [
        # 26 slots of 8 and 13 dense features, user 12 slots, item 14 slots; five slots of the second table.
        ("ctrdnn", [32, 16], [(32, 221), (16, 32), (1, 16)]),
        ("ctrdnn-16", [32], [(32, 221), (1, 32)]),
        ("2emb", [32, 16], [(32, 221), (16, 32), (128, 40), (1, 144)]),
        ("matchnet", [32, 16], [(32, 96), (16, 32), (32, 125), (16, 32), (1, 1)]),
        ("nce", None, []),
    ],
)
def test_a_sized_model_has_the_widths_and_vectors_that_were_asked_for(model, hidden_widths, shapes):
    chain = build_chain(sized_model(model, hidden_widths=hidden_widths, embedding_dim=8), FEATURES, seed=0)

    assert chain[0].dimension == 8
    assert [tuple(weight.shape) for weight in chain.parameters() if weight.ndim == 2] == shapes


def test_a_size_that_a_model_has_not_is_refused_and_none_leaves_its_name():
    assert sized_model("nce", hidden_widths=None, embedding_dim=None) == "nce"

    with pytest.raises(ConfigurationError, match=r"hidden_widths must be a parameter .* builds 'nce'"):
        build_chain(sized_model("nce", hidden_widths=[8], embedding_dim=None), FEATURES, seed=0)


def test_no_layer_passes_its_input_on_unchanged():
    for model in ("ctrdnn-16", "matchnet", "2emb", "nce"):
        chain, batch = chain_with_tables(model, FEATURES), made_up_batch()
        activation = None
        for layer in chain:
            leaving = run_layers([layer], batch, activation)
            assert activation is None or leaving.shape != activation.shape or not leaving.equal(activation)
            activation = leaving


def made_up_batch():
    generator = torch.Generator().manual_seed(0)
    return ClickBatch(
        dense=torch.randn(16, 13, generator=generator),
        ids=torch.randint(0, 50, (16, 26), generator=generator),
        labels=torch.zeros(16),
    )


def test_matchnet_is_the_scaled_cosine_of_two_separate_towers():
    chain = chain_with_tables("matchnet")

    # Of 4 slots 2 are the user's (12 of 26 in the public example); each table starts with its first slot.
    user = torch.cat([row_of(chain, "user_embedding", 0, 1), row_of(chain, "user_embedding", 4, 2)])
    item = torch.cat(
        [row_of(chain, "item_embedding", 0, 3), row_of(chain, "item_embedding", 6, 4), torch.tensor([0.5])]
    )
    for number in (1, 2, 3):
        user = chain.get_submodule(f"user_tower_fc{number}.body.user_tower.fc{number}")(user).relu()
        item = chain.get_submodule(f"item_tower_fc{number}.body.item_tower.fc{number}")(item).relu()
    expected = 10 * (user @ item) / (user.norm() * item.norm()) - 5

    assert run_layers(chain, BATCH, None).item() == pytest.approx(expected.item(), abs=1e-5)


def test_matchnet_of_criteo_has_the_towers_of_the_public_example():
    chain = build_chain("matchnet", FEATURES, seed=0)

    assert len(chain.user_embedding.slots) == 12
    shapes = {
        tensor_name(name, layer, key): tuple(value.shape)
        for name, layer in chain.named_children()
        for key, value in layer.state_dict().items()
    }
    assert shapes["user_tower.fc1.weight"] == (400, 120)
    assert shapes["item_tower.fc1.weight"] == (400, 14 * 10 + 13)
    assert shapes["user_tower.fc3.weight"][0] == shapes["item_tower.fc3.weight"][0] == 50


@pytest.mark.parametrize(
    ("model", "linears", "tables"),
    [
        (
            "matchnet",
            [f"{side}_tower.fc{number}" for side in ("user", "item") for number in (1, 2, 3)],
            ["user_embedding", "item_embedding"],
        ),
        (
            "2emb",
            [*(f"main_tower.fc{number}" for number in (1, 2, 3)), "second_fc"],
            ["main_embedding", "second_embedding"],
        ),
    ],
)
def test_checkpoints_name_layers_as_the_module_does(model, linears, tables):
    chain = build_chain(model, FEATURES, seed=0)

    names = {
        tensor_name(name, layer, key) for name, layer in chain.named_children() for key in layer.state_dict()
    }

    assert names == {f"{name}.{part}" for name in (*linears, "output") for part in ("weight", "bias")}
    assert [name for name, layer in chain.named_children() if isinstance(layer, SlotEmbedding)] == tables


def test_nce_scores_words_by_their_product_with_the_context():
    chain = chain_with_tables("nce")
    chain.noise_contrast.log_noise.data.fill_(0.25)

    context = (row_of(chain, "context_embedding", 0, 1) + row_of(chain, "context_embedding", 4, 2)) / 2
    third = context @ row_of(chain, "word_embedding", 0, 3) + row_of(chain, "word_bias", 0, 3)
    fourth = context @ row_of(chain, "word_embedding", 6, 4) + row_of(chain, "word_bias", 6, 4)

    assert run_layers(chain, BATCH, None).item() == pytest.approx((third + fourth).item() - 0.25, abs=1e-6)


@pytest.mark.parametrize("model", ["matchnet", "nce"])
def test_two_sides_need_two_slots(model):
    with pytest.raises(ConfigurationError, match=f"{model} needs at least 2 slots, .* got 1; take ctrdnn"):
        build_chain(model, FeatureSpec(num_dense=3, slot_rows=(9,)), seed=0)
