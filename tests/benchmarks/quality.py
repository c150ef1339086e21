"""How well each model learns with its defaults, in one epoch: AUC and log-loss on the latest fifth, several seeds.

- Rows: a file in the Criteo format, by `--data`, or the synthetic stream, whose best reachable AUC is known. Beside
  the models stands a logistic regression of scikit-learn, its penalty chosen on the latest training rows.
- Precision: each model in bfloat16 less the same in float32, seed by seed.
- Attention: DIN beside the same network with the mean of the history, on rows whose clicks depend on those values of
  the history that fit the candidate.
- Two labels: MMoE on both beside MMoE on each alone, which has a gate and a tower less and else the same parameters.

Trainings run in one process. Seconds are of this process's processor.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from heterps_core.data.dataset import PreparedDataset
from heterps_core.judging.quality import ClickQuality
from heterps_core.training.job import TrainingConfig, default_batch_size, default_dense_learning_rate
from heterps_core.training.tuning.in_one_process import train_in_turns
from infra.workspace import Workspace
from tasks.data import prepare_data
from tasks.judging.baseline import SampledRows, logistic_regression, measure_baseline
from tasks.sources import ClickSource
from tests.benchmarks.quality_streams import history_stream, two_label_stream

MODELS = (
    *("cross-deep", "lr", "wide-deep", "deepfm", "dlrm", "dcnv2"),
    *("rankmixer", "wukong", "din", "mmoe", "ple", "ctrdnn", "2emb"),
)
"""Without `ctrdnn-16`, `matchnet` and `nce`, on which plans are compared. `din` has no sequence here."""

NUM_SEEDS = 5
STREAM_ROWS = 50_000
MEAN_POOLED = "tests.benchmarks.quality_streams:MeanPooled"
LABELS = ("click", "buy")


class Trained(NamedTuple):
    """What trainings of one model from several seeds came to."""

    qualities: list[ClickQuality]
    seconds: float
    """Of processor time, mean of a training."""

    def spread(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of "auc" or "log_loss" over the seeds."""
        values = [getattr(quality, name) for quality in self.qualities]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    def row(self, name: str, gap_to: float | None = None) -> str:
        """Return a line of a table."""
        auc, log_loss = self.spread("auc"), self.spread("log_loss")
        gap = "" if gap_to is None else f"{gap_to - auc[0]:>10.4f}"
        return (
            f"{name:>24}{auc[0]:>9.4f} +- {auc[1]:.4f}{log_loss[0]:>9.4f} +- {log_loss[1]:.4f}"
            f"{self.seconds:>8.1f} s{gap}"
        )


def run(*, seed: int = 0, data: str | None = None, num_cases: int = NUM_SEEDS) -> list[dict[str, Any]]:
    """Train, print tables and return their figures in the form of the benchmark contract."""
    torch.set_num_threads(1)
    seeds = range(seed, seed + num_cases)
    print(f"load average {os.getloadavg()[0]:.1f}; seeds {seeds.start}..{seeds.stop - 1}", flush=True)
    figures = quality_of_models(MODELS, seeds, data)
    if data is None:
        figures += gain_of_attention(seeds) + gain_of_two_labels(seeds)
    print(f"load average {os.getloadavg()[0]:.1f}")
    return figures


def quality_of_models(models: Sequence[str], seeds: range, data: str | None) -> list[dict[str, Any]]:
    """Train each model on the rows of a file, or of the synthetic stream."""
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(root=Path(folder)).create()
        clicks = prepare_data.fn(workspace, ClickSource(data=data))
        print(clicks.summary)
        best = None if clicks.best_reachable is None else clicks.best_reachable.auc
        baseline = measure_baseline(logistic_regression, SampledRows.of(clicks.open()))
        if isinstance(baseline, str):
            print(f"no logistic regression: {baseline}")
        else:
            figures += _figures("logistic_regression", linear := Trained([baseline.quality], 0.0))
            print(linear.row("logistic regression", best), flush=True)
        for model in models:
            trained = train(clicks.open(), model, seeds)
            print(trained.row(model, best), flush=True)
            figures += _figures(model, trained)
            rounded = train(clicks.open(), model, seeds, precision="bfloat16")
            figures += _differences(model, trained, rounded)
            figures.append(
                _figure(f"{model}_processor_seconds", trained.seconds, unit="s", higher_is_better=False)
            )
        if best is not None:
            figures.append(_figure("best_reachable_auc", best))
    return figures


def gain_of_attention(seeds: range) -> list[dict[str, Any]]:
    """Train DIN and the network with the mean of the history on rows where attention must pay."""
    with tempfile.TemporaryDirectory() as folder:
        stream = history_stream(Path(folder) / "history", num_rows=STREAM_ROWS, seed=seeds.start)
        assert stream.without is not None
        print(
            f"history: AUC of the truth {stream.best.auc:.4f}, without the candidate {stream.without.auc:.4f}"
        )
        figures = []
        aucs = {}
        for name, model in (("din", "din"), ("mean_pooling", MEAN_POOLED)):
            trained = train(stream.dataset, model, seeds)
            print(trained.row(name, stream.best.auc), flush=True)
            figures += _figures(f"history_{name}", trained)
            aucs[name] = trained.spread("auc")[0]
    return [*figures, _figure("din_less_mean_pooling", aucs["din"] - aucs["mean_pooling"])]


def gain_of_two_labels(seeds: range) -> list[dict[str, Any]]:
    """Train MMoE on both labels, each in turn the first, which is the one that is judged, and on each alone."""
    figures = []
    for first, other in (LABELS, LABELS[::-1]):
        aucs = {}
        for name, labels in (("both", (first, other)), ("alone", (first,))):
            with tempfile.TemporaryDirectory() as folder:
                stream = two_label_stream(
                    Path(folder) / "rows", labels, num_rows=STREAM_ROWS, seed=seeds.start
                )
                trained = train(stream.dataset, "mmoe", seeds)
            print(trained.row(f"mmoe, {first}, {name}", stream.best.auc), flush=True)
            figures += _figures(f"mmoe_{first}_{name}", trained)
            aucs[name] = trained.spread("auc")[0]
        figures.append(_figure(f"mmoe_{first}_both_less_alone", aucs["both"] - aucs["alone"]))
    return figures


def default_config(dataset: PreparedDataset, model: str, seed: int) -> TrainingConfig:
    """Return the numbers that a model is trained with by default, in one process and one epoch."""
    return TrainingConfig(
        batch_size=default_batch_size(dataset.num_train_rows),
        num_microbatches=1,
        num_epochs=1,
        seed=seed,
        dense_learning_rate=default_dense_learning_rate(model),
    )


def train(dataset: PreparedDataset, model: str, seeds: range, *, precision: str = "float32") -> Trained:
    """Train a model with its defaults from each seed, and judge it on the held-out rows."""
    qualities, started_s = [], time.process_time()
    for seed in seeds:
        config = replace(default_config(dataset, model, seed), precision=precision)
        rated = (dataset.num_train_rows, dataset.manifest.num_rows)
        qualities += train_in_turns(dataset, model, config, rated=rated, num_turns=1)
    return Trained(qualities, (time.process_time() - started_s) / len(seeds))


def _differences(name: str, trained: Trained, rounded: Trained) -> list[dict[str, Any]]:
    """Return by how much bfloat16 is above float32, and the standard deviation of that over the seeds."""
    figures = []
    for field in ("auc", "log_loss"):
        pairs = zip(rounded.qualities, trained.qualities, strict=True)
        differences = [getattr(half, field) - getattr(whole, field) for half, whole in pairs]
        mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
        print(f"{'bfloat16 less float32':>40} {field} {mean:+.5f} +- {deviation:.5f}", flush=True)
        figures.append(_figure(f"{name}_{field}_bfloat16_less_float32", mean, unit=field))
        figures.append(_figure(f"{name}_{field}_bfloat16_less_float32_deviation", deviation, unit=field))
    return figures


def _figures(name: str, trained: Trained) -> list[dict[str, Any]]:
    auc, log_loss = trained.spread("auc"), trained.spread("log_loss")
    return [
        _figure(f"{name}_auc", auc[0]),
        _figure(f"{name}_auc_deviation", auc[1], higher_is_better=False),
        _figure(f"{name}_log_loss", log_loss[0], unit="nats", higher_is_better=False),
    ]


def _figure(name: str, value: float, *, unit: str = "AUC", higher_is_better: bool = True) -> dict[str, Any]:
    return {"name": name, "value": round(value, 5), "unit": unit, "higher_is_better": higher_is_better}
