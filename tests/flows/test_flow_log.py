"""What stands in the log of a flow run: one line for an error of ours, the traceback for a defect."""

import importlib
import logging

import pytest
from prefect import flow, task

from heterps_core.errors import DataError

importlib.import_module("flows")

pytestmark = pytest.mark.usefixtures("prefect_server")


@task
def read(error):
    raise error


@flow
def night(error):
    read(error)


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(DataError("clicks.tsv", "line 3 is short"), False), (KeyError("x"), True)]
)
def test_only_a_defect_has_a_traceback_in_the_log_of_its_run(error, has_traceback):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    loggers = [logging.getLogger(f"prefect.{name}") for name in ("flow_runs", "task_runs")]
    for each in loggers:
        each.addHandler(handler)
    try:
        with pytest.raises(type(error)):
            night(error)
    finally:
        for each in loggers:
            each.removeHandler(handler)

    text = "\n".join(map(logging.Formatter().format, records))
    assert str(error) in text
    assert ("Traceback" in text) is has_traceback
