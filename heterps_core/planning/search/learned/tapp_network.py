"""The two networks of TAPP: one sorts layers into groups, one places the groups on device types.

Mao et al., DNN Training for Task Allocation through Pipeline Parallelism Based on Distributed Deep Reinforcement
Learning (Appl. Sci. 2021, 11(11), 4785), after the hierarchical planner of Mirhoseini et al. (ICLR 2018), whose
attention and placement formulas are used. Rewards are no affair of the networks.

Shape legend: L = layers, T = device types, G = groups, H = hidden units, M = groupings, K = placements of each
grouping, P = M * K plans.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heterps_core.planning.cost_model.arrays import Floats
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.units import BYTES_PER_MIB

WORD_WIDTH = 16
METRIC_WIDTH = 12
"""Parameters, computation and activation size, in four numbers each."""

SUCCESSOR_WIDTH = 4
"""Two successors in two numbers each."""

LAYER_WIDTH = WORD_WIDTH + METRIC_WIDTH + SUCCESSOR_WIDTH
NO_SUCCESSOR = -0.1

NUM_HIDDEN = 64
"""H of all networks. The ancestor's 512 take some 50 times the arithmetic, for chains of dozens of layers."""

TANH_CONSTANT = 1.0
"""C. Bounds how sure the allocation network can be: with 1 no type among four gets more than 71 %."""

_MICROSECONDS_PER_S = 1e6


class _LayerInputs(NamedTuple):
    """Inputs of the networks for the L layers of a problem."""

    words: Tensor
    """Number of each layer's kind, shape (L,): the paper's operation names, here in a dictionary of the problem's."""

    metrics: Tensor
    """Shape (L, 12)."""

    successors: Tensor
    """Shape (L, 4)."""


def layer_inputs(problem: SchedulingProblem) -> _LayerInputs:
    """Return the inputs of both networks for a chain.

    The paper counts GFLOPs; `problem.json` holds none, so the mean of a layer's compute time over the device types
    stands in. How a number becomes four entries is not printed in the paper: see `_metric_entries`.
    """
    kinds = list(dict.fromkeys(layer.kind for layer in problem.layers))
    metrics = [
        _metric_entries(np.array(values))
        for values in (
            [layer.state_bytes / BYTES_PER_MIB for layer in problem.layers],
            [
                float(np.mean(list(layer.compute_seconds.values()))) * _MICROSECONDS_PER_S
                for layer in problem.layers
            ],
            [layer.output_bytes_per_sample / BYTES_PER_MIB for layer in problem.layers],
        )
    ]
    return _LayerInputs(
        words=torch.tensor([kinds.index(layer.kind) for layer in problem.layers]),
        metrics=torch.tensor(np.concatenate(metrics, axis=1), dtype=torch.float32),
        successors=torch.tensor(_successor_entries(problem.num_layers), dtype=torch.float32),
    )


def _metric_entries(values: Floats) -> Floats:
    """Return four entries for one metric of L layers, shape (L, 4).

    The standardised value, the standardised log(1 + value), the share of the largest, and the rank in [0, 1):
    megabytes of embedding tables, taken as they are, would drown every other entry.
    """
    ranks = values.argsort(kind="stable").argsort(kind="stable") / values.size
    shares = values / (values.max() or 1.0)
    return np.stack([_standardised(values), _standardised(np.log1p(values)), shares, ranks], axis=1)


def _standardised(values: Floats) -> Floats:
    return np.asarray((values - values.mean()) / (values.std() or 1.0))


def _successor_entries(num_layers: int) -> Floats:
    """Return two entries for each of two successors, shape (L, 4), layers being numbered from 1.

    Layer i has the entries i / L and sin(2 pi i / L) as a successor. A chain's layers have one successor, the
    last has none; what is missing is -0.1.
    """
    entries = np.full((num_layers, SUCCESSOR_WIDTH), NO_SUCCESSOR)
    share = np.arange(2, num_layers + 1) / num_layers
    entries[:-1, 0], entries[:-1, 1] = share, np.sin(2 * np.pi * share)
    return entries


class _PartitionNetwork(nn.Module):
    """Feed-forward: 32 numbers of a layer -> logits over the G groups."""

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(LAYER_WIDTH, NUM_HIDDEN), nn.ReLU(), nn.Linear(NUM_HIDDEN, num_groups)
        )

    def forward(self, layers: Tensor) -> Tensor:
        """Return log-probabilities of the groups, shape (L, 32) -> (L, G)."""
        return torch.log_softmax(self.layers(layers), dim=-1)


def neighbour_logits(num_layers: int, num_groups: int, *, bias: float) -> Tensor:
    """Return what is added to the logits of the groups, shape (L, G), so that neighbouring layers begin in one group.

    Group g of G has its place at (g + 1/2) / G of the chain, and a layer loses `bias` times the square of its
    distance from there, counted in groups. Untrained networks group layers at random without it: half of the
    neighbours in a chain then stand on different devices, and a plan of 16 layers has 7 stages.
    """
    layers = (torch.arange(num_layers) + 0.5) / num_layers
    groups = (torch.arange(num_groups) + 0.5) / num_groups
    return -bias * ((layers[:, None] - groups) * num_groups) ** 2


def _group_vectors(word_vectors: Tensor, metrics: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return what the allocation network sees of each group, shape (M, G, 28 + G).

    The means of the members' word vectors (L, 16) and metrics (L, 12), then one number per group: 1 where a member
    feeds a layer of that group. A group without members is all zeros. `groups` are those of the layers, shape (M, L).
    """
    members = nn.functional.one_hot(groups, num_groups).float()  # (M, L, G)
    sums = members.transpose(1, 2) @ torch.cat([word_vectors, metrics], dim=1)  # (M, G, 28)
    means = sums / members.sum(dim=1).clamp(min=1)[:, :, None]
    feeds = members[:, :-1].transpose(1, 2) @ members[:, 1:]  # (M, G, G)
    return torch.cat([means, feeds.clamp(max=1)], dim=2)


class _AllocationNetwork(nn.Module):
    """Sequence to sequence with attention: vectors of the groups -> a device type for each, in order.

    A bidirectional LSTM reads the groups; an LSTM places them one by one, fed a vector of the type before (a learned
    one at the start). With m_j the encoder's output for group j and h_i the decoder's state,

        e_ij = v . tanh(W2 h_i + W1 m_j),   c_i = sum over j of softmax_j(e_ij) * W1 m_j,
        logits_i = C * tanh(Wd [h_i ; c_i]).
    """

    def __init__(self, num_groups: int, num_types: int) -> None:
        super().__init__()
        group_width = WORD_WIDTH + METRIC_WIDTH + num_groups
        self.encoder = nn.LSTM(group_width, NUM_HIDDEN, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTMCell(NUM_HIDDEN, NUM_HIDDEN)
        self.previous_type = nn.Embedding(num_types + 1, NUM_HIDDEN)
        self.memory_weight = nn.Linear(2 * NUM_HIDDEN, NUM_HIDDEN, bias=False)  # W1
        self.state_weight = nn.Linear(NUM_HIDDEN, NUM_HIDDEN, bias=False)  # W2
        self.score_weight = nn.Linear(NUM_HIDDEN, 1, bias=False)  # v
        self.output_weight = nn.Linear(2 * NUM_HIDDEN, num_types, bias=False)  # Wd

    def sample(
        self, vectors: Tensor, num_placements: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw K placements of the groups, vectors of shape (M, G, 28 + G) as from `_group_vectors`.

        Returns:
            The type of each group, shape (M, K, G), and log P of it, of the same shape.
        """
        num_groupings, num_groups, _ = vectors.shape
        outputs, (last_hidden, last_cell) = self.encoder(vectors)
        memory = self.memory_weight(outputs).repeat_interleave(num_placements, dim=0)  # (P, G, H)
        # The decoder takes over where the backward pass ends, at the first group.
        state = (
            last_hidden[1].repeat_interleave(num_placements, dim=0),
            last_cell[1].repeat_interleave(num_placements, dim=0),
        )
        start = self.previous_type.num_embeddings - 1
        previous = torch.full((num_groupings * num_placements,), start)
        types, log_probabilities = [], []
        for _ in range(num_groups):
            state = self.decoder(self.previous_type(previous), state)
            log_table = torch.log_softmax(self.logits(state[0], memory), dim=1)  # (P, T)
            previous = torch.multinomial(log_table.detach().exp(), 1, generator=generator)[:, 0]
            types.append(previous)
            log_probabilities.append(log_table.gather(1, previous[:, None])[:, 0])
        shape = (num_groupings, num_placements, num_groups)
        return torch.stack(types, dim=1).view(shape), torch.stack(log_probabilities, dim=1).view(shape)

    def logits(self, state: Tensor, memory: Tensor) -> Tensor:
        """Return the logits of the types for one group from h_i and all W1 m_j, (P, H) and (P, G, H) -> (P, T)."""
        scores = self.score_weight(torch.tanh(self.state_weight(state)[:, None] + memory))  # (P, G, 1)
        context = (torch.softmax(scores, dim=1) * memory).sum(dim=1)
        return TANH_CONSTANT * torch.tanh(self.output_weight(torch.cat([state, context], dim=1)))


class _TappSample(NamedTuple):
    """P plans with their log-probabilities."""

    plans: Tensor
    """Device type of each layer, shape (P, L)."""

    log_probabilities: Tensor
    """log P(grouping) + log P(placement | grouping), shape (P,)."""


class TappPolicy(nn.Module):
    """Both networks and the word vectors that they share; samples plans for one problem.

    The bias of `neighbour_logits` is not learned.
    """

    def __init__(
        self, inputs: _LayerInputs, num_types: int, *, num_groups: int, neighbour_bias: float = 0.0
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.num_groups = num_groups
        self.word_vectors = nn.Embedding(int(inputs.words.max()) + 1, WORD_WIDTH)
        self.neighbour_logits = neighbour_logits(len(inputs.words), num_groups, bias=neighbour_bias)
        self.partition = _PartitionNetwork(num_groups)
        self.allocation = _AllocationNetwork(num_groups, num_types)

    def sample(self, num_groupings: int, num_placements: int, generator: torch.Generator) -> _TappSample:
        """Draw groupings, and placements of each.

        The log-probability of a placement counts only groups that have members: the type of an empty one
        changes no plan.
        """
        word_vectors = self.word_vectors(self.inputs.words)
        layers = torch.cat([word_vectors, self.inputs.metrics, self.inputs.successors], dim=1)
        log_table = torch.log_softmax(self.partition(layers) + self.neighbour_logits, dim=-1)  # (L, G)
        groups = torch.multinomial(
            log_table.detach().exp(), num_groupings, replacement=True, generator=generator
        ).T  # (M, L)
        of_grouping = log_table[torch.arange(groups.shape[1]), groups].sum(dim=1)  # (M,)
        vectors = _group_vectors(word_vectors, self.inputs.metrics, groups, self.num_groups)
        types, of_types = self.allocation.sample(vectors, num_placements, generator)
        has_members = nn.functional.one_hot(groups, self.num_groups).amax(dim=1)[:, None]  # (M, 1, G)
        of_placement = (of_types * has_members).sum(dim=2)  # (M, K)
        plans = types.gather(2, groups[:, None].expand(-1, num_placements, -1))  # (M, K, L)
        return _TappSample(
            plans=plans.flatten(end_dim=1),
            log_probabilities=(of_grouping[:, None] + of_placement).flatten(),
        )
