"""A real PipeDream profile of AlexNet against published figures, and broken files."""

import re

import pytest

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.models.model_graph import LayerKind
from heterps_core.profiling.imported.pipedream import forward_flops, read_pipedream
from heterps_core.profiling.imported.pipedream_graph import OperationNode
from tests.paths import TESTS

ALEXNET = TESTS / "golden" / "pipedream" / "alexnet.graph.txt"
V100 = DEVICE_TYPES["gpu-v100"]

SMALL = """\
node1 -- Input -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=64.0, parameter_size=0.0
node2 -- Linear(in_features=4, out_features=2, bias=True) -- forward_compute_time=1.0, backward_compute_time=2.0, \
activation_size=32.0, parameter_size=40.0
node3 -- Linear(in_features=2, out_features=1, bias=True) -- forward_compute_time=0.5, backward_compute_time=0.25, \
activation_size=16.0, parameter_size=12.0
\tnode1 -- node2
\tnode2 -- node3
"""


@pytest.fixture(scope="module")
def alexnet():
    return read_pipedream(ALEXNET, V100, batch_size=None)


@pytest.fixture
def write(tmp_path):
    def written(text):
        path = tmp_path / "small.graph.txt"
        path.write_text(text)
        return path

    return written


def node(text, activation_bytes, parameter_bytes=0.0):
    return OperationNode(
        name="node1",
        text=text,
        forward_ms=1.0,
        backward_ms=1.0,
        activation_bytes=activation_bytes,
        parameter_bytes=parameter_bytes,
    )


def test_alexnet_has_its_published_parameters_and_products(alexnet):
    layers = alexnet.graph.layers

    # torchvision.models.alexnet: 61,100,840 parameters, and 0.71e9 multiplications with additions.
    assert sum(layer.parameter_bytes for layer in layers) == 4 * 61_100_840
    assert sum(layer.forward_flops_per_sample for layer in layers) / 2 == pytest.approx(0.714e9, rel=0.001)
    # 64 channels of 55 x 55 pixels.
    assert layers[0].output_bytes_per_sample == 4 * 64 * 55 * 55
    assert layers[-1].output_bytes_per_sample == 4 * 1000
    assert [layer.kind for layer in layers[:3]] == [
        LayerKind.CONVOLUTION,
        LayerKind.ELEMENTWISE,
        LayerKind.ELEMENTWISE,
    ]


def test_alexnet_is_a_chain_but_for_the_size_that_a_view_asks_for(alexnet):
    names = [layer.name for layer in alexnet.graph.layers]

    assert len(names) == 21
    assert names[0] == "node2 Conv2d"
    assert names[13] == "node15..node16 (2 operations)"
    assert names[-1] == "node23 Linear"


def test_times_are_those_of_the_file_without_the_loading_of_data(alexnet):
    profile = alexnet.profiles["gpu-v100"]
    operations = [line for line in ALEXNET.read_text().splitlines() if "Input" not in line]
    expected_ms = sum(
        float(text) for text in re.findall(r"ward_compute_time=([\d.]+)", "\n".join(operations))
    )

    found_ms = sum(timing.forward.median_ms + timing.backward.median_ms for timing in profile.timings)

    assert found_ms == pytest.approx(expected_ms)
    assert profile.batch_size == 256
    assert not profile.is_estimated
    assert "alexnet.graph.txt (PipeDream graph file, sha256 " in profile.timings[0].source


def test_what_the_file_lacks_is_estimated_and_says_so(alexnet):
    profile = alexnet.profiles["gpu-v100"]

    # Adam passes seven times over the 93,184 bytes of the first layer at 900 GB/s, and is launched twice.
    update_ms = 1e3 * (7 * 93_184 / 900e9 + 2 * 5e-6)
    assert profile.timings[0].update.median_ms == pytest.approx(update_ms)
    assert profile.timings[0].update.num_repeats == 0
    half = profile.half_batch_timings[0]
    assert half.is_estimated
    # The first layer is bound by its products, so all but the launch of 5 microseconds is halved.
    assert half.forward.median_ms == pytest.approx(0.005 + (22.316 - 0.005) / 2)
    assert 0.9 < profile.compute_parallel_fraction(batch_size=256) < 1


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        # 10 outputs of 3 channels, 5 x 2 kernel values each.
        (node("Conv2d(3, 2, kernel_size=(5, 2), stride=(1, 1))", (40.0,)), 2 * 10 * 3 * 5 * 2),
        (node("Conv2d(8, 8, kernel_size=(3, 3), stride=(1, 1), groups=4)", (40.0,)), 2 * 10 * 2 * 9),
        (node("Linear(in_features=7, out_features=5, bias=True)", (40.0,)), 2 * 10 * 7),
        # 12 output floats of width 3 are 4 steps, each of which uses all 60 parameters.
        (node("LSTM(2, 3)", (48.0, 8.0, 8.0), 240.0), 2 * 4 * 60),
        (node("Classifier(  (classifier): Linear(in_features=7, out_features=5, bias=True))", (40.0,)), 140),
        (node("ReLU(inplace)", (40.0,)), 0),
    ],
)
def test_products_follow_from_the_printed_module(operation, expected):
    assert forward_flops(operation) == expected


def test_a_state_nobody_reads_and_a_second_input_do_not_hinder_a_cut(write):
    times = "forward_compute_time=1.0, backward_compute_time=1.0"
    path = write(
        f"node1 -- Input0 -- {times}, activation_size=0.0, parameter_size=0.0\n"
        f"node2 -- LSTM(8, 2) -- {times}, activation_size=[160.0; 40.0; 40.0], parameter_size=96.0\n"
        f"node3 -- __getitem__(0) -- {times}, activation_size=160.0, parameter_size=0.0\n"
        f"node4 -- __getitem__(1) -- {times}, activation_size=40.0, parameter_size=0.0\n"
        f"node5 -- hidden -- {times}, activation_size=0.0, parameter_size=0.0\n"
        f"node6 -- Add -- {times}, activation_size=160.0, parameter_size=0.0 -- stage_id=1\n"
        "\tnode1 -- node2\n\tnode2 -- node3\n\tnode2 -- node4\n\tnode3 -- node6\n\tnode5 -- node6"
    )

    imported = read_pipedream(path, V100, batch_size=None)

    # The state of 40 bytes is one step of width 2 for 5 samples; the whole output leaves the LSTM.
    assert imported.profiles["gpu-v100"].batch_size == 5
    assert [layer.name for layer in imported.graph.layers] == [
        "node2 LSTM (2 operations)",
        "node3 __getitem__",
        "node5..node6 (2 operations)",
    ]
    assert imported.graph.layers[0].output_bytes_per_sample == (160 + 40 + 40) / 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.partition("activation_size=32")[0],
            "line 2: node2 lacks activation_size, parameter_size; is the file cut off",
        ),
        (
            lambda text: text[:-2],
            r"line 5: an edge must join two nodes of the file, got 'node'; is it cut off",
        ),
        (lambda text: text.rpartition("\tnode2")[0], "no edge joins node3 and 0 others to node2"),
        (lambda text: f"{text}\tnode3 -- node2\n", r"no cycle, but has: node\d -> node\d -> node\d"),
        (
            lambda text: text.replace("=1.0,", "=-1.0,"),
            "line 2: forward_compute_time .* not negative, got -1.0",
        ),
        (lambda text: text.replace("=1.0,", "=nan,"), "line 2: forward_compute_time must be finite"),
        (lambda text: text.replace("=1.0,", "=fast,"), "must be a number, got 'fast'"),
        (lambda text: text.replace("parameter_size=40.0", ""), "line 2: node2 lacks parameter_size"),
        (lambda text: text.replace("node3 -- Lin", "node2 -- Lin"), "line 3: node2 stands twice"),
        (lambda text: "hello\n", "line 1: must be 'node -- operation -- times and sizes'"),
        (lambda text: "", "holds no operation; is it a PipeDream graph file"),
    ],
)
def test_a_broken_file_is_told_by_its_line(write, change, message):
    with pytest.raises(DataError, match=message):
        read_pipedream(write(change(SMALL)), V100, batch_size=None)


def test_a_file_that_is_no_text_or_not_there_is_told(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    for name, message in (
        ("binary", "must be text"),
        ("missing", "cannot be read: No such file"),
        (".", "Is a d"),
    ):
        with pytest.raises(DataError, match=message):
            read_pipedream(tmp_path / name, V100, batch_size=None)


def test_a_batch_size_that_the_activations_contradict_is_refused(write):
    with pytest.raises(
        ConfigurationError, match=r"that of the file, 4 by the activation of node[23] .*, got 64"
    ):
        read_pipedream(write(SMALL), V100, batch_size=64)


def test_a_batch_size_that_nothing_tells_must_be_given(write):
    path = write(
        SMALL.replace("Linear(in_features=4, out_features=2, bias=True)", "ReLU()").replace(
            "Linear(in_features=2, out_features=1, bias=True)", "ReLU()"
        )
    )

    with pytest.raises(ConfigurationError, match="is given by no layer; say it with --profile-batch-size"):
        read_pipedream(path, V100, batch_size=None)
    assert read_pipedream(path, V100, batch_size=4).profiles["gpu-v100"].batch_size == 4
