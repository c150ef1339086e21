"""A catalog of Iceberg in SQLite, and a table of each kind."""

import pytest

from tests.heterps_core.data.reading.tables.table_makers import Delta, Iceberg, catalogs

Config = pytest.importorskip("pyiceberg.utils.config").Config


@pytest.fixture
def catalog(tmp_path, monkeypatch):
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__HERE__WAREHOUSE", f"file://{tmp_path}")
    # pyiceberg reads the environment when it is imported.
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())


@pytest.fixture(params=[Delta, Iceberg], ids=["delta", "iceberg"])
def table(request, tmp_path, catalog):
    return request.param(tmp_path)
