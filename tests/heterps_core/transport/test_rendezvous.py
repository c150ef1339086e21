"""Workers of a generation meet at its own store, also those that are there before it."""

from __future__ import annotations

import multiprocessing
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from heterps_core.transport import rendezvous
from heterps_core.transport.rendezvous import open_store

LIMIT = timedelta(seconds=60)


def hold(port, generation, is_open):
    """Hold the store of a generation until the process is killed."""
    store = open_store("127.0.0.1", port, generation=generation, is_host=True, limit=LIMIT)
    is_open.set()
    multiprocessing.Event().wait()
    del store


@pytest.fixture
def holders():
    """Return what starts a process that holds a store, ended with the test."""
    started = []
    spawned = multiprocessing.get_context("spawn")

    def start(port, generation):
        is_open = spawned.Event()
        started.append(spawned.Process(target=hold, args=(port, generation, is_open), daemon=True))
        started[-1].start()
        assert is_open.wait(60)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def early(holders, port):
    """Return the holder of generation 1, and what a worker of generation 2 finds that has met its store."""
    before = holders(port, 1)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(open_store, "127.0.0.1", port, generation=2, is_host=False, limit=LIMIT)
        with pytest.raises(TimeoutError):
            found.result(1.0)
        yield before, found


def test_who_is_earlier_than_the_store_leaves_that_of_the_generation_before(early, holders, port):
    before, found = early
    before.kill()
    before.join()
    holders(port, 2)

    found.result(30).set("met", "yes")

    same = open_store("127.0.0.1", port, generation=2, is_host=False, limit=LIMIT)
    assert same.get("met") == b"yes"
    assert not same.check(["unknown"])


def test_where_no_store_follows_that_of_the_generation_before_the_worker_ends(early, monkeypatch):
    monkeypatch.setattr(rendezvous, "REOPENED_WITHIN_S", 2.0)
    before, found = early
    before.kill()
    with pytest.raises(dist.DistError):
        found.result(30)
