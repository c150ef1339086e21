"""Tables in buckets, and catalogs of other kinds than SQLite: real servers, moto's, and what REST answers."""

import json
import os
import shutil
import subprocess
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import gettempdir

import boto3
import numpy as np
import pyarrow.parquet as pq
import pytest
from moto.server import DomainDispatcherApplication

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.reading.days import find_night
from heterps_core.errors import DataError
from tests.heterps_core.data.reading.tables.table_makers import (
    DAYS,
    SCHEMA,
    Iceberg,
    catalogs,
    clicks,
    deltalake,
    in_time,
)
from tests.moto_server import REGION, empty_cloud

Config = pytest.importorskip("pyiceberg.utils.config").Config

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(monkeypatch):
    """A bucket `shop`, and the environment that leads boto3, Arrow, delta-rs and pyiceberg to it."""
    with empty_cloud() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        boto3.client("s3").create_bucket(Bucket="shop")
        yield "s3://shop"


def settings_of(monkeypatch, **settings):
    for name, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__HERE__{name}", value)
    # pyiceberg reads the environment when it is imported.
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())


NUM_ROWS = 40
ROWS = clicks(0, NUM_ROWS).set_column(3, "day", [[str(DAYS[2 * row >= NUM_ROWS]) for row in range(NUM_ROWS)]])


def _prepare_night(data, folder):
    night = find_night(in_time(data), None)
    return night, prepare_dataset(
        night.train_files,
        eval_source=night.eval_files,
        schema=SCHEMA,
        buckets_per_slot=31,
        out_dir=folder,
    )


def assert_a_day_is_read(data, tmp_path):
    """Check a night, half of which are of the day to train on, against the same rows as files."""
    night, found = _prepare_night(data, tmp_path / "a")
    files = []
    for number in (0, 1):
        files.append(tmp_path / f"{number}.parquet")
        pq.write_table(ROWS.slice(number * 20, 20), files[-1])
    expected = prepare_dataset(
        files[0], eval_source=files[1], schema=SCHEMA, buckets_per_slot=31, out_dir=tmp_path / "b"
    )
    rows = np.arange(NUM_ROWS)
    assert (night.day, found.num_train_rows) == (DAYS[0], 20)
    assert found.batch(rows).ids.equal(expected.batch(rows).ids)
    assert found.batch(rows).dense.equal(expected.batch(rows).dense)


def test_a_day_of_a_delta_table_in_a_bucket_is_read(bucket, tmp_path):
    deltalake.write_deltalake(f"{bucket}/clicks", ROWS, partition_by=["day"])

    assert_a_day_is_read(f"delta://{bucket}/clicks", tmp_path)


def test_a_day_of_an_iceberg_table_in_a_bucket_is_read(bucket, tmp_path, monkeypatch):
    settings_of(
        monkeypatch,
        URI=f"sqlite:///{tmp_path}/catalog.db",
        WAREHOUSE=bucket,
        S3__ENDPOINT=os.environ["AWS_ENDPOINT_URL"],
    )
    table = Iceberg(tmp_path)
    table.append(ROWS, by=["day"])

    assert_a_day_is_read(table.data, tmp_path)


@pytest.mark.parametrize("num_answered", [0, 3, 30])
def test_credentials_that_end_while_a_table_is_read_leave_no_rows(
    bucket, tmp_path, monkeypatch, num_answered
):
    """Answer some requests for objects, then none: while the log is read, then while data files are."""
    deltalake.write_deltalake(f"{bucket}/clicks", ROWS, partition_by=["day"], target_file_size=1)
    serve, answered = DomainDispatcherApplication.__call__, []

    def answer(application, environment, start_response):
        answered.append(environment["PATH_INFO"])
        if len(answered) <= num_answered:
            return serve(application, environment, start_response)
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"]

    monkeypatch.setattr(DomainDispatcherApplication, "__call__", answer)
    with pytest.raises(DataError, match=r"cannot be (listed|read): .*(ExpiredToken|ACCESS_DENIED)") as caught:
        _prepare_night(f"delta://{bucket}/clicks", tmp_path / "rows")

    assert not {"\n", "\x1b"} & {*str(caught.value)}
    assert not [*tmp_path.glob("*rows*")]


def test_a_day_of_a_table_in_glue_is_read(bucket, tmp_path, monkeypatch):
    settings_of(monkeypatch, TYPE="glue", WAREHOUSE=bucket, S3__ENDPOINT=os.environ["AWS_ENDPOINT_URL"])
    table = Iceberg(tmp_path)
    table.append(ROWS, by=["day"])

    assert "clicks" in str(
        boto3.client("glue", region_name=REGION).get_tables(DatabaseName="shop")["TableList"]
    )
    assert_a_day_is_read(table.data, tmp_path)


@pytest.fixture
def postgres(tmp_path):
    """The URI of a server of its own, which listens on a socket in a folder alone."""
    pytest.importorskip("psycopg2")
    if shutil.which("initdb") is None or shutil.which("pg_ctl") is None:
        pytest.skip("needs PostgreSQL's initdb and pg_ctl: apt-get install postgresql")
    place = Path(gettempdir()) / f"pg-{os.getpid()}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    # The server refuses to run as root.
    as_user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    if as_user:
        shutil.chown(place, "postgres", "postgres")
    call = partial(subprocess.run, check=True, capture_output=True, cwd=place, **as_user)
    call(["initdb", "--auth=trust", "--username=heterps", "--pgdata=data", "--no-sync"])
    options = f"-k {place} -c listen_addresses='' -c fsync=off"
    call(["pg_ctl", "--pgdata=data", "--log=log", "--wait", f"--options={options}", "start"])
    try:
        yield f"postgresql+psycopg2://heterps@/postgres?host={place}"
    finally:
        call(["pg_ctl", "--pgdata=data", "--mode=immediate", "stop"])
        shutil.rmtree(place)


def test_a_day_of_a_table_with_its_catalog_in_postgresql_is_read(postgres, tmp_path, monkeypatch):
    settings_of(monkeypatch, URI=postgres, WAREHOUSE=f"file://{tmp_path}")
    table = Iceberg(tmp_path)
    table.append(ROWS, by=["day"])

    assert_a_day_is_read(table.data, tmp_path)


class _Answers(BaseHTTPRequestHandler):
    """What a REST catalog answers to who reads a table: its settings, and the table's metadata."""

    def do_GET(self):
        found = {"defaults": {}, "overrides": {}}
        if self.path.partition("?")[0] == "/v1/namespaces/shop/tables/clicks":
            table = catalogs.load_catalog("here").load_table("shop.clicks")
            found = {
                "metadata-location": table.metadata_location,
                "metadata": json.loads(table.metadata.model_dump_json()),
            }
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, *_):
        """Say nothing."""


def test_a_day_of_a_table_with_its_catalog_behind_rest_is_read(tmp_path, monkeypatch, catalog):
    table = Iceberg(tmp_path)
    table.append(ROWS, by=["day"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        monkeypatch.setenv("PYICEBERG_CATALOG__AWAY__URI", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())

        assert_a_day_is_read("iceberg://away/shop.clicks", tmp_path)
    finally:
        server.shutdown()
        server.server_close()
