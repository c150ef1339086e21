"""Stages find their device, and no line of them takes the host for granted."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import heterps_core
from heterps_core.compute_device import CPU
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import ROW_OPTIMIZERS
from heterps_core.errors import ConfigurationError
from heterps_core.models import CTR_MODELS
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_device import stage_device
from heterps_core.training.pipeline.stage_layers import StageLayers
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace

FEATURES = FeatureSpec(num_dense=13, slot_rows=(50,) * 26)

OTHER = torch.device("meta")
"""A device that every torch has: its tensors have a shape and no values."""

FACTORIES = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
}

PACKAGE = Path(heterps_core.__file__).parent
STAGE_FILES = [
    *sorted((PACKAGE / "embeddings").rglob("*.py")),
    *(
        PACKAGE / "training" / f"{name}.py"
        for name in (
            "gradients/finite_gradients",
            "gradients/gradient_sum",
            "gradients/optimizers",
            "gradients/weight_gradients",
            "loop",
            "pipeline/stage_boundary",
            "pipeline/stage_device",
            "pipeline/stage_layers",
            "pipeline/stage_model",
            "pipeline/stage_runner",
        )
    ),
    PACKAGE / "models" / "slot_embedding.py",
]

COPIES = ("aten::_to_copy", "aten::copy_")


class OneDevice(TorchDispatchMode):
    """Lets no operation take tensors of two devices, but those that copy from one to the other."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = {
            leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()
        }
        assert len(found) <= 1 or func._schema.name in COPIES, f"{func._schema.name} on {found}"
        return func(*args, **kwargs)


def with_cards(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.parametrize(
    ("device_type", "slot", "num_slots", "num_cards", "is_dry_run", "expected"),
    [
        ("cpu-c7i-spot", 1, 2, 2, False, "cpu"),
        ("local-cpu", 0, 1, 1, True, "cpu"),
        ("gpu-t4-spot", 1, 2, 2, False, "cuda:1"),
        ("gpu-t4", 0, 1, 1, True, "cuda:0"),
        # Two replicas cannot share a card, and half of a stage on the host would wait for the other half.
        ("gpu-t4", 0, 2, 1, True, "cpu"),
        ("gpu-t4", 0, 1, 0, True, "cpu"),
    ],
)
def test_a_worker_computes_where_its_stage_is_planned(
    device_type, slot, num_slots, num_cards, is_dry_run, expected, monkeypatch
):
    with_cards(monkeypatch, num_cards)

    device = stage_device(device_type, slot, num_slots=num_slots, is_dry_run=is_dry_run)

    assert device == torch.device(expected)


@pytest.mark.parametrize("num_cards", [0, 1])
def test_a_rented_node_without_its_cards_is_refused(num_cards, monkeypatch):
    with_cards(monkeypatch, num_cards)

    with pytest.raises(ConfigurationError, match=rf"gpu-t4 must have .* its 2 workers, .* sees {num_cards};"):
        stage_device("gpu-t4", 0, num_slots=2, is_dry_run=False)


def test_every_tensor_of_a_stage_is_made_on_a_device_that_is_named():
    assert len(STAGE_FILES) > 15
    assert not [place for path in STAGE_FILES for place in tensors_on_any_device(path)]


def tensors_on_any_device(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        is_of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        names_device = "device" in [keyword.arg for keyword in node.keywords]
        if is_of_torch and node.func.attr in FACTORIES and not names_device:
            yield f"{path.name}:{node.lineno}"


# Some products of rankmixer and wukong are no layers, so autocast alone casts them.
@pytest.mark.parametrize(
    ("model", "precision"),
    [(model, "float32") for model in CTR_MODELS]
    + [(model, "bfloat16") for model in CTR_MODELS if model not in ("rankmixer", "wukong")],
)
def test_a_stage_keeps_to_its_device(model, precision, monkeypatch):
    # It has no autocast, which is torch's own matter.
    opened = []
    monkeypatch.setattr(torch, "autocast", lambda kind, *_, **options: opened.append(kind) or nullcontext())
    stages = [Stage(0, len(build_chain(model, FEATURES, seed=0)) - 1, "gpu", 1)]
    config = TrainingConfig(batch_size=8, num_microbatches=1, num_epochs=1, seed=0)
    stage_model = build_stage_model(model, FEATURES, config, stages, StagePlace(device=OTHER))
    layers = StageLayers(list(stage_model.layers.values()), precision=precision)
    batch = ClickBatch(
        dense=torch.zeros(8, 13), ids=torch.zeros(8, 26, dtype=torch.int64), labels=torch.zeros(8)
    ).to(OTHER)

    with OneDevice():
        logits = layers(batch, None).squeeze(1)
        F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        layers.weight_gradients.finish()

    parameters = [parameter for layer in stage_model.layers.values() for parameter in layer.parameters()]
    states = [tensor for state in stage_model.dense_optimizer.state.values() for tensor in state.values()]
    rows = [tensor for table in stage_model.tables.values() for tensor in table.tensors().values()]
    tensors = [logits, *parameters, *[parameter.grad for parameter in parameters], *states, *rows]
    assert len(states) == 3 * len(parameters) > 0
    assert {tensor.device for tensor in tensors} == {OTHER}
    assert opened == ([OTHER.type] if precision == "bfloat16" else [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", CTR_MODELS)
def test_a_card_computes_every_model_in_bfloat16_near_what_the_host_does_in_float32(model):
    stages = [Stage(0, len(build_chain(model, FEATURES, seed=0)) - 1, "gpu", 1)]
    config = TrainingConfig(batch_size=64, num_microbatches=1, num_epochs=1, seed=0)
    generator = torch.Generator().manual_seed(1)
    batch = ClickBatch(
        dense=torch.randn(64, 13, generator=generator),
        ids=torch.randint(0, 50, (64, 26), generator=generator),
        labels=torch.zeros(64),
    )
    losses = []
    for device, precision in ((CPU, "float32"), (torch.device("cuda", 0), "bfloat16")):
        stage_model = build_stage_model(model, FEATURES, config, stages, StagePlace(device=device))
        layers = StageLayers(list(stage_model.layers.values()), precision=precision)
        logits = layers(batch.to(device), None).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, batch.labels.to(device))
        loss.backward()
        layers.weight_gradients.finish()
        losses.append(loss.item())

    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_rows_are_updated_on_the_device_of_their_table(name):
    optimizer = ROW_OPTIMIZERS[name]()
    state = optimizer.new_state(7, 4, device=OTHER)
    weight, rows = torch.zeros(7, 4, device=OTHER), torch.zeros(3, dtype=torch.int64, device=OTHER)

    with OneDevice():
        optimizer.update(weight, state, rows, torch.zeros(3, 4, device=OTHER), learning_rate=0.1)

    assert all(tensor.device == OTHER for tensor in state.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_a_card_updates_repeated_rows_as_the_host_does(name, dtype):
    optimizer, generator = ROW_OPTIMIZERS[name](), torch.Generator().manual_seed(0)
    start = torch.randn(50, 16, generator=generator)
    parts = [
        (
            torch.randint(0, 50, (40, 3), generator=generator),
            torch.randn(40, 48, generator=generator).to(dtype),
        )
        for _ in range(2)
    ]
    learned = []
    for device in (CPU, torch.device("cuda", 0)):
        weight, state = start.clone().to(device), optimizer.new_state(50, 16, device=device)
        for _ in range(3):
            on_device = [(rows.to(device), gradients.to(device)) for rows, gradients in parts]
            optimizer.update_repeated(weight, state, on_device, learning_rate=0.1)
        learned.append([tensor.cpu() for tensor in (weight, *state.values())])

    for on_host, on_card in zip(*learned, strict=True):
        torch.testing.assert_close(on_card, on_host, rtol=1e-4, atol=1e-5)
