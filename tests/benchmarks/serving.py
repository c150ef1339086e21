"""How long a registered model takes to load and to predict, as MLflow asks it, and what of that is MLflow's check.

A small model is trained, exported and registered as the flow does it. Each time is the median of calls in one process
after loading, by processor time: of `pyfunc.predict` with a pandas table of raw columns, of the model that it wraps,
and of the layers alone. Loading is measured in fresh processes; the import of MLflow is reported beside it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.serving.raw_columns import model_input
from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import TRACKING_VARIABLE, Workspace
from tasks.click_model import ClickModel
from tasks.records import model_registry
from tasks.running import run_lifecycle
from tests.heterps_core.serving.builders import raw_columns
from tests.tasks.records.test_model_registry import train_and_save
from tests.worker_processes import run_in_processes

NUM_ROWS = 2_000
TABLE_ROWS = 10_007
SIZES = (1, 1_000)
NUM_CALLS = 40
NUM_LOADS = 3

LOAD = """
import json, os, time
started_s = time.monotonic()
import mlflow
imported_s = time.monotonic()
imported = time.process_time()
mlflow.pyfunc.load_model("models:/ctr@champion")
print(json.dumps([imported_s - started_s, time.monotonic() - imported_s, imported, time.process_time() - imported]))
"""


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Train, register and ask a model, print the times and return the figures."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        workspace = _registered(folder, seed)
        version = model_registry.find_version(workspace, "1")
        exported = model_registry.verified_folder(workspace, version)
        frame = pd.DataFrame(raw_columns(folder / "clicks.tsv", slice(0, SIZES[-1])))
        tables = {"texts": frame, "numbers": _typed(frame)}
        figures = _load_figures(workspace)
        import mlflow

        served = mlflow.pyfunc.load_model(str(exported.parents[1]))
        wrapped, predictor = ClickModel(exported), ClickPredictor(exported)
        print(f"{'rows':>6} {'columns':<8}{'pyfunc ms':>11}{'model ms':>10}{'layers ms':>11}{'check':>8}")
        for size in SIZES:
            for kind, table in tables.items():
                figures += _predict_figures(served, wrapped, predictor, table[:size], kind)
    return figures


def _predict_figures(
    served: Any, wrapped: ClickModel, predictor: ClickPredictor, table: pd.DataFrame, kind: str
) -> list[dict[str, Any]]:
    columns = {str(name): table[name].tolist() for name in table.columns}
    prepared = model_input(columns, predictor.schema, predictor.numeric_transform, predictor.features)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, model, layers = _medians_s(
            lambda: served.predict(table),
            lambda: wrapped.predict(table),
            lambda: predictor.logits(*prepared),
        )
    share = (whole - model) / whole
    print(
        f"{len(table):>6} {kind:<8}{whole * 1e3:>11.2f}{model * 1e3:>10.2f}{layers * 1e3:>11.2f}{share:>8.1%}"
    )
    name = f"{len(table)}_{kind}"
    return [
        _figure(f"predict_ms_{name}", whole * 1e3, "ms"),
        _figure(f"check_share_{name}", share, "ratio"),
        _figure(f"predict_over_layers_{name}", whole / layers, "ratio"),
    ]


def _medians_s(*calls: Callable[[], Any]) -> list[float]:
    """Return the median processor seconds of each call, taken in turns so that what else runs hits all alike."""
    for call in calls:
        call()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(NUM_CALLS):
        for call, of_call in zip(calls, seconds, strict=True):
            started_s = time.process_time()
            call()
            of_call.append(time.process_time() - started_s)
    return [statistics.median(of_call) for of_call in seconds]


def _load_figures(workspace: Workspace) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": workspace.tracking_uri,
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }
    environment.pop(TRACKING_VARIABLE, None)
    rows = []
    for _ in range(NUM_LOADS):
        done = subprocess.run(
            [sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    imported, loaded, imported_cpu, loaded_cpu = map(statistics.median, zip(*rows, strict=True))
    print(
        f"import mlflow {imported:.2f} s ({imported_cpu:.2f} s of processor time), "
        f"load {loaded:.2f} s ({loaded_cpu:.2f} s); load average {os.getloadavg()[0]:.1f}"
    )
    return [_figure("load_cpu_seconds", loaded_cpu, "s"), _figure("import_cpu_seconds", imported_cpu, "s")]


def _registered(folder: Path, seed: int) -> Workspace:
    """Return a workspace whose champion was trained on synthetic clicks."""
    path = write_click_stream(folder / "clicks.tsv", num_rows=NUM_ROWS, seed=seed).path
    dataset = prepare_dataset(
        path, schema=CRITEO_SCHEMA, buckets_per_slot=TABLE_ROWS, out_dir=folder / "prepared"
    )
    run_in_processes(train_and_save, 1, str(dataset.directory), str(folder / "run"))
    export_model(RunDirectory(str(folder / "run")), dataset.manifest, folder / "exported", model="ctrdnn")
    workspace = Workspace(root=folder / "home").create()
    run = run_lifecycle.open_run(workspace, run_id="night-1", run_name="night-1", tags={})
    version = model_registry.register_model(
        workspace, run, folder / "exported", model="ctrdnn", data="clicks", day="2026-11-20"
    )
    model_registry.call_version(workspace, version, "champion")
    torch.set_num_threads(1)
    return workspace


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns as a program has them: numbers as numbers, missing categories as None."""
    typed = frame.replace("", None)
    for name in CRITEO_SCHEMA.numeric_columns:
        typed[name] = pd.to_numeric(typed[name])
    return typed


def _figure(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": round(value, 4), "unit": unit, "higher_is_better": False}
