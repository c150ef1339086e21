"""Sailor's timing format, written by hand with round numbers."""

import gzip
import json

import pytest

from heterps_core.errors import ConfigurationError, DataError, UnknownNameError
from heterps_core.profiling.imported.sailor import read_sailor

# Two GPUs, layers of 100, 300 and 300 bytes: an embedding and a repeated layer.
SIZES = [(100, 8, 40), (300, 40, 40), (300, 40, 4)]
NETWORK = {"gpu-v100": 1e9, "RTX-3090": 2e9}


def times(forward, update=0.004):
    return {str(index): [forward, 2 * forward, update] for index in range(3)}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "GPT"
    folder.mkdir()
    v100 = {"1": {"1": times(0.006)}, "2": {"1": times(0.010), "2": times(0.005)}, "4": {"1": times(0.018)}}
    rtx = {"1": {"1": times(0.003)}, "2": {"1": times(0.004)}}
    (folder / "V100-16.json").write_text(json.dumps(v100))
    (folder / "RTX-3090.json").write_text(json.dumps(rtx))
    return folder


@pytest.fixture
def sizes_path(tmp_path):
    layers = {
        str(index): {"params_bytes": parameters, "act_input_bytes": entering, "act_output_bytes": leaving}
        for index, (parameters, entering, leaving) in enumerate(SIZES)
    }
    path = tmp_path / "llm_info.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"GPT": {"1": layers}}).encode()))
    return path


def read(folder, sizes_path, **changes):
    arguments = {"network_bytes_per_s": NETWORK, "tensor_parallel": 1, "batch_size": None, **changes}
    return read_sailor(folder, sizes_path, **arguments)


def test_every_gpu_is_taken_as_measured_at_the_largest_common_batch_and_its_half(folder, sizes_path):
    imported = read(folder, sizes_path)

    v100, rtx = imported.profiles["gpu-v100"], imported.profiles["RTX-3090"]
    assert (v100.batch_size, rtx.batch_size, v100.half_batch_size) == (2, 2, 1)
    assert not v100.is_estimated
    assert not rtx.is_estimated
    assert v100.timings[1].forward.median_ms == pytest.approx(10.0)
    assert v100.timings[1].backward.median_ms == pytest.approx(20.0)
    assert rtx.half_batch_timings[0].forward.median_ms == pytest.approx(3.0)
    # T(2) / T(1) of three layers with an update of 4 ms once on 100 and twice on 300 of 400 bytes: 7 ms.
    ratio = (3 * 18 + 7) / (3 * 30 + 7)
    assert v100.compute_parallel_fraction(batch_size=2) == pytest.approx((1 - ratio) / 0.5)
    assert rtx.all_reduce_link.bandwidth_bytes_per_s == 2e9


def test_the_update_is_shared_out_by_parameters_over_layers_of_different_size(folder, sizes_path):
    timings = read(folder, sizes_path).profiles["gpu-v100"].timings

    assert [timing.update.median_ms for timing in timings] == pytest.approx([1.0, 3.0, 3.0])


def test_sizes_come_from_the_file_of_sizes(folder, sizes_path):
    graph = read(folder, sizes_path).graph

    assert graph.name == "GPT"
    assert [layer.output_bytes_per_sample for layer in graph.layers] == [40, 40, 4]
    assert graph.state_bytes == 3 * 700


def test_a_batch_size_may_be_chosen_where_it_and_its_half_were_measured(folder, sizes_path):
    network = {"gpu-v100": 1e9}

    assert read(folder, sizes_path, network_bytes_per_s=network).profiles["gpu-v100"].batch_size == 4
    chosen = read(folder, sizes_path, network_bytes_per_s=network, batch_size=2)
    assert chosen.profiles["gpu-v100"].batch_size == 2
    with pytest.raises(ConfigurationError, match="there are: gpu-v100 2, 4; RTX-3090 2; got 4"):
        read(folder, sizes_path, batch_size=4)


def test_what_was_not_measured_is_told_with_what_was(folder, sizes_path):
    with pytest.raises(UnknownNameError, match=r"known are: RTX-3090, gpu-v100\. Did you mean 'RTX-3090'"):
        read(folder, sizes_path, network_bytes_per_s={"RTX-3080": 1e9})
    with pytest.raises(ConfigurationError, match="one that was measured, 1, 2, got 8"):
        read(folder, sizes_path, tensor_parallel=8)
    with pytest.raises(ConfigurationError, match="gpu-v100 none; got no common one"):
        read(folder, sizes_path, network_bytes_per_s={"gpu-v100": 1e9}, tensor_parallel=2)
    with pytest.raises(UnknownNameError, match=r"'OPT' is not a known model of .*known are: GPT"):
        read(folder.rename(folder.parent / "OPT"), sizes_path)


def test_a_source_that_is_no_folder_of_timings_is_told(folder, sizes_path):
    for source in (folder.parent / "none", folder / "V100-16.json", folder.parent / "empty"):
        (folder.parent / "empty").mkdir(exist_ok=True)
        with pytest.raises(DataError, match="must be a folder with a JSON file for each GPU"):
            read(source, sizes_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON, but cannot be read: .*; is it cut off"),
        ("[]", "the file must be a JSON object that is not empty"),
        ("[" * 100_000, "must be JSON"),
        ('{"1": {"1": {"0": [1, -2, 3]}}}', "1/1/0 must be three finite numbers that are not negative"),
        ('{"1": {"1": {"0": [1, NaN, 3]}}}', "1/1/0 must be three finite numbers"),
        ('{"1": {"1": {"0": [1, 2]}}}', "1/1/0 must be three finite numbers"),
        ('{"1": {"1": {"1": [1, 2, 3]}}}', r"layers must be numbered 0\.\.0, got \[1\]"),
        ('{"one": {"1": {"0": [1, 2, 3]}}}', "keys must be whole numbers, got 'one'"),
        ('{"1": {"1": {"0": [1, 2, 3]}}, "2": {"1": {"0": [1, 2, 3]}}}', "must hold the 3 layers"),
    ],
)
def test_a_broken_file_is_told(folder, sizes_path, content, message):
    (folder / "V100-16.json").write_text(content)

    with pytest.raises(DataError, match=message):
        read(folder, sizes_path, network_bytes_per_s={"gpu-v100": 1e9})


def test_broken_sizes_are_told(folder, sizes_path):
    whole = sizes_path.read_bytes()
    for content, message in (
        (whole[:-9], "must be JSON, but cannot be read"),
        (gzip.compress(b'{"GPT": {"2": {}}}'), "GPT must have sizes for tensor parallelism 1"),
        (
            gzip.compress(b'{"GPT": {"1": {"0": {"params_bytes": -1}}}}'),
            "GPT/1/0/params_bytes must be a number",
        ),
    ):
        sizes_path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(folder, sizes_path)
