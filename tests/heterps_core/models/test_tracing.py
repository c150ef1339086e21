"""Sizes and work of CTR-DNN worked by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.models.architectures.cross_deep import CrossLayers
from heterps_core.models.architectures.histories.hstu import HSTU
from heterps_core.models.architectures.histories.sasrec import SASRec
from heterps_core.models.architectures.parts import DotInteraction, mlp
from heterps_core.models.chain import build_chain
from heterps_core.models.model_graph import LayerKind
from heterps_core.models.tracing import trace_chain

FEATURES = FeatureSpec(num_dense=13, slot_rows=(1000,) * 26)


def test_ctr_dnn_has_the_sizes_of_its_picture():
    chain = build_chain("ctrdnn", FEATURES, seed=0)

    graph = trace_chain("ctrdnn", chain, dense_optimizer_values_per_parameter=2, row_optimizer=RowWiseAdagrad)
    embedding, first, relu, *_, output = graph.layers

    assert embedding.parameter_bytes == 26_000 * 16 * 4
    assert embedding.optimizer_state_bytes == 26_000 * 4
    assert embedding.is_sharded
    assert embedding.output_bytes_per_sample == (26 * 16 + 13) * 4
    assert embedding.looked_up_bytes_per_sample == 26 * 16 * 4
    assert first.kind is LayerKind.FULLY_CONNECTED
    assert first.forward_flops_per_sample == 2 * 429 * 400
    assert first.parameter_bytes == (429 * 400 + 400) * 4
    assert first.state_bytes == 3 * first.parameter_bytes
    assert (relu.kind, relu.state_bytes, relu.forward_flops_per_sample) == (LayerKind.ELEMENTWISE, 0, 0)
    assert (output.input_bytes_per_sample, output.output_bytes_per_sample) == (1600, 4)


def test_a_graph_changes_its_fingerprint_with_any_size():
    graphs = [
        trace_chain(
            "ctrdnn",
            build_chain("ctrdnn", FeatureSpec(num_dense=13, slot_rows=(rows,) * 26), seed=0),
            dense_optimizer_values_per_parameter=2,
            row_optimizer=RowWiseAdagrad,
        )
        for rows in (1000, 1000, 1001)
    ]

    assert graphs[0].fingerprint() == graphs[1].fingerprint() != graphs[2].fingerprint()


LENGTH, WIDTH, HEADS, HIDDEN = 5, 16, 4, 32
PROJECTIONS = 2 * LENGTH * WIDTH * 4 * WIDTH
"""Of queries, keys, values and output."""

SCORES = 2 * 2 * LENGTH * LENGTH * WIDTH
"""Queries by keys, and weights by values; as much for any number of heads."""


class Trained(nn.Module):
    """A module, or a function beside a parameter."""

    def __init__(self, run, module=None):
        super().__init__()
        self.module = module or nn.Linear(1, 1)
        self._run = run

    def forward(self, rows):
        return self._run(self.module, rows)


def in_heads(rows):
    return rows.view(len(rows), LENGTH, HEADS, -1).transpose(1, 2)


class Unseen(torch.autograd.Function):
    """A product that torch does not run."""

    @staticmethod
    def forward(context, rows):
        return torch.from_numpy(rows.detach().numpy() @ rows.detach().numpy().swapaxes(1, 2))

    @staticmethod
    def backward(context, gradient):
        return torch.zeros(len(gradient), LENGTH, WIDTH)


def layer_of(module):
    """Trace a module of sequences beside an embedding."""
    embedding = next(
        build_chain("ctrdnn", FeatureSpec(num_dense=0, slot_rows=(10,) * LENGTH), seed=0).children()
    )
    whole = nn.Sequential()
    whole.add_module("embedding", embedding)
    whole.add_module("shape", nn.Unflatten(1, (LENGTH, WIDTH)))
    whole.add_module("block", module)
    graph = trace_chain("m", whole, dense_optimizer_values_per_parameter=2, row_optimizer=RowWiseAdagrad)
    return graph.layers[-1]


def lstm(module, rows):
    return module(rows)[0]


@pytest.mark.parametrize(
    ("module", "forward"),
    [
        (
            Trained(lambda a, x: a(x, x, x)[0], nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)),
            PROJECTIONS + SCORES,
        ),
        (
            Trained(
                lambda a, x: a(x, x, x, need_weights=False)[0],
                nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
            ),
            PROJECTIONS + SCORES,
        ),
        (
            nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True),
            PROJECTIONS + SCORES + 2 * 2 * LENGTH * WIDTH * HIDDEN,
        ),
        (Trained(lambda _, x: F.scaled_dot_product_attention(in_heads(x), in_heads(x), in_heads(x))), SCORES),
        (Trained(lambda _, x: torch.bmm(x, x.transpose(1, 2))), SCORES / 2),
        (Trained(lambda _, x: torch.einsum("bld,bmd->blm", x, x)), SCORES / 2),
        (nn.Conv1d(LENGTH, 7, 3), 2 * 7 * LENGTH * 3 * (WIDTH - 2)),
        (Trained(lstm, nn.GRU(WIDTH, HIDDEN, batch_first=True)), 2 * LENGTH * 3 * HIDDEN * (WIDTH + HIDDEN)),
        (Trained(lstm, nn.LSTM(WIDTH, HIDDEN, batch_first=True)), 2 * LENGTH * 4 * HIDDEN * (WIDTH + HIDDEN)),
    ],
    ids=["mha", "mha-fused", "encoder", "sdpa", "bmm", "einsum", "conv", "gru", "lstm"],
)
def test_products_are_counted_as_worked_by_hand(module, forward):
    layer = layer_of(module)

    assert layer.forward_flops_per_sample == forward
    assert layer.uncounted == ()
    # Gradients of both factors; a recurrent layer has none of its first state.
    backward = layer.backward_flops_per_sample
    assert backward is None or 1.5 * forward < backward < 2 * forward


def of_rows(module):
    """Run a module on the values of a sequence side by side."""
    return nn.Sequential(nn.Flatten(), module)


def attention(query, key, value):
    return F.scaled_dot_product_attention(query, key, value)


SEES = torch.ones(LENGTH, LENGTH).tril().bool()
ALL_SEEN = torch.ones(1, 1, 1, LENGTH, dtype=torch.bool)
MODULES = [
    nn.Linear(WIDTH, 7),
    nn.Linear(WIDTH, 7, bias=False),
    nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 3), nn.Softmax(-1)),
    of_rows(nn.Linear(LENGTH * WIDTH, 11)),
    of_rows(mlp(LENGTH * WIDTH, [8, 4], dropout=0.2)),
    of_rows(CrossLayers(LENGTH * WIDTH, num_layers=2, rank=3)),
    nn.Conv1d(LENGTH, 7, 3),
    nn.Conv1d(LENGTH, 5, 3, stride=2, padding=1),
    nn.Sequential(nn.Unflatten(2, (4, 4)), nn.Conv2d(LENGTH, 3, 2)),
    nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True),
    nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, batch_first=True, norm_first=True, dropout=0.0),
    Trained(lambda a, x: a(x, x, x)[0], nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    Trained(lambda a, x: a(x, x, x, attn_mask=~SEES)[0], nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    Trained(lambda a, x: attention(a(x), x, x), nn.Linear(WIDTH, WIDTH)),
    Trained(lambda a, x: torch.einsum("bld,bmd->blm", a(x), x), nn.Linear(WIDTH, WIDTH)),
    Trained(lambda a, x: torch.baddbmm(x, x @ x.transpose(1, 2), a(x)), nn.Linear(WIDTH, WIDTH)),
    DotInteraction(LENGTH),
    Trained(lambda a, x: a(x, ALL_SEEN, is_last=False), SASRec.block(SASRec, WIDTH, most=LENGTH)),
    Trained(lambda a, x: a(x, ALL_SEEN, is_last=False), HSTU.block(HSTU, WIDTH, most=LENGTH)),
    nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * LENGTH, 1)),
]


@pytest.mark.parametrize("module", MODULES, ids=map(str, range(len(MODULES))))
def test_counts_are_those_of_torchs_own_counter_in_training(module):
    layer, entering = layer_of(module), torch.randn(8, LENGTH, WIDTH, requires_grad=True)
    counter = FlopCounterMode(display=False)

    with sdpa_kernel(SDPBackend.MATH), counter:
        leaving = module.train()(entering.clone())
        forward = counter.get_total_flops() / 8
        leaving.sum().backward()

    backward = layer.backward_flops_per_sample or 2 * layer.forward_flops_per_sample
    assert layer.forward_flops_per_sample == pytest.approx(forward, rel=0.02)
    assert backward == pytest.approx(counter.get_total_flops() / 8 - forward, rel=0.02)
    assert forward > 0


class PublishedUnit(nn.Module):
    """A unit as DLRMv4-HSTU has it in MLPerf Training 6.1: its output takes gate, mixed values and their product."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.projections = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.output = nn.Linear(3 * width, width)

    def forward(self, tokens):
        gate, query, key, value = F.silu(self.projections(self.norm(tokens))).chunk(4, dim=2)
        mixed = F.silu(query @ key.transpose(1, 2)) @ value
        return tokens + self.output(torch.cat([gate, mixed, gate * mixed], 2))


def published_flops(length, width, units):
    """Return the operations of projections, attention and output layers of a sample's training step.

    Attention skips what the causal mask hides, and its backward pass makes the scores again: 3.5 times a half.
    """
    projections = 3 * units * 2 * length * width * 4 * width
    seen = 3.5 * units * 4 * length * length * width / 2
    return projections, seen, 3 * units * 2 * length * 3 * width * width


def test_the_units_of_dlrmv4_are_counted_as_published():
    # Three units of width 512 over 4,096 values.
    assert published_flops(4096, 512, 3) == pytest.approx((77.3e9, 180.4e9, 58.0e9), rel=0.001)
    projections, seen, output = published_flops(LENGTH, WIDTH, 1)

    layer = layer_of(PublishedUnit(WIDTH))

    # Here all scores are products, and none is made again.
    expected = projections + seen * 2 * 3 / 3.5 + output
    assert layer.forward_flops_per_sample + (
        layer.backward_flops_per_sample or 2 * layer.forward_flops_per_sample
    ) == pytest.approx(expected, rel=1e-9)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_products_of_a_scripted_module_are_counted():
    layer = layer_of(torch.jit.script(nn.Linear(WIDTH, 8)))

    assert layer.forward_flops_per_sample == 2 * LENGTH * WIDTH * 8


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (Trained(lambda b, x: b(x, x), nn.Bilinear(WIDTH, WIDTH, 4)), ("aten::_trilinear",)),
        (Trained(lambda _, x: torch.cdist(x, x)), ("aten::_cdist_backward", "aten::_cdist_forward")),
        (Trained(lambda _, x: Unseen.apply(x)), ("Unseen",)),
        (Trained(lambda _, x: torch.relu(x)), ()),
        (nn.LayerNorm(WIDTH), ()),
    ],
)
def test_work_without_a_formula_is_named(module, names):
    assert layer_of(module).uncounted == names


class Counting(nn.Module):
    num_batches = 0

    def forward(self, values: Tensor) -> Tensor:
        self.num_batches += self.training
        return values


def test_tracing_leaves_statistics_modes_counts_and_random_numbers_as_they_were():
    norm, counting = nn.BatchNorm1d(LENGTH), Counting()
    frozen = nn.Sequential(norm, nn.Dropout(0.5).eval(), counting)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()

    layer_of(frozen)

    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(norm.running_var, torch.ones(LENGTH))
    assert norm.num_batches_tracked == 0
    assert [module.training for module in frozen.modules()] == [True, True, False, True]
    assert counting.num_batches == 0


def test_packed_sequences_are_counted_by_their_mean_length():
    features = FeatureSpec(
        num_dense=0, slot_rows=(9, 9), slot_lengths=(1, 800), slot_poolings=("sum", "sequence")
    )
    chain = build_chain("din(embedding_dim=8)", features, seed=1)

    half, whole = (
        trace_chain(
            "din",
            chain,
            dense_optimizer_values_per_parameter=0,
            row_optimizer=RowWiseAdagrad,
            mean_lengths=(1.0, mean),
        )
        for mean in (100.0, 200.0)
    )

    # Of each value four vectors go into 36 columns, and these into one weight; 100 is padded to 112, 200 to 224.
    of_values = 2 * (4 * 8 * 36 + 36)
    query = 2 * 8 * 8
    assert half.layers[1].forward_flops_per_sample == 112 * of_values + query
    assert whole.layers[1].forward_flops_per_sample == 224 * of_values + query
    assert [graph.layers[0].output_bytes_per_sample for graph in (half, whole)] == [
        4 * (8 + 100 * 8 + 1),
        4 * (8 + 200 * 8 + 1),
    ]
    assert [graph.layers[0].looked_up_bytes_per_sample for graph in (half, whole)] == [
        4 * 8 * 101,
        4 * 8 * 201,
    ]


def test_what_a_sequence_of_several_rows_takes_is_divided_among_them():
    features = FeatureSpec(
        num_dense=0, slot_rows=(9, 9), slot_lengths=(1, 800), slot_poolings=("sum", "sequence")
    )
    width, values, rows = 8, 112, 4

    graph = trace_chain(
        "hstu",
        build_chain("hstu(embedding_dim=8)", features, seed=1),
        dense_optimizer_values_per_parameter=0,
        row_optimizer=RowWiseAdagrad,
        mean_lengths=(1.0, 100.0),
        rows_per_list=(1.0, float(rows)),
    )

    # Two blocks make four vectors of each token, and scores and mixtures for each candidate; the first one also has
    # scores and mixtures between the values, 100 of which are padded to 112, and an output for each token.
    tokens = values + rows
    of_blocks = 2 * (2 * tokens * width * 4 * width + 2 * 2 * rows * tokens * width)
    of_first = 2 * 2 * values * values * width + 2 * tokens * width * width
    of_candidates = 2 * rows * width * width + 2 * rows * width * width
    embedding, encoder = graph.layers[:2]
    assert encoder.forward_flops_per_sample == (of_blocks + of_first + of_candidates) / rows
    assert embedding.output_bytes_per_sample == 4 * (8 + 100 * 8 // rows + 1)
    assert embedding.looked_up_bytes_per_sample == 4 * 8 * (1 + 100 // rows)
