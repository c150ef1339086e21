"""What a report says of the tensors between stages, held against the traced model's own operations."""

from __future__ import annotations

from heterps_core.data.features import FeatureSpec
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from tasks.reports.tables import cuts_table

FEATURES = FeatureSpec(num_dense=13, slot_rows=(50,) * 26)


def stages(*firsts: int, num_layers: int) -> list[Stage]:
    ends = [*firsts[1:], num_layers]
    return [Stage(first, stop - 1, "cpu", 1) for first, stop in zip(firsts, ends, strict=True)]


def test_a_plan_of_one_stage_has_no_cut():
    num_layers = len(build_chain("deepfm", FEATURES, seed=0))

    assert cuts_table("deepfm", FEATURES, stages(0, num_layers=num_layers)) is None


def test_each_tensor_at_a_cut_of_a_traced_model_is_named_with_its_shape():
    chain = build_chain("deepfm", FEATURES, seed=0)
    names = [name for name, _ in chain.named_children()]

    table = cuts_table("deepfm", FEATURES, stages(0, 1, 2, num_layers=len(chain)))

    assert table is not None
    assert [row[0] for row in table.rows] == [f"{names[0]} | {names[1]}", f"{names[1]} | {names[2]}"]
    for cut, (_, tensors, again) in enumerate(table.rows):
        widths = []
        for each in str(tensors).split(", "):
            name, shape = each.split(" ")
            assert name.isidentifier()
            width = 1
            for size in shape.split("x"):
                width *= int(size)
            widths.append(width)
        assert again == "-"
        # The next layer takes all of them side by side, and nothing else.
        assert sum(widths) == sum(value.width for value in chain[cut + 1].inputs)


def test_a_cut_of_a_sequential_has_the_name_of_the_layer_before_it():
    table = cuts_table("ctrdnn", FEATURES, stages(0, 3, num_layers=8))

    assert table is not None
    [(cut, tensors, _)] = table.rows
    assert cut == "fc1 | fc2" or cut.startswith("relu1 | ")
    assert tensors == str(cut).split(" | ")[0]


def test_a_mask_that_a_later_stage_makes_again_stands_beside_what_crosses():
    model = "tests.heterps_core.models.test_module_line:SharesAMask"
    few = FeatureSpec(num_dense=2, slot_rows=(5, 7, 9))

    table = cuts_table(model, few, stages(0, 2, num_layers=4))

    assert table is not None
    [(cut, _, again)] = table.rows
    assert cut == "first | second"
    assert "12" not in str(again)
    assert "3x3" in str(again)
