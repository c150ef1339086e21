"""Keepers are processes that outlive workers, but not their node, and answer only who has the run's key."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import numpy as np
import psutil
import pytest

from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.redo.keeper import Keeper, KeeperPlace, connect
from heterps_core.training.redo.step_log import DenseChange, StepChanges
from tests.heterps_core.training.redo.test_step_log import WORKER
from tests.waiting import wait_for

KEY = b"the key of this run"


def changes(step: int) -> StepChanges:
    return StepChanges(
        cursor=TrainingCursor(step=step),
        dense={step: DenseChange(values={"dense": np.full(2, step)})},
        rows={"table": (np.array([step]), {"weight": np.full((1, 2), 0.5 * step)})},
        begins_checkpoint=False,
    )


@pytest.fixture(scope="module")
def place():
    with closing(Keeper("127.0.0.1", key=KEY)) as keeper:
        keeper.start()
        assert keeper.address is not None
        yield KeeperPlace("node", keeper.address)


def test_what_one_process_sends_another_reads(place):
    sender, reader = connect(place, key=KEY), connect(place, key=KEY)
    sender.begin(WORKER, 0)
    for step in (1, 2):
        sender.add(WORKER.generation, WORKER.rank, changes(step), None)

    (summary,) = reader.summaries()
    dense, rows = reader.state(WORKER.generation, WORKER.rank, 2)

    assert summary.worker == WORKER
    assert list(summary.cursors) == [1, 2]
    assert dense[0].values["dense"].tolist() == [2, 2]
    assert rows["table"][0].tolist() == [1, 2]
    assert rows["table"][1]["weight"].tolist() == [[0.5, 0.5], [1.0, 1.0]]


def test_who_has_another_key_learns_nothing(place):
    with pytest.raises(multiprocessing.AuthenticationError):
        connect(place, key=b"another")


def test_a_generation_replaces_the_one_before_and_hears_no_more_of_it(place):
    logs = connect(place, key=KEY)
    logs.begin(replace(WORKER, generation=3, rank=5), 0)
    logs.begin(replace(WORKER, generation=4), 7)
    logs.add(3, WORKER.rank, changes(1), None)
    logs.add(4, WORKER.rank, changes(8), None)

    (summary,) = logs.summaries()

    assert summary.worker.generation == 4
    assert (summary.base_step, list(summary.cursors)) == (7, [8])


def test_a_keeper_that_is_not_there_is_an_error_of_the_connection():
    with pytest.raises(OSError, match="no keeper"):
        connect(KeeperPlace("node", ""), key=KEY)


NODE = """
import time
from heterps_core.training.redo.keeper import Keeper
if __name__ == "__main__":
    keeper = Keeper("127.0.0.1", key=b"key")
    keeper.start()
    print(keeper.process.pid, flush=True)
    time.sleep(60)
"""


def test_a_keeper_ends_with_its_node_however_that_ends(tmp_path):
    script = tmp_path / "node.py"
    script.write_text(NODE)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        keeper = psutil.Process(int(node.stdout.readline()))
        node.send_signal(signal.SIGKILL)

        wait_for(
            lambda: not keeper.is_running() or keeper.status() == "zombie",
            what="the keeper's end",
            timeout_s=30,
        )
