import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from heterps_core.planning.search.learned import tapp_network
from heterps_core.planning.search.learned.tapp_network import (
    NUM_HIDDEN,
    TappPolicy,
    _AllocationNetwork,
    _group_vectors,
    _LayerInputs,
    _metric_entries,
    _PartitionNetwork,
    _successor_entries,
    layer_inputs,
    neighbour_logits,
)
from tests.builders import make_problem

NUM_GROUPS, NUM_TYPES = 3, 2


def make_policy(inputs, *, num_groups=NUM_GROUPS, num_types=NUM_TYPES, neighbour_bias=0.0, seed=0):
    torch.manual_seed(seed)
    return TappPolicy(
        inputs,
        num_types,
        num_groups=num_groups,
        neighbour_bias=neighbour_bias,
    )


def test_a_layer_enters_with_32_numbers_and_a_group_with_28_and_one_per_group():
    inputs = layer_inputs(make_problem(0, num_layers=6, num_types=2))
    policy = make_policy(inputs)

    word_vectors = policy.word_vectors(inputs.words)
    layers = torch.cat([word_vectors, inputs.metrics, inputs.successors], dim=1)
    groups = torch.zeros(4, 6, dtype=torch.int64)

    assert word_vectors.shape == (6, 16)
    assert inputs.metrics.shape == (6, 12)
    assert inputs.successors.shape == (6, 4)
    assert layers.shape == (6, 32)
    assert _PartitionNetwork(NUM_GROUPS)(layers).shape == (6, NUM_GROUPS)
    vectors = _group_vectors(word_vectors, inputs.metrics, groups, NUM_GROUPS)
    assert vectors.shape == (4, NUM_GROUPS, 28 + NUM_GROUPS)
    assert policy.allocation.encoder.input_size == 28 + NUM_GROUPS


def test_layers_of_one_kind_share_a_word():
    problem = make_problem(0, num_layers=4, num_types=2)
    kinds = ["relu", "embedding", "relu", "pooling"]
    layers = [replace(layer, kind=kind) for layer, kind in zip(problem.layers, kinds, strict=True)]

    inputs = layer_inputs(replace(problem, layers=tuple(layers)))

    assert inputs.words.tolist() == [0, 1, 0, 2]


def test_metrics_are_parameters_computation_and_activations_in_megabytes_and_time():
    problem = make_problem(3, num_layers=5, num_types=2)

    shares = layer_inputs(problem).metrics[:, [2, 6, 10]].numpy()

    for column, values in enumerate(
        [
            [layer.state_bytes for layer in problem.layers],
            [sum(layer.compute_seconds.values()) for layer in problem.layers],
            [layer.output_bytes_per_sample for layer in problem.layers],
        ]
    ):
        assert shares[:, column] == pytest.approx(np.array(values) / max(values), rel=1e-6)


def test_a_metric_becomes_four_entries():
    # By hand: mean 2, variance (4 + 4 + 0) / 3; log(1 + x) of 1, 5 and 3.
    entries = _metric_entries(np.array([0.0, 4.0, 2.0]))

    deviation = math.sqrt(8 / 3)
    logs = np.log([1.0, 5.0, 3.0])
    assert entries[:, 0] == pytest.approx([-2 / deviation, 2 / deviation, 0])
    assert entries[:, 1] == pytest.approx((logs - logs.mean()) / logs.std())
    assert entries[:, 2] == pytest.approx([0, 1, 0.5])
    assert entries[:, 3] == pytest.approx([0, 2 / 3, 1 / 3])


def test_a_metric_without_spread_stays_finite():
    assert np.isfinite(_metric_entries(np.zeros(4))).all()
    assert np.isfinite(_metric_entries(np.array([7.0]))).all()


def test_successors_are_numbered_from_1_and_missing_ones_are_minus_a_tenth():
    # By hand for four layers: layer 1 feeds layer 2 (2/4, sin(pi)), 2 feeds 3, 3 feeds 4, 4 feeds none.
    assert _successor_entries(4) == pytest.approx(
        np.array(
            [
                [0.5, 0.0, -0.1, -0.1],
                [0.75, -1.0, -0.1, -0.1],
                [1.0, 0.0, -0.1, -0.1],
                [-0.1, -0.1, -0.1, -0.1],
            ]
        )
    )


def test_a_group_is_the_mean_of_its_members_and_the_groups_that_they_feed():
    words, metrics = torch.randn(4, 16), torch.randn(4, 12)

    # Layers 0 and 3 in group 2, layers 1 and 2 in group 0, none in group 1.
    [vectors] = _group_vectors(words, metrics, torch.tensor([[2, 0, 0, 2]]), 3)

    members = torch.cat([words, metrics], dim=1)
    torch.testing.assert_close(vectors[2, :28], (members[0] + members[3]) / 2)
    torch.testing.assert_close(vectors[0, :28], (members[1] + members[2]) / 2)
    assert vectors[0, 28:].tolist() == [1, 0, 1]  # 1 feeds 2 in group 0, 2 feeds 3 in group 2
    assert vectors[2, 28:].tolist() == [1, 0, 0]  # 0 feeds 1 in group 0, 3 feeds none
    assert vectors[1].tolist() == [0.0] * 31


def test_attention_follows_its_formula(monkeypatch):
    monkeypatch.setattr(tapp_network, "TANH_CONSTANT", 2.0)
    torch.manual_seed(0)
    network = _AllocationNetwork(NUM_GROUPS, NUM_TYPES)
    outputs, state = torch.randn(1, NUM_GROUPS, 2 * NUM_HIDDEN), torch.randn(1, NUM_HIDDEN)

    logits = network.logits(state, network.memory_weight(outputs)).detach().numpy()

    w1, w2 = (layer.weight.detach().numpy() for layer in (network.memory_weight, network.state_weight))
    v, wd = (layer.weight.detach().numpy() for layer in (network.score_weight, network.output_weight))
    h, m = state[0].numpy(), outputs[0].numpy()
    e = np.array([(v @ np.tanh(w2 @ h + w1 @ m[j])).item() for j in range(NUM_GROUPS)])
    w = np.exp(e) / np.exp(e).sum()
    c = sum(w[j] * (w1 @ m[j]) for j in range(NUM_GROUPS))
    expected = 2.0 * np.tanh(wd @ np.concatenate([h, c]))
    assert logits[0] == pytest.approx(expected, abs=1e-6)


def test_the_decoder_starts_where_the_encoder_ends_and_is_fed_the_type_before():
    """Two groups decoded again, step by step, from the network's own cells."""
    torch.manual_seed(0)
    network = _AllocationNetwork(2, NUM_TYPES)
    vectors = torch.randn(1, 2, 30)

    types, log_probabilities = network.sample(vectors, 6, torch.Generator().manual_seed(0))

    outputs, (hidden, cell) = network.encoder(vectors)
    memory = network.memory_weight(outputs)
    start = network.decoder(network.previous_type.weight[NUM_TYPES][None], (hidden[1], cell[1]))
    for placement in range(6):
        first, second = types[0, placement].tolist()
        following = network.decoder(network.previous_type.weight[first][None], start)
        for step, (state, chosen) in enumerate([(start, first), (following, second)]):
            expected = torch.log_softmax(network.logits(state[0], memory), dim=1)[0, chosen]
            assert log_probabilities[0, placement, step].item() == pytest.approx(expected.item(), abs=1e-6)
    assert len({tuple(pair) for pair in types[0].tolist()}) > 1


def test_plans_give_each_layer_the_type_of_its_group():
    inputs = layer_inputs(make_problem(0, num_layers=6, num_types=2))
    policy = make_policy(inputs)
    with torch.no_grad():  # every layer into group 1
        policy.partition.layers[2].weight.zero_()
        policy.partition.layers[2].bias.copy_(torch.tensor([-50.0, 50.0, -50.0]))

    sample = policy.sample(4, 3, torch.Generator().manual_seed(0))

    assert sample.plans.shape == (12, 6)
    assert all(len(set(plan)) == 1 for plan in sample.plans.tolist())
    # Only the one group that has members counts: each of two types has a logit within 1 of 0.
    probabilities = sample.log_probabilities.exp()
    assert ((probabilities > 1 / (1 + math.exp(2))) & (probabilities < 1 / (1 + math.exp(-2)))).all()


def test_probability_counts_the_grouping_and_the_placement():
    """One layer and one group leave only the placement; the two types' probabilities then sum to one."""
    inputs = layer_inputs(make_problem(0, num_layers=1, num_types=2))
    policy = make_policy(inputs, num_groups=1)

    sample = policy.sample(1, 50, torch.Generator().manual_seed(0))

    by_type = {
        int(plan[0]): float(log_probability.exp())
        for plan, log_probability in zip(sample.plans, sample.log_probabilities.detach(), strict=True)
    }
    assert sum(by_type.values()) == pytest.approx(1, abs=1e-6)
    assert len(by_type) == 2


def test_a_step_along_the_gradient_moves_probability_to_the_better_plan():
    inputs = layer_inputs(make_problem(1, num_layers=4, num_types=2))
    policy = make_policy(inputs)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def share_on_target():
        """Mean share of layers on type 1, over many samples."""
        with torch.no_grad():
            return policy.sample(200, 2, torch.Generator().manual_seed(1)).plans.float().mean().item()

    before = share_on_target()
    for _ in range(25):
        sample = policy.sample(8, 2, generator)
        rewards = sample.plans.float().mean(dim=1)  # the better plan has more layers on type 1
        loss = -(sample.log_probabilities * (rewards - rewards.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert before < 0.65
    assert share_on_target() > before + 0.1
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_the_gradient_is_that_of_the_expected_reward():
    """The score-function estimate over all plans of one layer equals the derivative of the exact expectation."""
    inputs = _LayerInputs(words=torch.tensor([0]), metrics=torch.zeros(1, 12), successors=torch.zeros(1, 4))
    policy = make_policy(inputs, num_groups=1)
    weight = policy.allocation.output_weight.weight
    rewards = torch.tensor([1.0, 3.0])

    sample = policy.sample(1, 4_000, torch.Generator().manual_seed(0))
    of_type = {int(plan[0]): index for index, plan in enumerate(sample.plans)}
    log_table = torch.stack([sample.log_probabilities[of_type[index]] for index in range(2)])
    exact = torch.autograd.grad((log_table.exp() * rewards).sum(), weight, retain_graph=True)[0]
    gain = (sample.log_probabilities * (rewards[sample.plans[:, 0]] - 2.0)).mean()
    estimate = torch.autograd.grad(gain, weight)[0]

    torch.testing.assert_close(estimate, exact, atol=0.05, rtol=0)
    assert exact.abs().max() > 0.05


def test_with_a_neighbour_bias_untrained_plans_have_few_stages():
    inputs = layer_inputs(make_problem(0, num_layers=16, num_types=2))

    def mean_stages(neighbour_bias):
        policy = make_policy(inputs, num_groups=8, neighbour_bias=neighbour_bias)
        plans = policy.sample(50, 4, torch.Generator().manual_seed(0)).plans.numpy()
        return 1 + (plans[:, 1:] != plans[:, :-1]).sum(axis=1).mean()

    # 16 layers on two devices at random have 8.5 stages; 8 groups of neighbours have 4.5.
    assert mean_stages(0.0) > 6
    assert mean_stages(2.0) < 5


def test_neighbour_logits_are_squares_of_distances_in_groups():
    # By hand: layers at 1/8, 3/8, 5/8, 7/8 and groups at 1/4, 3/4 of the chain.
    by_hand = [[-3 / 16, -75 / 16], [-3 / 16, -27 / 16], [-27 / 16, -3 / 16], [-75 / 16, -3 / 16]]
    assert neighbour_logits(4, 2, bias=3.0).numpy() == pytest.approx(np.array(by_hand))
