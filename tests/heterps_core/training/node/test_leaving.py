"""What a node does when the cloud takes it back."""

import time

import pytest

from heterps_core.instance_metadata import InstanceMetadata
from heterps_core.training.node import node_life
from heterps_core.training.node.node_life import leaving_nodes, watch_notices
from heterps_core.training.storage.run_directory import STOP, RunDirectory
from tests.metadata_server import metadata_server
from tests.waiting import wait_for

INTERRUPTION = '{"action": "terminate", "time": "2026-11-21T04:02:00Z"}'


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    monkeypatch.setattr(node_life, "NOTICE_INTERVAL_S", 0.02)


def watched(run, address):
    return watch_notices(run, "stage0-node3", InstanceMetadata(address))


def test_an_interruption_is_written_down_and_asks_for_a_checkpoint_and_an_end(tmp_path):
    run, values = RunDirectory(str(tmp_path)), {}
    with metadata_server(values) as address, watched(run, address):
        time.sleep(0.1)
        assert not run.exists(STOP)
        values["spot/instance-action"] = INTERRUPTION
        wait_for(lambda: run.exists(STOP))

    assert leaving_nodes(run) == {"stage0-node3": "2026-11-21T04:02:00Z"}


def test_a_service_that_does_not_answer_is_asked_again(tmp_path):
    run, values = RunDirectory(str(tmp_path)), {"spot/instance-action": "no JSON"}
    with metadata_server(values) as address, watched(run, address):
        time.sleep(0.1)
        values["spot/instance-action"] = INTERRUPTION
        wait_for(lambda: run.exists(STOP))
