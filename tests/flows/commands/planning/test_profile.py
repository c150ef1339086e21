import argparse
import json
from pathlib import Path

import pytest
import torch

from flows.commands.planning.profile import _profile_table, _write_profiles, add_arguments, run
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.profiling import profile_cache
from tests.heterps_core.profiling.builders import make_profile


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_table_shows_times_and_what_follows_from_them():
    lines = _profile_table(make_profile()).splitlines()

    assert lines[0] == "small on one unit of local-cpu, 100 samples: a machine, 2 cores"
    assert lines[4].split() == [
        "fc",
        "fully_connected",
        "1000.000",
        "2000.000",
        "400.000",
        "0.000",
        "1,000",
        "measured",
    ]
    assert "sum          4400.000 ms, 23 samples/s" in lines
    assert any("alpha 0.900" in line and "beta 0.400" in line for line in lines)


def test_an_unknown_device_type_is_answered_with_near_ones_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(profile_cache, "local_profiles", None)

    with pytest.raises(UnknownNameError, match=r"near are: gpu-t4, .*heterps catalogue shows all"):
        run(parse("--device-types", "gpu-t5"))


def test_profiles_are_written_by_device_type(tmp_path):
    _write_profiles(tmp_path / "profiles.json", [make_profile(), make_profile(device_type="gpu-t4")])

    document = json.loads((tmp_path / "profiles.json").read_text())

    assert document["schema_version"] == 1
    assert list(document["profiles"]) == ["local-cpu", "gpu-t4"]


def test_says_where_it_could_not_write(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot write .*No such file or directory"):
        _write_profiles(Path(tmp_path) / "missing" / "profiles.json", [make_profile()])


def test_a_gpu_that_is_not_there_is_missed_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    with pytest.raises(ConfigurationError, match="needs a CUDA device that torch sees"):
        run(parse("--device", "cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_beside_the_processor_and_named(tmp_path):
    path = tmp_path / "profiles.json"
    run(parse("--device", "cuda", "--output", str(path)))

    profiles = json.loads(path.read_text())["profiles"]
    card = torch.cuda.get_device_name(0)
    assert list(profiles) == ["local-cpu", "local-gpu"]
    assert card in profiles["local-gpu"]["hardware"]
    assert card not in profiles["local-cpu"]["hardware"]
    assert profiles["local-gpu"]["software"]["nvidia-driver"]
    assert 0.5 < profiles["local-gpu"]["sum_over_step"] < 2
    assert not profiles["local-gpu"]["is_estimated"]
