"""What tests share that train a model in parts: its batches, what a part brings back, and what one process learns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import Tensor

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.models.chain import build_chain
from heterps_core.models.graph_block import tensor_name
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.pipeline.stage_runner import StageRunner
from tests.heterps_core.training.reference import plain_model, train_plainly, train_with_delay

FEATURES = FeatureSpec(num_dense=13, slot_rows=(300,) * 26)
SEED = 5
DENSE_LEARNING_RATE = 0.2
EMBEDDING_LEARNING_RATE = 20.0
RATES_OF_MODELS = {"deepfm": 0.5}
"""A weight of the linear part is a part of the logit as it is, and would leap to and fro at the rate of vectors."""

# 41 rows are shared by no number of replicas and micro-batches evenly; of one row most replicas get nothing.
STEP_ROWS = [48] * 6 + [41, 48, 48, 1, 48, 48]
NUM_HELD_OUT_ROWS = 41
HELD_OUT = -99
"""The number of the batch that nothing learns from."""


class CutModel(Protocol):
    """A way to train a model in parts."""

    @property
    def num_cards(self) -> int:
        """CUDA devices that it needs."""


def can_run(case: CutModel) -> bool:
    return case.num_cards <= torch.cuda.device_count()


def numbers_of(cases: Sequence[CutModel]) -> list[pytest.ParameterSet]:
    """Return the numbers of cases as parameters, those that cannot run here skipped."""
    return [
        pytest.param(
            number,
            id=str(case),
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not can_run(case), reason=f"needs CUDA devices: {case.num_cards}"),
            ]
            if case.num_cards
            else [],
        )
        for number, case in enumerate(cases)
    ]


@cache
def initial_chain(model: str) -> torch.nn.Sequential:
    return build_chain(model, FEATURES, seed=SEED)


def make_batch(step: int, num_rows: int) -> ClickBatch:
    generator = torch.Generator().manual_seed(step)
    return ClickBatch(
        dense=torch.randn(num_rows, FEATURES.num_dense, generator=generator),
        # Cubed: a few rows of each slot are in nearly every batch, so replicas meet on the same rows.
        ids=(torch.rand(num_rows, FEATURES.num_slots, generator=generator) ** 3 * 300).long(),
        labels=torch.randint(0, 2, (num_rows,), generator=generator).float(),
    )


def learned_part(
    model: StageModel, runner: StageRunner, losses: list[float], logits: Tensor, *, num_microbatches: int
) -> dict[str, Any]:
    """Return what a replica has learned, and what the last stage alone knows: losses and held-out logits."""
    slices = [rows for _, rows in runner.row_slices(NUM_HELD_OUT_ROWS, num_microbatches)]
    return {
        "dense": {
            tensor_name(name, layer, parameter_name): parameter.detach().cpu()
            for name, layer in model.layers.items()
            for parameter_name, parameter in layer.named_parameters()
        },
        "shards": {name: (table.rows, table.weight_RD.cpu()) for name, table in model.tables.items()},
        "losses": losses if runner.is_last else None,
        "logits": list(zip(slices, torch.split(logits, [rows.num_rows for rows in slices]), strict=True))
        if runner.is_last
        else [],
    }


class Learned(NamedTuple):
    """Parameters before and after, the loss of each step, and held-out logits."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    losses: list[float]
    logits: Tensor


class Delay(NamedTuple):
    """How late updates come; see `train_with_delay`."""

    num_microbatches: int
    num_ahead: tuple[tuple[str, int], ...]
    drained: tuple[int, ...]


@cache
def learned_by_one_process(model: str, delay: Delay | None = None) -> Learned:
    plain = plain_model(model, FEATURES, seed=SEED)
    before = plain.tensors()
    batches = [make_batch(step, num_rows) for step, num_rows in enumerate(STEP_ROWS)]
    rates = {
        "dense_learning_rate": DENSE_LEARNING_RATE,
        "embedding_learning_rate": RATES_OF_MODELS.get(model, EMBEDDING_LEARNING_RATE),
    }
    if delay is None:
        losses = train_plainly(plain, batches, **rates)
    else:
        losses = train_with_delay(
            plain,
            batches,
            num_microbatches=delay.num_microbatches,
            num_ahead=dict(delay.num_ahead),
            drained=delay.drained,
            **rates,
        )
    with torch.no_grad():
        logits = plain(make_batch(HELD_OUT, NUM_HELD_OUT_ROWS))
    return Learned(before, plain.tensors(), losses, logits)


def check_learned(
    parts: Iterable[dict[str, Any]],
    model: str,
    *,
    delay: Delay | None = None,
    loss_tolerance: float = 1e-5,
    logit_tolerance: float = 1e-4,
    weight_tolerance: float = 1e-4,
) -> None:
    """Compare all parts of a model with one process; the last tolerance is a share of the largest update."""
    before, after, losses, logits = learned_by_one_process(model, delay)
    largest_difference, largest_update, num_logits = 0.0, 0.0, 0
    for part in parts:
        found = {name: (slice(None), value) for name, value in part["dense"].items()}
        for name, (rows, weight) in part["shards"].items():
            found[f"{name}.weight"] = (slice(rows.first, rows.stop), weight)
        if "statistics.weight" in found:
            # Counts of rows are whole numbers, larger than any weight.
            rows, counts = found.pop("statistics.weight")
            assert torch.equal(counts, after["statistics.weight"][rows])
        for name, (rows, value) in found.items():
            largest_difference = max(largest_difference, (value - after[name][rows]).abs().max().item())
            largest_update = max(largest_update, (after[name] - before[name]).abs().max().item())
        if part["losses"] is not None:
            assert part["losses"] == pytest.approx(losses, abs=loss_tolerance)
        for rows, some in part["logits"]:
            num_logits += len(some)
            expected = logits[rows.first : rows.stop]
            torch.testing.assert_close(some, expected, atol=logit_tolerance, rtol=logit_tolerance)
    print(f"largest difference {largest_difference:.1e} of an update of {largest_update:.1e}")
    assert num_logits == NUM_HELD_OUT_ROWS
    assert largest_update > 0.01
    assert largest_difference < weight_tolerance * largest_update
