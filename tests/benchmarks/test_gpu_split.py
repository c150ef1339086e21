import pytest
import torch

from tests.benchmarks import gpu_split

pytestmark = pytest.mark.slow


def test_without_a_gpu_there_are_no_figures_and_the_reason_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert gpu_split.run() == []
    assert "not measured: " in capsys.readouterr().out


def test_all_ways_are_measured_in_each_round():
    # The host stands for the GPU: what runs is the same.
    setting = gpu_split.Setting(
        64, num_cpu_workers=2, gpu="cpu", buckets_per_slot=50, num_rounds=2, steps_per_round=2
    )

    rounds = gpu_split.measure(setting)

    assert len(rounds) == 2
    assert all(set(speeds) == set(gpu_split.WAYS) and min(speeds.values()) > 0 for speeds in rounds)


def test_ratios_are_medians_of_those_within_a_round():
    rounds = [
        {"cpu_only": 1.0, "gpu_only": 2.0, "split": 4.0},
        {"cpu_only": 2.0, "gpu_only": 2.0, "split": 4.0},
        {"cpu_only": 8.0, "gpu_only": 2.0, "split": 8.0},
    ]

    values = {entry["name"]: entry["value"] for entry in gpu_split.figures_of(rounds, 64)}

    assert values["split_over_cpu_only_batch_64"] == pytest.approx(2.0)
    assert values["split_over_gpu_only_batch_64"] == pytest.approx(2.0)
    assert values["split_samples_per_s_batch_64"] == pytest.approx(4.0)
