"""Nights over which the columns change: each model is judged on the same rows by its own columns."""

from dataclasses import replace
from datetime import date
from functools import partial

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import DataSchema, MultiHotColumn
from heterps_core.errors import DataError
from heterps_core.serving.exported_model import ClickPredictor
from infra.workspace import Workspace
from tasks.judging.challenge import Challenger
from tasks.judging.promotion_gates import AUC_GATE, PromotionGates
from tasks.promotion import promote_if_better
from tasks.records import model_registry
from tasks.records.champion import champion_before, champion_of, roll_back
from tasks.running import run_lifecycle
from tasks.running.start import fits_night
from tests.heterps_core.serving.builders import LOGISTIC_MODEL, fit_logistic, write_logistic

pytestmark = pytest.mark.slow

NUM_ROWS = 4_000
SITE = DataSchema(name="clicks", label_column="click", categorical_columns=("site",))
WITH_USER = replace(SITE, categorical_columns=("site", "user"))
AGE = replace(SITE, categorical_columns=("site", "age"))
LISTS = replace(SITE, multi_hot_columns=(MultiHotColumn(name="user", max_length=2),))
SCHEMAS = {
    "a column is added": (SITE, WITH_USER),
    "a column is removed": (replace(SITE, numeric_columns=("age",)), WITH_USER),
    "a category becomes a number": (AGE, replace(WITH_USER, numeric_columns=("age",))),
    "a category becomes a list": (replace(WITH_USER, table_rows={"user": 9}), LISTS),
    "the tables have other sizes": (
        replace(WITH_USER, table_rows={"user": 9}),
        replace(WITH_USER, table_rows={"user": 200}),
    ),
    "the order changes": (AGE, replace(SITE, categorical_columns=("user", "site"))),
    "a marker is added": (replace(SITE, missing_markers=("s3",)), WITH_USER),
}


def write_rows(path, *, seed=1, **renamed):
    """Clicks that hang on the user, on the age, and a little on the site."""
    generator = np.random.default_rng(seed)
    site, user, age = (generator.integers(size, size=NUM_ROWS) for size in (5, 40, 60))
    logit = 1.5 * np.sin(user) + 0.02 * (age - 30) + 0.4 * (site - 2) - 0.5
    click = generator.random(NUM_ROWS) < 1 / (1 + np.exp(-logit))
    rows = pd.DataFrame(
        {
            "click": click.astype(int),
            "site": [f"s{each}" for each in site],
            "user": [f"u{each}" for each in user],
            "age": age,
        }
    )
    rows = rows.rename(columns=renamed)
    rows.to_parquet(path) if path.suffix == ".parquet" else rows.to_csv(path, index=False)
    return path


class Nights:
    """A registry, and models of these rows that are made in milliseconds."""

    def __init__(self, folder):
        self.folder, self.workspace = folder, Workspace(root=folder / "home").create()
        self.num_models = 0

    def train(self, source, schema, *, day, noise=0.0):
        """Register a model of a schema and judge it; returns the decision."""
        self.num_models += 1
        name = f"run-{self.num_models}"
        dataset = prepare_dataset(
            source,
            schema=schema,
            buckets_per_slot=50,
            eval_fraction=0.5,
            out_dir=self.folder / f"{name}-rows",
        )
        weights = fit_logistic(dataset)
        weights += noise * np.random.default_rng(0).normal(size=len(weights))
        exported = write_logistic(self.folder / name, dataset, weights)
        run = run_lifecycle.open_run(self.workspace, run_id=name, run_name=name, tags={})
        version = model_registry.register_model(
            self.workspace, run, exported, model=LOGISTIC_MODEL, data="clicks", day=day
        )
        return self.judge(version, dataset)

    def judge(self, version, dataset):
        """Judge a registered model."""
        challenger = Challenger(
            version=version,
            gates=PromotionGates(),
            usd_per_million_samples=1.0,
            planned_usd_per_million_samples=None,
            baseline=None,
        )
        return promote_if_better.fn(self.workspace, challenger, dataset)

    def goes_on_from(self, day, schema, *, model=LOGISTIC_MODEL):
        """Return the version that a night begins with."""
        found = champion_before(
            self.workspace, date.fromisoformat(day), fits=partial(fits_night, model=model, schema=schema)
        )
        return None if found is None else found.version


@pytest.fixture
def nights(tmp_path):
    return Nights(tmp_path)


def served_auc(nights, version, source):
    """A version's AUC on the held-out half, from raw columns as a server gets them."""
    rows = (
        pq.read_table(source).to_pandas() if source.suffix == ".parquet" else pd.read_csv(source, dtype=str)
    )
    rows = rows.iloc[NUM_ROWS // 2 :]
    folder = model_registry.verified_folder(
        nights.workspace, model_registry.find_version(nights.workspace, version)
    )
    return roc_auc_score(
        rows["click"].astype(int), ClickPredictor(folder).predict({name: rows[name] for name in rows})
    )


@pytest.mark.parametrize(
    ("change", "ending"),
    [
        *((change, "csv") for change in SCHEMAS),
        ("a category becomes a number", "parquet"),
        ("a marker is added", "parquet"),
    ],
)
def test_both_models_are_judged_on_the_same_rows_each_by_its_own_columns(nights, tmp_path, change, ending):
    before, after = SCHEMAS[change]
    source = write_rows(tmp_path / f"rows.{ending}")
    nights.train(source, before, day="2026-11-01", noise=0.1)

    decision = nights.train(source, after, day="2026-11-02")

    assert decision.is_promoted, decision.why
    assert decision.champion_version == "1"
    assert decision.num_rows == NUM_ROWS // 2
    assert decision.champion.auc == pytest.approx(served_auc(nights, "1", source), abs=1e-5)
    assert decision.challenger.auc == pytest.approx(served_auc(nights, "2", source), abs=1e-5)
    assert nights.goes_on_from("2026-11-03", after) == "2"


def test_a_model_without_a_column_that_the_champion_reads_with_gain_is_kept_out(nights, tmp_path):
    source = write_rows(tmp_path / "rows.csv")
    nights.train(source, WITH_USER, day="2026-11-01")

    decision = nights.train(source, SITE, day="2026-11-02")

    assert not decision.is_promoted
    assert decision.champion.auc == pytest.approx(served_auc(nights, "1", source), abs=1e-5)
    assert AUC_GATE in [gate.name for gate in decision.gates if not gate.is_met]
    assert "the champion reads user, which the schema does not name: if it shall not, heterps" in decision.why

    # The way out where the column revealed what was to be predicted.
    assert roll_back(nights.workspace, to="none").to is None
    assert champion_of(nights.workspace) is None
    assert nights.train(source, SITE, day="2026-11-02").is_promoted
    assert roll_back(nights.workspace, to="1").to.version == "1"


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (replace(SITE, categorical_columns=("site", "person")), "user"),
        # Nothing is left of the champion's columns: another table.
        (
            DataSchema(name="other", label_column="bought", categorical_columns=("person",)),
            "site",
        ),
    ],
    ids=["renamed", "another table"],
)
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_champion_whose_columns_are_gone_counts_as_none(nights, tmp_path, after, reason, ending):
    nights.train(write_rows(tmp_path / f"before.{ending}"), WITH_USER, day="2026-11-01")
    renamed = (
        {"user": "person"}
        if after.label_column == "click"
        else {"user": "person", "click": "bought", "site": "shop"}
    )

    decision = nights.train(write_rows(tmp_path / f"after.{ending}", **renamed), after, day="2026-11-02")

    assert decision.is_promoted
    assert "version 2 follows version 1, which cannot predict these rows (" in decision.why
    assert reason in decision.why
    assert roll_back(nights.workspace).to.version == "1"


def test_a_champion_whose_number_became_a_text_counts_as_none(nights, tmp_path):
    ages = replace(SITE, numeric_columns=("age",))
    nights.train(write_rows(tmp_path / "before.csv"), ages, day="2026-11-01")
    after = write_rows(tmp_path / "after.csv", age="years", user="age")

    decision = nights.train(after, replace(SITE, categorical_columns=("site", "age")), day="2026-11-02")

    assert decision.is_promoted
    assert "column age must be a finite number or empty, got 'u" in decision.why


def test_a_champion_whose_code_is_gone_counts_as_none(nights, tmp_path, monkeypatch):
    source = write_rows(tmp_path / "rows.csv")
    nights.train(source, SITE, day="2026-11-01")
    model = nights.folder / "run-1" / "model.json"
    text = model.read_text().replace(LOGISTIC_MODEL, "gone:build")
    registered = champion_of(nights.workspace)
    monkeypatch.setattr(
        "tasks.promotion.champion_of", lambda _: replace(registered, folder=nights.folder / "run-1")
    )
    model.write_text(text)

    decision = nights.train(source, WITH_USER, day="2026-11-02")

    assert decision.is_promoted
    assert "'gone:build' must name a function" in decision.why


def test_rows_that_have_changed_since_they_were_prepared_decide_nothing(nights, tmp_path):
    source = write_rows(tmp_path / "rows.csv")
    nights.train(source, SITE, day="2026-11-01")
    dataset = prepare_dataset(
        source, schema=WITH_USER, buckets_per_slot=50, eval_fraction=0.5, out_dir=tmp_path / "prepared"
    )
    exported = write_logistic(tmp_path / "exported", dataset, fit_logistic(dataset))
    run = run_lifecycle.open_run(nights.workspace, run_id="run-2", run_name="run-2", tags={})
    version = model_registry.register_model(
        nights.workspace, run, exported, model=LOGISTIC_MODEL, data="clicks", day="2026-11-02"
    )
    write_rows(source, seed=2)

    with pytest.raises(DataError, match="must stay as it was when the rows were prepared"):
        nights.judge(version, dataset)

    assert champion_of(nights.workspace).version == "1"


def test_later_nights_go_on_from_a_new_columns_model_also_while_the_champion_is_better(nights, tmp_path):
    source = write_rows(tmp_path / "rows.csv")
    nights.train(source, WITH_USER, day="2026-11-01")
    fewer = nights.train(source, SITE, day="2026-11-02")
    assert not fewer.is_promoted

    assert nights.goes_on_from("2026-11-03", SITE) == "2"
    # The champion fits, so a model that lost against it is not gone on from.
    assert nights.goes_on_from("2026-11-03", WITH_USER) == "1"
    # Nor by a model with other weights; the champion of now is named.
    assert nights.goes_on_from("2026-11-03", SITE, model="ctrdnn") == "1"
    assert nights.goes_on_from("2026-11-02", SITE) == "1"


def test_a_model_that_is_not_sound_is_not_gone_on_from(nights, tmp_path):
    source = write_rows(tmp_path / "rows.csv")
    nights.train(source, WITH_USER, day="2026-11-01")
    broken = nights.train(source, SITE, day="2026-11-02", noise=np.nan)
    assert not broken.is_promoted

    assert nights.goes_on_from("2026-11-03", SITE) == "1"


def test_how_files_lie_is_no_part_of_what_rows_mean_to_a_model():
    other_files = replace(SITE, name="again", separator=";", has_header=True, time_column="at")

    assert other_files.meaning == SITE.meaning
    assert replace(SITE, missing_markers=("-",)).meaning != SITE.meaning
    assert replace(SITE, categorical_columns=("user",)).meaning != SITE.meaning


def test_files_with_rows_from_a_row_on_are_found(tmp_path):
    files = [write_rows(tmp_path / f"{name}.csv", seed=seed) for seed, name in enumerate("abc")]
    dataset = prepare_dataset(files, schema=SITE, buckets_per_slot=9, out_dir=tmp_path / "prepared")

    assert [file.path for file in dataset.sources_from(NUM_ROWS)] == [str(file) for file in files[1:]]
    assert [file.path for file in dataset.sources_from(NUM_ROWS - 1)] == list(map(str, files))
