"""What an AUC costs: our models and the ones that people would pick, on the same rows, in processor seconds and USD.

Rows are a synthetic stream of another seed than any default was looked at with, or a file in the Criteo format by
`--data`. The latest fifth is held out. Each fit has one core, and as many run beside one another as there are cores.
Without `--data` the tables of docs/COST_TO_QUALITY.md are written.

CatBoost and Vowpal Wabbit are no dependencies: each is left out with a line where it cannot be imported.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.row_arrays import RowArrays, targets_of
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import best_reachable_quality, write_click_stream
from heterps_core.judging.quality import ClickQuality
from heterps_core.models import DEFAULT_MODEL, SIZES, sized_model
from heterps_core.training.tuning.in_one_process import train_in_turns
from heterps_core.units import BYTES_PER_GIB, SECONDS_PER_HOUR
from infra.prices.price_catalogue import PriceCatalogue
from infra.providers.base import REGION
from tasks.judging.baseline import Baseline, Fit, SampledRows, logistic_regression, measure_baseline
from tasks.judging.boosted_trees import boosted_trees, fit_trees
from tests.benchmarks.quality import MODELS, default_config
from tests.paths import PROJECT

NUM_ROWS, FIRST_STREAM_SEED = 200_000, 2_000
DOCUMENT = PROJECT / "docs" / "COST_TO_QUALITY.md"

LEAST_MEMORY_BYTES = 4 * BYTES_PER_GIB
CATBOOST_TREES, CATBOOST_PATIENCE = 300, 30
CHECK_SHARE = 0.2


class Fitted(NamedTuple):
    """One fit."""

    quality: ClickQuality
    seconds: float
    """Of processor time, for reading prepared rows, fitting and rating."""


class Row(NamedTuple):
    """A line of the table: means over fits, and their standard deviations."""

    name: str
    fits: list[Fitted]
    prepare_seconds: float

    def spread(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of "auc" or "log_loss"."""
        values = [getattr(fitted.quality, name) for fitted in self.fits]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def seconds(self) -> float:
        """Processor time from the text file to the judged model."""
        return self.prepare_seconds + statistics.fmean(fitted.seconds for fitted in self.fits)

    def cells(self, best_auc: float | None, usd_per_hour: float) -> list[str]:
        """Return the cells of this line."""
        auc, log_loss = (
            f"{mean:.4f}" + (f" ± {deviation:.4f}" if len(self.fits) > 1 else "")
            for mean, deviation in map(self.spread, ("auc", "log_loss"))
        )
        gap = "" if best_auc is None else f"{best_auc - self.spread('auc')[0]:.4f}"
        usd = f"{1_000 * self.seconds / SECONDS_PER_HOUR * usd_per_hour:.2f}"
        return [self.name, auc, log_loss, gap, f"{self.seconds:.1f}", usd, str(len(self.fits))]


def run(*, seed: int = 0, data: str | None = None, num_cases: int = 5) -> list[dict[str, Any]]:
    """Fit everything, print the table, write the document, and return the figures.

    Args:
        seed: Of the rows and of the first fit.
        data: Rows of one's own.
        num_cases: Seeds of each of our models; the others draw nothing or have a fixed seed, and are fitted once.
    """
    load = os.getloadavg()[0]
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, best = Path(data or f"{folder}/clicks.tsv"), None
        if data is None:
            stream = write_click_stream(path, num_rows=NUM_ROWS, seed=FIRST_STREAM_SEED + seed)
        before_s = time.process_time()
        dataset = prepare_dataset(path, schema=CRITEO_SCHEMA, out_dir=f"{folder}/prepared")
        prepare_seconds = time.process_time() - before_s
        if data is None:
            held_out = slice(dataset.num_train_rows, None)
            labels, _ = dataset.targets(dataset.num_train_rows, dataset.manifest.num_rows)
            best = best_reachable_quality(stream.click_probabilities()[held_out], labels)
        rows = [*_rows(dataset, range(seed, seed + num_cases), prepare_seconds)]
        sizes = f"{dataset.num_train_rows:,} rows to train on, the latest {dataset.num_eval_rows:,} held out"
    rows.sort(key=lambda row: row.spread("log_loss")[0])
    table = table_of(rows, best)
    print("\n".join(table))
    busy = sum(fitted.seconds for row in rows for fitted in row.fits)
    minutes = (time.monotonic() - started_s) / 60
    print(f"{minutes:.1f} minutes; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    if data is None:
        when = datetime.datetime.now(datetime.UTC).date()
        cores = f"{len(os.sched_getaffinity(0))} {platform.machine()} cores, load {load:.0f}"
        written = f"Written on {when}, {cores}, in {minutes:.0f} minutes; the fits took {busy:.0f} processor seconds"
        _write_document(table, f"{sizes}; stream of seed {FIRST_STREAM_SEED + seed}. {written}.")
    return [*_figures(rows, best)]


def table_of(rows: list[Row], best: ClickQuality | None) -> list[str]:
    """Return the lines of the table in Markdown, and of what it is priced by."""
    offers = PriceCatalogue().offers(region=REGION)
    large = [offer for offer in offers if offer.instance_type.memory_bytes >= LEAST_MEMORY_BYTES]
    offer = min(large, key=lambda offer: offer.price_usd_per_hour)
    columns = ["model", "AUC", "log-loss", "gap", "processor seconds", "USD for 1,000 runs", "fits"]
    best_auc = None if best is None else best.auc
    cells = [row.cells(best_auc, offer.price_usd_per_hour) for row in rows]
    if best is not None:
        cells.insert(0, ["truth", f"{best.auc:.4f}", f"{best.log_loss:.4f}", "0", "", "", ""])
    lines = [columns, ["---"] * len(columns), *cells]
    return [
        *(f"| {' | '.join(line)} |" for line in lines),
        "",
        f"USD: {offer.instance_type.name} in {offer.region} at {offer.price_usd_per_hour} USD/hour "
        f"({offer.price_as_of[:10]}), the cheapest machine of the catalogue with 4 GiB, for as many seconds.",
    ]


def _rows(dataset: PreparedDataset, seeds: range, prepare_seconds: float) -> Iterator[Row]:
    """Yield a line for each model, in the order in which the fits end."""
    folder = str(dataset.directory)
    fits: dict[str, list[Callable[[], Fitted]]] = {
        name: [partial(_fit_baseline, folder, fit)] for name, fit in _others().items()
    }
    sized = {f"`{DEFAULT_MODEL}`, size {size}": sized_model(DEFAULT_MODEL, **SIZES[size]) for size in "sl"}
    ours = {f"`{model}`": model for model in MODELS} | sized
    fits |= {name: [partial(_train, folder, model, seed) for seed in seeds] for name, model in ours.items()}
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as processes:
        under_way = {name: [processes.submit(fit) for fit in each] for name, each in fits.items()}
        for name, each in under_way.items():
            row = Row(name, [future.result() for future in each], prepare_seconds)
            print(" | ".join(row.cells(None, 0.0)), flush=True)
            yield row


def _others() -> dict[str, Fit]:
    """Return the models of other packages that are at hand."""
    found: dict[str, Fit] = {
        "LightGBM, target means in time order": boosted_trees,
        "LightGBM, native categories": native_categories,
        "logistic regression (scikit-learn)": logistic_regression,
    }
    for name, package, fit in (
        ("CatBoost", "catboost", catboost_trees),
        ("Vowpal Wabbit, pairs", "vowpalwabbit", vowpal_wabbit_pairs),
    ):
        if importlib.util.find_spec(package) is None:
            print(f"{name} is left out: {package} is not installed", flush=True)
        else:
            found[name] = fit
    return found


def _fit_baseline(folder: str, fit: Fit) -> Fitted:
    started_s = time.process_time()
    found = measure_baseline(fit, SampledRows.of(PreparedDataset.open(folder)))
    assert isinstance(found, Baseline), found
    return Fitted(found.quality, time.process_time() - started_s)


def _train(folder: str, model: str, seed: int) -> Fitted:
    torch.set_num_threads(1)
    started_s = time.process_time()
    dataset = PreparedDataset.open(folder)
    rated = (dataset.num_train_rows, dataset.manifest.num_rows)
    config = default_config(dataset, model, seed)
    [quality] = train_in_turns(dataset, model, config, rated=rated, num_turns=1)
    return Fitted(quality, time.process_time() - started_s)


def native_categories(features: FeatureSpec, train: RowArrays, rated: RowArrays) -> np.ndarray:
    """Fit LightGBM with every id as a category; returns logits [m]."""
    columns = np.concatenate([np.hstack([rows.dense, rows.ids]) for rows in (train, rated)]).astype(
        np.float32
    )
    return fit_trees(columns, [*range(features.num_dense, columns.shape[1])], *targets_of([train]))


def catboost_trees(features: FeatureSpec, train: RowArrays, rated: RowArrays) -> np.ndarray:
    """Fit CatBoost with its own target statistics, which it makes in the order of the rows; returns logits [m]."""
    import pandas as pd
    from catboost import CatBoostClassifier, Pool

    def frame(rows: RowArrays) -> pd.DataFrame:
        dense = {f"I{column}": values for column, values in enumerate(rows.dense.T)}
        return pd.DataFrame(dense | {f"C{column}": values for column, values in enumerate(rows.ids.T)})

    categories = [f"C{column}" for column in range(features.num_ids)]
    first = len(train.labels) - int(len(train.labels) * CHECK_SHARE)
    rows = frame(train)
    fitted, checked = (
        Pool(rows[part], train.labels[part], cat_features=categories)
        for part in (slice(0, first), slice(first, None))
    )
    settings = {
        "has_time": True,
        "thread_count": 1,
        "random_seed": 0,
        "verbose": False,
        "allow_writing_files": False,
    }
    search = CatBoostClassifier(
        iterations=CATBOOST_TREES, early_stopping_rounds=CATBOOST_PATIENCE, **settings
    )
    search.fit(fitted, eval_set=checked)
    return search.predict(Pool(frame(rated), cat_features=categories), prediction_type="RawFormulaVal")


def vowpal_wabbit_pairs(features: FeatureSpec, train: RowArrays, rated: RowArrays) -> np.ndarray:
    """Run Vowpal Wabbit once over the rows, with all pairs of columns; returns logits [m]."""
    from vowpalwabbit import Workspace

    names = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

    def lines(rows: RowArrays, labels: list[str]) -> Iterator[str]:
        for label, dense, ids in zip(labels, rows.dense.tolist(), rows.ids.tolist(), strict=True):
            numbers = " ".join(f"{column}:{value:.4g}" for column, value in enumerate(dense))
            slots = " ".join(f"|{names[slot]} {row}" for slot, row in enumerate(ids))
            yield f"{label} |0 {numbers} {slots}"

    pairs = " ".join(f"-q {names[i]}{names[j]}" for i in range(features.num_ids) for j in range(i))
    model = Workspace(f"--loss_function logistic -b 24 --quiet {pairs}")
    for line in lines(train, ["1" if label else "-1" for label in train.labels]):
        model.learn(line)
    logits = np.array([model.predict(line) for line in lines(rated, [""] * len(rated.labels))])
    model.finish()
    return logits


def _write_document(table: list[str], facts: str) -> None:
    """Write the table between the marks of the document."""
    before, _, rest = DOCUMENT.read_text().partition("<!-- table -->\n")
    after = rest.partition("<!-- end -->\n")[2]
    DOCUMENT.write_text("\n".join([f"{before}<!-- table -->", facts, "", *table, f"<!-- end -->\n{after}"]))


def _figures(rows: list[Row], best: ClickQuality | None) -> Iterator[dict[str, Any]]:
    for row in rows:
        name = row.name.strip("`")
        for field, unit in (("auc", "AUC"), ("log_loss", "nats")):
            value = round(row.spread(field)[0], 5)
            yield {
                "name": f"{name} {field}",
                "value": value,
                "unit": unit,
                "higher_is_better": field == "auc",
            }
        value = round(row.seconds, 2)
        yield {"name": f"{name} processor seconds", "value": value, "unit": "s", "higher_is_better": False}
    if best is not None:
        yield {"name": "best reachable AUC", "value": best.auc, "unit": "AUC", "higher_is_better": True}
