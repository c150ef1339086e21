"""The policy that `reinforce` starts from: one network, trained over many problems, for any chain and device types.

Of each layer on each device type it sees what the layer would cost there. Every type is read with the same weights,
so their number and order are free; LSTMs over the layers (HeterPS, arXiv 2111.10635, has one) read the chain in both
directions. It emits P(type of layer l | type of layer l - 1) for all pairs, so that any number of plans is drawn from
one pass (`chain_tables.py`).

`placement_policy.safetensors` was trained by `python -m tests.benchmarks.research.policy_training`.

Shape legend: L = layers, T = device types, F = features, H = hidden units, P = problems of one size.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.run_tables import LEAST_USD_PER_HOUR, run_table
from heterps_core.planning.cost_model.step_model import num_microbatches_of
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel

POLICY_FILE = Path(__file__).with_name("placement_policy.safetensors")

_STAGE_TIMES = (0.15, 0.4, 0.7, 1.0)
"""At which a layer's price is a feature: shares of the way from the shortest to the longest, in logarithms."""

MIDDLING_STAGES = 4
"""Stages whose number of micro-batches stands for those of all plans where the cost of single layers is asked."""

_LEAST_UNITS = 1e-9
_SCARCITY_ROUNDS = 8
_CHOICE_SHARPNESS = 4.0
"""Layers are shared out to device types by this power of their cost there, so that demand follows prices smoothly."""

_MOST_LOG = 6.0
"""Logarithms are cut here; stands for what no number of units reaches, too."""

_RANK = 4
"""Rank of the term of the logits that depends on both types."""


def policy_features(problem: SchedulingProblem) -> Tensor:
    """Return what the policy sees of each layer on each device type, shape (L, T, F).

    Prices, times and bytes enter as logarithms of ratios, so their units do not matter: to what the chain's layers
    cost on their cheapest types, to the shortest and the longest stage time that make sense, to memory and caps. The
    cost model is asked at four stage times between these for the cost of each layer in a stage of its own, and caps
    enter as the prices of scarce units that keep demand within them (`_scarcity`).
    """
    layers, units = problem.layers, tuple(problem.device_types.values())
    num_layers, num_types = len(layers), len(units)
    scale = problem.batch_size / problem.profile_batch_size
    compute, communication = (
        np.array([[seconds[name] * scale for name in problem.device_types] for seconds in amounts])
        for amounts in (
            [layer.compute_seconds for layer in layers],
            [layer.communication_seconds for layer in layers],
        )
    )
    price = np.maximum([unit.price_usd_per_hour for unit in units], LEAST_USD_PER_HOUR)
    max_units = np.array([unit.max_units for unit in units])
    serial = np.array([1 - unit.compute_parallel_fraction for unit in units])
    serial_traffic = np.array([1 - unit.communication_parallel_fraction for unit in units])
    usable_bytes = np.array([max(unit.usable_bytes, 1.0) for unit in units])
    bandwidth = np.array([unit.bandwidth_bytes_per_s for unit in units])
    cut_bytes = np.array([0.0, *(layer.output_bytes_per_sample for layer in layers[:-1]), 0.0])
    cut_seconds = 2 * problem.batch_size * cut_bytes[:, None] / bandwidth  # activations and gradients

    table = run_table(
        problem,
        [(layer, layer) for layer in range(num_layers)],
        num_microbatches=num_microbatches_of(problem, MIDDLING_STAGES),
    )
    objective = objective_of(problem)
    low_seconds = float(table.fastest_seconds().min(axis=1).max())
    loose_seconds = max(float((compute + communication).min(axis=1).sum()), low_seconds)
    high_seconds = max(min(loose_seconds, problem.stage_seconds_limit), low_seconds)
    stage_seconds = low_seconds * (high_seconds / low_seconds) ** np.array(_STAGE_TIMES)
    replicas = table.least_replicas(stage_seconds)  # (X, L, T)
    charges = table.usd_per_hour(replicas) * stage_seconds[:, None, None]
    state_units = np.array([[layer.state_bytes * layer.is_sharded] for layer in layers]) / usable_bytes
    layer_units = np.maximum((compute + communication) / stage_seconds[:, None, None], state_units)
    layer_units = layer_units.clip(_LEAST_UNITS)
    wanted, scarce_cost = _scarcity(layer_units, price, max_units)
    work = compute * price
    usual = float(work.min(axis=1).mean())
    columns = [
        np.array([[float(layer.is_sharded)] for layer in layers]),
        np.arange(num_layers)[:, None] / num_layers,
        _log(work / usual),
        _log(work / work.min(axis=1, keepdims=True).clip(1e-12)),
        _log(communication * price / usual),
        _log(cut_seconds[:-1] * price / usual),
        _log(cut_seconds[1:] * price / usual),
        _log(compute * serial / low_seconds),
        _log(communication * serial_traffic / low_seconds),
        _log(np.array([[layer.state_bytes] for layer in layers]) / usable_bytes),
        _log(table.fewest_replicas / max_units),
        *_log(charges / usual),
        *_log(replicas / max_units),
        _log(price / np.exp(np.log(price).mean())),
        _log(max_units) / 2,
        _log(serial + 1e-3),
        _log(serial_traffic + 1e-3),
        np.sqrt(objective.interruptions_per_hour * max_units),
        _log(high_seconds / low_seconds),
        _log(loose_seconds / high_seconds),
        _log(objective.extra_seconds / high_seconds + 1e-2),
        num_layers / 40,
        num_types / 8,
        *_log(wanted / max_units),
        *_log(layer_units.sum(axis=1, keepdims=True) / max_units),
        *_log(scarce_cost / scarce_cost.min(axis=2, keepdims=True)),
        float(problem.step_model is StepModel.TRAINER),
        float(problem.single_replica_communicates),
    ]
    shape = (num_layers, num_types)
    features = np.stack([np.broadcast_to(column, shape) for column in columns], axis=2)
    return torch.from_numpy(features.astype(np.float32))


def _scarcity(layer_units: Floats, price: Floats, max_units: Floats) -> tuple[Floats, Floats]:
    """Return the units that layers want of each type at its price, (X, 1, T), and each layer's cost at scarce prices.

    Each layer takes its units, shape (X, L, T), of cheap types. The price of a type that is wanted beyond its cap
    rises until other types are as cheap; the ascent of `exact` on prices of scarce units, for layers one by one.
    """
    first_cost = layer_units * price
    factors = np.ones((len(layer_units), 1, price.size))
    demands = []
    for _ in range(_SCARCITY_ROUNDS):
        cost = first_cost * factors
        preference = (cost.min(axis=2, keepdims=True) / cost) ** _CHOICE_SHARPNESS
        shares = preference / preference.sum(axis=2, keepdims=True)
        demands.append((shares * layer_units).sum(axis=1, keepdims=True))
        factors = (factors * np.sqrt(demands[-1] / max_units).clip(0.5, 2)).clip(1)
    return demands[0], first_cost * factors


def _log(values: Floats | float) -> Floats:
    """Return a third of the logarithm within -6..6."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(values)).clip(-_MOST_LOG, _MOST_LOG) / 3


class PlacementPolicy(nn.Module):
    """Two bidirectional LSTMs of H units each over the layers; each type sees mean and maximum of all types."""

    def __init__(self, num_features: int, num_hidden: int) -> None:
        super().__init__()
        self.cell = nn.Linear(num_features, num_hidden)
        self.first = nn.LSTM(3 * num_hidden, num_hidden, bidirectional=True)
        self.second = nn.LSTM(6 * num_hidden, num_hidden, bidirectional=True)
        self.head = nn.Linear(2 * num_hidden, 2 + 2 * _RANK)

    def forward(self, features: Tensor) -> Tensor:
        """Return log-probabilities, shape (P, L, T, F) -> (P, L, T + 1, T); row T stands for "no previous layer"."""
        cells = torch.relu(self.cell(features))
        outputs = self.head(self._along_layers(self.second, self._along_layers(self.first, cells)))
        own, stay, keys, queries = outputs.split([1, 1, _RANK, _RANK], dim=-1)
        own = own.transpose(2, 3)  # (P, L, 1, T)
        before = torch.cat([queries[:, :1] * 0, queries[:, :-1]], dim=1)
        pairs = before @ keys.transpose(2, 3) + torch.diag_embed(stay[..., 0])  # (P, L, T, T)
        return torch.log_softmax(torch.cat([own + pairs, own], dim=2), dim=3)

    @staticmethod
    def _along_layers(lstm: nn.LSTM, cells: Tensor) -> Tensor:
        """Return the outputs of an LSTM over the layers, shape (P, L, T, *) -> (P, L, T, 2 H)."""
        num_problems, _, num_types, _ = cells.shape
        pooled = torch.cat([cells.mean(dim=2, keepdim=True), cells.amax(dim=2, keepdim=True)], dim=3)
        seen = torch.cat([cells, pooled.expand(-1, -1, num_types, -1)], dim=3)
        outputs: Tensor = lstm(seen.transpose(0, 1).flatten(1, 2))[0]
        return outputs.reshape(-1, num_problems, num_types, outputs.shape[2]).transpose(0, 1)


@cache
def shipped_policy() -> PlacementPolicy:
    """Return the trained policy."""
    arrays = {name: tensor.float() for name, tensor in load_file(POLICY_FILE).items()}
    num_hidden, num_features = arrays["cell.weight"].shape
    policy = PlacementPolicy(num_features, num_hidden)
    policy.load_state_dict(arrays)
    return policy.eval()


def placement_logits(problem: SchedulingProblem) -> Floats:
    """Return the trained policy's log-probabilities for one problem, shape (L, T + 1, T)."""
    with torch.no_grad():
        return np.asarray(shipped_policy()(policy_features(problem)[None])[0].double().numpy())
