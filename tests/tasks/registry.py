"""A registry of small models of known quality, for tests of champions; a test gets a copy that it may change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.judging.quality import measure_quality
from infra.workspace import Workspace
from tasks.judging.baseline import Baseline
from tasks.judging.challenge import Challenger, judge_challenger
from tasks.judging.promotion_gates import ModelFigures, PromotionDecision, PromotionGates
from tasks.records import model_registry
from tasks.records.champion import apply_decision, champion_of
from tasks.running import run_lifecycle
from tests.heterps_core.data.synthetic_rows import held_out_labels
from tests.heterps_core.serving.builders import LOGISTIC_MODEL, fit_logistic, write_logistic

NUM_ROWS = 8_000
OLD, FITTED, EQUAL, SHIFTED, BROKEN, OTHER_TABLES = (str(number) for number in range(1, 7))
"""Versions: worse by noise on its weights; as fitted, twice; too many clicks; NaN; fitted on other tables."""

NOISE = 0.1
"""Standard deviation, on the weights of the old model."""

SHIFT = 2.0
"""Of the log-odds of the model that predicts too many clicks."""


def prepare_clicks(folder: Path, **changes) -> PreparedDataset:
    """Half of the rows to train on, the later half to judge by."""
    path = folder / "clicks.tsv"
    if not path.exists():
        write_click_stream(path, num_rows=NUM_ROWS, seed=1)
    parameters = {"buckets_per_slot": 200, "eval_fraction": 0.5, "out_dir": folder / "prepared", **changes}
    return prepare_dataset(path, schema=CRITEO_SCHEMA, **parameters)


def baseline_of(dataset: PreparedDataset, logits) -> Baseline:
    """A regression that has rated all held-out rows."""
    return Baseline(
        quality=measure_quality(held_out_labels(dataset), logits),
        num_train_rows=dataset.num_train_rows,
        logits=logits,
        rated_runs=((dataset.num_train_rows, dataset.manifest.num_rows),),
    )


def register_models(folder: Path) -> Workspace:
    """Register all models, each as a run of its own on a day of its own, in a workspace below `folder`."""
    dataset = prepare_clicks(folder)
    other = prepare_clicks(folder, buckets_per_slot=90, eval_fraction=0.4, out_dir=folder / "other")
    weights = fit_logistic(dataset)
    noise = NOISE * np.random.default_rng(0).normal(size=len(weights))
    intercept = np.zeros(len(weights))
    intercept[-1] = 1.0
    of_version = {
        OLD: (dataset, weights + noise),
        FITTED: (dataset, weights),
        EQUAL: (dataset, weights),
        SHIFTED: (dataset, weights + SHIFT * intercept),
        BROKEN: (dataset, weights * np.where(intercept, np.nan, 1.0)),
        OTHER_TABLES: (other, fit_logistic(other)),
    }
    workspace = Workspace(root=folder / "home").create()
    for version, (rows, values) in of_version.items():
        run_id = f"run-{version}"
        run = run_lifecycle.open_run(workspace, run_id=run_id, run_name=run_id, tags={})
        exported = write_logistic(folder / f"exported-{version}", rows, values)
        registered = model_registry.register_model(
            workspace,
            run,
            exported,
            model=LOGISTIC_MODEL,
            data="clicks",
            day=f"2026-11-{version:0>2}",
        )
        assert registered == version
    return workspace


class Models:
    """The registered models in a workspace of its own; their files are shared with other tests.

    Args:
        registered: What `register_models` returned.
        home: Where to.
    """

    def __init__(self, registered: Workspace, home: Path) -> None:
        self.workspace = Workspace(root=home).create()
        shutil.copy(registered.tracking_path, self.workspace.tracking_path)
        self.dataset = PreparedDataset.open(registered.root.parent / "prepared")
        self.clicks = registered.root.parent / "clicks.tsv"

    def judge(
        self,
        version: str,
        *,
        usd: float | None = 1.0,
        gates: PromotionGates | None = None,
        folder: Path | None = None,
        stays_champion: str | None = None,
        **changes,
    ):
        """Judge a version, by default against the champion of now."""
        champion = changes.pop("champion") if "champion" in changes else champion_of(self.workspace)
        dataset = changes.pop("dataset", self.dataset)
        known = {
            "usd_per_million_samples": usd,
            "planned_usd_per_million_samples": None,
            "gates": gates or PromotionGates(),
            "baseline": baseline_of(self.dataset, np.zeros(self.dataset.num_eval_rows)),
            **changes,
        }
        return judge_challenger(
            self.workspace,
            Challenger(version=version, **known),
            dataset,
            folder=folder or self.folder_of(version),
            champion=champion,
            stays_champion=stays_champion,
        )

    def decide(self, version: str, **changes):
        """Judge a version and apply the decision; return it."""
        decision = self.judge(version, **changes)
        apply_decision(self.workspace, decision)
        return decision

    def crown(self, *versions: str, usd: float = 1.0) -> None:
        """Make versions champion one after the other, whatever they are worth."""
        for version in versions:
            before = model_registry.version_called(self.workspace, "champion")
            decision = PromotionDecision(
                version=version,
                run_id=f"run-{version}",
                champion_version=None if before is None else before.version,
                is_promoted=True,
                why=f"version {version} is wanted by a test",
                gates=(),
                decided_at="2026-11-21T04:30:00+00:00",
                confidence=0.95,
                num_rows=4_000,
                num_clicks=1_000,
                challenger=ModelFigures(
                    auc=0.75, log_loss=0.5, calibration_ratio=1.0, usd_per_million_samples=usd
                ),
                champion=None,
                auc_difference=None,
                log_loss_difference=None,
            )
            apply_decision(self.workspace, decision)

    def folder_of(self, version: str) -> Path:
        """Return where MLflow keeps the exported files of a version."""
        registered = model_registry.find_version(self.workspace, version)
        return model_registry.verified_folder(self.workspace, registered)

    @contextmanager
    def damaged(self, version: str) -> Iterator[None]:
        """Change one bit of a version's weights where MLflow keeps them, for a while."""
        path = self.folder_of(version) / "model.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        try:
            yield
        finally:
            path.write_bytes(whole)

    @property
    def champion(self) -> str | None:
        """The version that is champion."""
        champion = champion_of(self.workspace)
        return None if champion is None else champion.version
