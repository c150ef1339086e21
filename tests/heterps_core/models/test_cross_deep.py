"""The layers that `cross-deep` has for itself, against values worked out by hand and by NumPy."""

import numpy as np
import torch

from heterps_core.data.features import FeatureSpec
from heterps_core.models import sized_model
from heterps_core.models.architectures.cross_deep import CrossLayers, NumberBuckets
from heterps_core.models.chain import build_chain


def test_a_number_fills_the_buckets_below_it_and_part_of_its_own():
    # The first column is a vector's and stays. Buckets are half a deviation wide: 9.5 of 16 lie below 0.75.
    columns = torch.tensor([[7.0, 0.75], [7.0, -9.0], [7.0, 9.0]])

    found = NumberBuckets(1)(columns)

    assert found.shape == (3, 2 + 17)
    assert found[:, :3].tolist() == [[7.0, 0.75, 0.0], [7.0, -9.0, 0.0], [7.0, 9.0, 0.0]]
    assert found[0, 3:].tolist() == [1.0] * 9 + [0.5] + [0.0] * 6
    assert found[1:, 3:].sum(1).tolist() == [0.0, 16.0]


def test_a_missing_number_is_marked_also_in_bfloat16():
    columns = torch.tensor([[0.0, 1e-6, -0.5]], dtype=torch.bfloat16)

    found = NumberBuckets(3)(columns)

    assert found.dtype == torch.bfloat16
    assert found[0, 3:6].tolist() == [1.0, 0.0, 0.0]


def test_cross_layers_multiply_the_first_columns_by_a_narrow_product_of_the_last():
    torch.manual_seed(0)
    layers = CrossLayers(5, num_layers=2, rank=2)
    first = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)

    expected = first
    for narrow, wide in zip(layers.narrow, layers.wide, strict=True):
        low, high, bias = (each.detach().numpy() for each in (narrow.weight, wide.weight, wide.bias))
        expected = first * (expected @ low.T @ high.T + bias) + expected

    np.testing.assert_allclose(
        layers(torch.from_numpy(first)).detach().numpy(), expected, rtol=1e-5, atol=1e-5
    )


def test_a_sized_model_has_the_layers_that_were_asked_for():
    features = FeatureSpec(num_dense=2, slot_rows=(9, 9))
    model = sized_model("cross-deep", hidden_widths=[6], embedding_dim=3, cross_layers=1, cross_rank=4)

    chain = build_chain(model, features, seed=0)

    # 2 slots of 3 values and a statistic; 2 numbers of 1 + 1 + 16 columns.
    assert [tuple(each.shape) for each in chain.parameters() if each.ndim == 2] == [
        (4, 44), (44, 4), (6, 44), (1, 6)
    ]  # fmt: skip
