"""A user's own model by import path, and what is wrong with it when it cannot be used."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.models.chain import build_chain
from heterps_core.models.slot_embedding import SlotEmbedding

FEATURES = FeatureSpec(num_dense=2, slot_rows=(5, 7, 9))
HERE = __name__


def build_small(features):
    embedding = SlotEmbedding(features, dimension=4)
    return nn.Sequential(OrderedDict(embedding=embedding, output=nn.Linear(embedding.output_width, 1)))


def build_without_embedding(features):
    return nn.Sequential(nn.Linear(3, 1))


def build_two_logits(features):
    embedding = SlotEmbedding(features, dimension=4)
    return nn.Sequential(embedding, nn.Linear(embedding.output_width, 2))


def build_misfit(features):
    return nn.Sequential(SlotEmbedding(features, dimension=4), nn.Linear(99, 1))


def build_late_embedding_of_wrong_width(features):
    first = SlotEmbedding(features, dimension=4)
    return nn.Sequential(first, SlotEmbedding(features, dimension=4, input_width=3), nn.Linear(1, 1))


def build_lstm(features):
    embedding = SlotEmbedding(features, dimension=4)
    return nn.Sequential(
        OrderedDict(embedding=embedding, lstm=nn.LSTM(embedding.output_width, 8), output=nn.Linear(8, 1))
    )


class RaisesValueError(nn.Module):
    def forward(self, activation):
        raise ValueError("no such\nthing")


class MeanOfRows(nn.Module):
    def forward(self, activation):
        return activation.mean(0, keepdim=True)


def build_that_ends_with(*ends):
    def build(features):
        embedding = SlotEmbedding(features, dimension=4)
        return nn.Sequential(embedding, nn.ReLU(inplace=True), nn.Linear(embedding.output_width, 1), *ends)

    return build


class SigmoidAsFunction(nn.Module):
    def forward(self, activation):
        return torch.sigmoid(activation.squeeze(1)).unsqueeze(1)


build_failing_layer = build_that_ends_with(RaisesValueError())
build_mean_of_rows = build_that_ends_with(MeanOfRows())
build_sigmoid = build_that_ends_with(nn.Sigmoid())
build_nested_sigmoid = build_that_ends_with(nn.Sequential(nn.Identity(), nn.Sigmoid(), nn.Dropout()))
build_sigmoid_function = build_that_ends_with(SigmoidAsFunction())
build_sigmoid_within = build_that_ends_with(nn.Sigmoid(), nn.Linear(1, 1))


def build_list(features):
    return [nn.Linear(1, 1)]


NOT_A_FUNCTION = 3


def test_a_model_by_import_path_is_built():
    chain = build_chain(f"{HERE}:build_small", FEATURES, seed=0)

    assert [name for name, _ in chain.named_children()] == ["embedding", "output"]
    assert chain.output.in_features == 3 * 4 + 2


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{HERE}:build_without_embedding", r"first layer .* must be a SlotEmbedding, got Linear"),
        (f"{HERE}:build_two_logits", r"one logit per row, shape \(rows, 1\), got \(rows, 2\)"),
        (f"{HERE}:build_misfit", r"layer '1' .* cannot take an input of shape \(rows, 14\)"),
        (f"{HERE}:build_late_embedding_of_wrong_width", "must have input_width 14.* got 3"),
        (
            f"{HERE}:build_lstm",
            r"^layer 'lstm' .* must return one tensor, but LSTM returns a tuple; wrap it in",
        ),
        (f"{HERE}:build_failing_layer", "^layer '3' .* shape .rows, 1.: ValueError: no such thing$"),
        (
            f"{HERE}:build_mean_of_rows",
            r"one row for each row that enters, shape \(2, ...\) here, got \(1, 1\)",
        ),
        (
            f"{HERE}:build_list",
            r"must be a torch\.nn\.Module .*, or a torch\.nn\.Sequential of named layers, got list",
        ),
        (f"{HERE}:NOT_A_FUNCTION", "must name a function, got int"),
        (f"{HERE}:missing", "cannot be imported"),
        ("no_such_package:build", "No module named 'no_such_package'; is its folder on PYTHONPATH"),
    ],
)
def test_an_unusable_model_says_what_is_wrong_with_it(path, message):
    with pytest.raises(ConfigurationError, match=message):
        build_chain(path, FEATURES, seed=0)


@pytest.mark.parametrize("end", ["sigmoid", "nested_sigmoid", "sigmoid_function"])
def test_a_model_that_ends_with_a_sigmoid_is_refused_as_the_loss_takes_logits(end):
    with pytest.raises(
        ConfigurationError, match=r"must give logits, got probabilities: .* remove that sigmoid$"
    ):
        build_chain(f"{HERE}:build_{end}", FEATURES, seed=0)


def test_a_sigmoid_within_a_model_is_a_layer_like_any_other():
    assert len(build_chain(f"{HERE}:build_sigmoid_within", FEATURES, seed=0)) == 5


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(UnknownNameError, match=r"2emb, cross-deep, ctrdnn.* Did you mean 'ctrdnn'"):
        build_chain("ctr-dnn", FEATURES, seed=0)


@pytest.mark.parametrize("slots", [[], [0, 3]])
def test_an_embedding_looks_up_slots_that_exist(slots):
    with pytest.raises(ConfigurationError, match=r"slots 0\.\.2 of the data"):
        SlotEmbedding(FEATURES, dimension=4, slots=slots)


def build_that_raises(features):
    raise ValueError("boom")


def build_without_argument():
    return nn.Sequential()


@pytest.mark.parametrize(
    ("function", "message"),
    [("build_that_raises", "raised ValueError: boom"), ("build_without_argument", "raised TypeError")],
)
def test_what_a_users_function_raises_is_reported_without_a_traceback(function, message):
    with pytest.raises(ConfigurationError, match=message):
        build_chain(f"{HERE}:{function}", FEATURES, seed=0)


def test_a_module_that_is_no_python_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "not_python.py").write_text("\ndef build(:\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigurationError, match=r"cannot be imported: .*not_python.py, line 2"):
        build_chain("not_python:build", FEATURES, seed=0)
