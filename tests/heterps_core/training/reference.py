"""The same models and steps written again in plain PyTorch, in one process, to compare the engine with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import SEQUENCE, FeatureSpec
from heterps_core.embeddings.initial_rows import initial_rows
from heterps_core.embeddings.row_range import RowRange
from heterps_core.judging.quality import ClickQuality, measure_quality
from heterps_core.models.chain import build_chain, load_builder
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.target_statistics import PRIOR_ROWS, TargetStatistics
from heterps_core.training.job import TrainingJob
from heterps_core.training.pipeline.stage_exchange import replica_slice
from tests.heterps_core.data.synthetic_rows import held_out, held_out_labels


class PlainEmbedding(nn.Module):
    """A SlotEmbedding with one ordinary parameter and a dense gradient."""

    def __init__(self, layer: SlotEmbedding, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.layer = layer

    def forward(self, batch: ClickBatch, activation: Tensor | None = None) -> Tensor:
        rows = self.layer.row_numbers(batch)
        parts = [] if activation is None else [activation]
        first, lengths = 0, []
        sequences = [self.layer.slots[place] for place in self.layer.sequences]
        for slot in [slot for slot in self.layer.slots if slot not in sequences] + sequences:
            length = self.layer.features.slot_lengths[slot]
            own = rows[:, first : first + length]
            first += length
            # A bag of its own for each row; what fills a list is left out.
            offsets = (own >= 0).sum(1).cumsum(0) - (own >= 0).sum(1)
            pooling = self.layer.features.slot_poolings[slot]
            if slot in sequences:
                vectors = F.embedding(own.clamp(min=0), self.weight) * (own >= 0).unsqueeze(2)
                parts.append(vectors.flatten(1))
                lengths.append((own >= 0).sum(1, keepdim=True))
            else:
                mode = "mean" if pooling == SEQUENCE else pooling
                parts.append(F.embedding_bag(own[own >= 0], self.weight, offsets, mode=mode))
        parts += lengths
        return torch.cat([*parts, batch.dense] if self.layer.include_dense else parts, 1)


class PlainStatistics(PlainEmbedding):
    """Target statistics of the batches that `count` was given."""

    def forward(self, batch: ClickBatch, activation: Tensor | None = None) -> Tensor:
        rows, features = self.layer.row_numbers(batch), self.layer.features
        sums = self.weight[rows.clamp(min=0)] * (rows >= 0).unsqueeze(2)
        rate = (sums[:, -1, 1:] + 1) / (sums[:, -1, :1] + 2)
        parts = [] if activation is None else [activation]
        for columns in features.id_columns:
            seen, clicked = sums[:, columns.start : columns.stop].sum(1).split([1, features.num_labels], 1)
            posterior = (clicked + PRIOR_ROWS * rate) / (seen + PRIOR_ROWS)
            parts.append(10 * (posterior.logit() - rate.logit()).detach())
        return torch.cat(parts, 1)

    def count(self, batch: ClickBatch) -> None:
        """Add the labels of a batch to the rows of its values."""
        labels = batch.labels.view(len(batch.ids), -1)
        for rows, row_labels in zip(self.layer.row_numbers(batch), labels, strict=True):
            for row in rows[rows >= 0]:
                self.weight.data[row] += torch.cat([torch.ones(1), row_labels])


def _plain(layer: SlotEmbedding, weight: Tensor) -> PlainEmbedding:
    return (PlainStatistics if isinstance(layer, TargetStatistics) else PlainEmbedding)(layer, weight)


class PlainModel(nn.Module):
    """A chain whose embeddings are PlainEmbeddings with the given initial rows."""

    def __init__(self, chain: nn.Sequential, embedding_weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.chain = nn.ModuleDict(
            {
                name: _plain(layer, embedding_weights[name]) if name in embedding_weights else layer
                for name, layer in chain.named_children()
            }
        )

    def forward(self, batch: ClickBatch) -> Tensor:
        activation = None
        for layer in self.chain.values():
            activation = layer(batch, activation) if isinstance(layer, PlainEmbedding) else layer(activation)
        assert activation is not None
        return activation.squeeze(1)

    @property
    def table_paths(self) -> dict[str, str]:
        """The name of each table's parameter by that of its layer."""
        return {
            path.removeprefix("chain.").replace(".", "_"): f"{path}.weight"
            for path, module in self.named_modules()
            if isinstance(module, PlainEmbedding)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of all tensors by their names in checkpoints."""
        layers = {path: f"{name}.weight" for name, path in self.table_paths.items()}
        return {
            layers.get(path, path.removeprefix("chain.")): value.clone()
            for path, value in self.state_dict().items()
        }


class PlainModule(PlainModel):
    """A user's module, never traced, whose embeddings are PlainEmbeddings with the given initial rows."""

    def __init__(self, module: nn.Module, embedding_weights: dict[str, Tensor]) -> None:
        nn.Module.__init__(self)
        for path, layer in list(module.named_modules()):
            if isinstance(layer, SlotEmbedding):
                module.set_submodule(path, _plain(layer, embedding_weights[path.replace(".", "_")]))
        self.chain = module

    def forward(self, batch: ClickBatch) -> Tensor:
        return self.chain(batch).squeeze(1)


def plain_model(model: str, features: FeatureSpec, *, seed: int) -> PlainModel:
    """Return a model as the engine begins with it."""
    chain = build_chain(model, features, seed=seed)
    tables = {
        name: initial_rows(
            RowRange(0, layer.num_rows),
            table=name,
            dimension=layer.dimension,
            seed=seed,
            standard_deviation=layer.initial_standard_deviation,
        )
        for name, layer in chain.named_children()
        if isinstance(layer, SlotEmbedding)
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = load_builder(model)(features)
    return PlainModel(chain, tables) if isinstance(module, nn.Sequential) else PlainModule(module, tables)


def train_plainly(
    model: PlainModel,
    batches: Sequence[ClickBatch],
    *,
    dense_learning_rate: float,
    embedding_learning_rate: float,
    last_share: float = 1.0,
    dense_l2: float = 0.0,
    embedding_l2: float = 0.0,
    clip_norm: float | None = None,
    warmup_steps: int = 0,
    label_weights: Sequence[float] = (),
) -> list[float]:
    """Train with SGD, with learning rates that fall in a straight line to a share; returns the loss of each step.

    Penalties are terms of the loss: half the squares of weights, and of the rows that the batch looks up.
    Rates rise before they fall where `warmup_steps` is above 0, to the first of as many steps less these.
    """
    embeddings = [layer for layer in model.modules() if isinstance(layer, PlainEmbedding)]
    dense = [
        parameter
        for parameter in model.parameters()
        if all(parameter is not layer.weight for layer in embeddings)
    ]
    statistics = [layer for layer in embeddings if isinstance(layer, PlainStatistics)]
    embeddings = [layer for layer in embeddings if layer not in statistics]
    tables = [layer.weight for layer in embeddings]
    optimizer = torch.optim.SGD(
        [{"params": dense, "lr": dense_learning_rate}, {"params": tables, "lr": embedding_learning_rate}]
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    losses = []
    shares = [(step + 1) / warmup_steps for step in range(warmup_steps)]
    shares += torch.linspace(1.0, last_share, len(batches) - warmup_steps).tolist()
    for batch, share in zip(batches, shares, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        weights = None if batch.weights is None else batch.weights.view(-1, *[1] * (batch.labels.ndim - 1))
        losses_of_labels = F.binary_cross_entropy_with_logits(
            model(batch), batch.labels, weights, reduction="none"
        )
        if label_weights:
            total = sum(label_weights)
            losses_of_labels = sum(
                weight / total * losses_of_labels[:, label] for label, weight in enumerate(label_weights)
            )
        loss = losses_of_labels.mean()
        penalty = sum(dense_l2 / 2 * each.square().sum() for each in dense if each.ndim > 1)
        for layer in embeddings:
            if embedding_l2:
                rows = layer.layer.row_numbers(batch).unique()
                penalty = penalty + embedding_l2 / 2 * layer.weight[rows[rows >= 0]].square().sum()
        optimizer.zero_grad()
        (loss + penalty).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(dense, clip_norm)
        optimizer.step()
        for layer in statistics:
            layer.count(batch)
        losses.append(loss.item())
    return losses


def train_with_delay(
    model: PlainModel,
    batches: Sequence[ClickBatch],
    *,
    num_microbatches: int,
    num_ahead: Mapping[str, int],
    drained: Collection[int],
    dense_learning_rate: float,
    embedding_learning_rate: float,
) -> list[float]:
    """Train with SGD as a pipeline with delayed updates does, keeping all parameters that there ever were.

    Args:
        model: Left with the newest parameters.
        batches: In order.
        num_microbatches: Of each batch.
        num_ahead: By embedding: micro-batches of a batch that read its table before the update of the batch before.
        drained: Batches before which the pipeline was empty; the first, 0, is one.
        dense_learning_rate, embedding_learning_rate: Constant.

    Returns:
        The loss of each batch.
    """
    versions = [{name: value.detach().clone() for name, value in model.named_parameters()}]
    tables = {model.table_paths[name]: count for name, count in num_ahead.items()}
    losses = []
    for number, batch in enumerate(batches):
        total = {name: torch.zeros_like(value) for name, value in versions[-1].items()}
        loss_of_batch = 0.0
        before = batches[number - 1] if number else batch
        last_drained = max(each for each in drained if each <= number)
        for index, rows in enumerate(_filled_slices(batch, num_microbatches)):
            most_ahead = len(_filled_slices(before, num_microbatches))
            part = batch.rows(rows.start, rows.stop)
            seen = {}
            for name in total:
                if name in tables:
                    is_late = number != last_drained and index < min(tables[name], most_ahead)
                    version = number - is_late
                else:
                    version = max(number - 2, last_drained)
                seen[name] = versions[version][name].clone().requires_grad_()
            logits = torch.func.functional_call(model, seen, (part,))
            losses_of_rows = F.binary_cross_entropy_with_logits(
                logits, part.labels, part.weights, reduction="sum"
            )
            loss = losses_of_rows / batch.num_rows
            gradients = torch.autograd.grad(loss, list(seen.values()))
            for name, gradient in zip(seen, gradients, strict=True):
                total[name] += gradient
            loss_of_batch += loss.item()
        versions.append(
            {
                name: value
                - total[name] * (embedding_learning_rate if name in tables else dense_learning_rate)
                for name, value in versions[-1].items()
            }
        )
        losses.append(loss_of_batch)
    model.load_state_dict(versions[-1], strict=False)
    return losses


def _filled_slices(batch: ClickBatch, num_microbatches: int) -> list[slice]:
    slices = [replica_slice(batch.num_rows, num_microbatches, index) for index in range(num_microbatches)]
    return [slice(rows.first, rows.stop) for rows in slices if rows.num_rows]


class PlainRun(NamedTuple):
    """The loss of each step, and the quality on the held-out rows."""

    losses: list[float]
    quality: ClickQuality


def run_plainly(job: TrainingJob) -> PlainRun:
    """Train a whole job with SGD."""
    config = job.config
    dataset = PreparedDataset.open(job.dataset)
    model = plain_model(job.model, dataset.features, seed=config.seed)
    batches = [
        dataset.batch(dataset.batch_rows(epoch, index, batch_size=config.batch_size, seed=config.seed))
        for epoch in range(config.num_epochs)
        for index in range(dataset.num_batches(config.batch_size))
    ]
    losses = train_plainly(
        model,
        batches,
        dense_learning_rate=config.dense_learning_rate,
        embedding_learning_rate=config.embedding_learning_rate,
        last_share=1 / (len(batches) - (config.warmup_steps or 0)),
        dense_l2=config.dense_l2,
        embedding_l2=config.embedding_l2,
        clip_norm=config.clip_norm,
        warmup_steps=config.warmup_steps or 0,
    )
    with torch.no_grad():
        logits = model(dataset.batch(held_out(dataset)))
    return PlainRun(losses, measure_quality(held_out_labels(dataset), logits.numpy()))
