"""`heterps predict` as a person types it, over a real registry."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from flows.cli import main
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.serving.exported_model import ClickPredictor
from tasks.records.model_registry import find_version, verified_folder
from tests.heterps_core.serving.builders import raw_columns
from tests.tasks.registry import FITTED, OLD


@pytest.fixture
def clicks(models, monkeypatch, tmp_path):
    monkeypatch.setenv("HETERPS_HOME", str(models.workspace.root))
    return write_click_stream(tmp_path / "clicks.tsv", num_rows=50, seed=7).path


@pytest.mark.slow
@pytest.mark.parametrize("version", [None, OLD])
def test_rows_are_predicted_by_the_champion_or_the_version_that_is_named(
    models, clicks, tmp_path, capsys, version
):
    models.crown(FITTED, usd=0.25)
    asked = ["--version", version] if version else []

    assert main(["predict", str(clicks), "-o", str(tmp_path / "out.parquet"), *asked]) == 0

    folder = verified_folder(models.workspace, find_version(models.workspace, version or FITTED))
    expected = ClickPredictor(folder).predict(raw_columns(clicks, slice(None)))
    np.testing.assert_allclose(pq.read_table(tmp_path / "out.parquet")["probability"], expected, atol=1e-7)
    assert capsys.readouterr().out.startswith("50 rows in ")


def test_before_the_first_champion_it_says_what_to_do(clicks, tmp_path, capsys):
    assert main(["predict", str(clicks), "-o", str(tmp_path / "out.parquet")]) == 2

    assert "there is none yet; train one, or name a --version" in capsys.readouterr().err
