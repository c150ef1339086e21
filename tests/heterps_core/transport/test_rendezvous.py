"""Workers of a generation meet at its own store, also those that are there before it; others are refused."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from heterps_core.transport import rendezvous
from heterps_core.transport.json_messages import gather_json
from heterps_core.transport.rendezvous import open_store, prove_members
from infra.workspace import free_loopback_port

LIMIT = timedelta(seconds=60)
SHORT = timedelta(seconds=0.5)
KEY = b"the key of this run"


def meet(port, generation=1, *, is_host=False, key=KEY, limit=LIMIT):
    return open_store("127.0.0.1", port, key=key, generation=generation, is_host=is_host, limit=limit)


def hold(port, generation, is_open):
    """Hold the store of a generation until the process is killed."""
    store = meet(port, generation, is_host=True)
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
    return free_loopback_port()


@pytest.fixture
def early(request, holders, port):
    """Return the holder of generation 1, and what a worker of generation 2 finds that has met its store."""
    limit = timedelta(seconds=getattr(request, "param", 60))
    before = holders(port, 1)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(meet, port, 2, limit=limit)
        with pytest.raises(TimeoutError):
            found.result(1.0)
        yield before, found


def test_who_is_earlier_than_the_store_leaves_that_of_the_generation_before(early, holders, port):
    before, found = early
    before.kill()
    before.join()
    holders(port, 2)

    found.result(30).set("met", "yes")

    same = meet(port, 2)
    assert same.get("met") == b"yes"
    assert not same.check(["unknown"])


@pytest.mark.slow
@pytest.mark.parametrize("early", [4], indirect=True)
def test_where_no_store_follows_that_of_the_generation_before_the_worker_ends(early):
    before, found = early
    before.kill()
    with pytest.raises(dist.DistError, match=r"workers must meet at 127\.0\.0\.1:"):
        found.result(30)


def test_entries_are_seen_by_all_members_and_waited_for(port):
    first, second = meet(port, is_host=True), meet(port)
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(second.get, "entry")
        first.set("entry", bytes(range(256)))
        assert coming.result(30) == bytes(range(256))
    assert [first.add("count", 2), second.add("count", 3), first.get("count")] == [2, 5, b"5"]
    with pytest.raises(dist.DistStoreError, match="missing must be in the store within 0 s"):
        second.wait(["entry", "missing"], timedelta(0))


def test_it_listens_on_its_own_address_alone(port):
    store = meet(port, is_host=True)
    listening = [each for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
    assert {each.laddr.ip for each in listening if each.laddr.port == port} == {"127.0.0.1"}
    del store


def send_nothing(connection):
    pass


def send_garbage(connection):
    connection.sendall(b'["set", "0//cpu//0/1", "00"]\n' * 100)


def send_back(connection):
    while content := connection.recv(64):
        connection.sendall(content)


def send_byte_by_byte(connection):
    """Send the next byte of a proof whenever nothing has come for a while, as long as the store listens."""
    connection.settimeout(0.1)
    for num_sent in range(64):
        connection.sendall(b"x")
        with suppress(TimeoutError):
            while connection.recv(64):
                pass
            assert num_sent < 32, "the limit is that of the whole proof, not of each byte"
            return
    raise AssertionError("the store waits for each byte")


@pytest.mark.parametrize("behave", [send_nothing, send_garbage, send_back, send_byte_by_byte])
def test_a_stranger_at_the_store_is_refused_and_the_members_meet(port, behave, monkeypatch):
    monkeypatch.setattr(rendezvous, "PROOF_LIMIT_S", 0.5)
    first = meet(port, is_host=True)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger, suppress(ConnectionError):
        behave(stranger)
        while stranger.recv(64):
            pass
    meet(port).set("met", "yes")
    assert first.get("met") == b"yes"


def test_silent_strangers_take_few_files_of_the_first_worker_and_keep_no_member_out(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "PROOF_LIMIT_S", 0.5)
    monkeypatch.setattr(rendezvous, "MOST_UNPROVEN", 4)
    first = meet(port, is_host=True)
    with ExitStack() as strangers:
        for _ in range(12):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        accepted = [
            each
            for each in psutil.Process().net_connections("tcp")
            if each.status == "ESTABLISHED" and each.laddr.port == port
        ]
        assert len(accepted) <= 1 + 4
        meet(port).set("met", "yes")
    assert first.get("met") == b"yes"


def test_a_proof_of_an_earlier_start_of_the_run_does_not_hold(port):
    first, second = meet(port, is_host=True), meet(port)
    other = meet(free_loopback_port(), is_host=True)

    assert first.proof_key(KEY) == second.proof_key(KEY)
    assert first.proof_key(KEY) != other.proof_key(KEY)
    assert first.proof_key(KEY) != first.proof_key(bytes(32))


def test_a_store_without_the_key_is_not_entered(port):
    with socket.create_server(("127.0.0.1", port)) as false_host:

        def pretend():
            with suppress(OSError):
                while True:
                    connection, _ = false_host.accept()
                    with connection:
                        send_back(connection)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(dist.DistNetworkError, match="has not proven the key of the run"):
            meet(port, limit=SHORT)
        false_host.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_member_with_another_key_is_refused(port):
    first = meet(port, is_host=True)
    with pytest.raises(dist.DistNetworkError, match="proves the run's key, but within"):
        meet(port, key=b"", limit=SHORT)
    del first


def test_torchs_own_store_is_refused(port):
    first = meet(port, is_host=True)
    with pytest.raises((dist.DistNetworkError, RuntimeError)):
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=SHORT)
    del first


class Harm:
    """What runs where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.environ["HARM"],)


def give_json(rank):
    return gather_json({"rank": rank, "text": "ä" * rank})


def give_pickle(rank):
    if rank == 0:
        return gather_json("waits")
    found = [None, None]
    with pytest.raises(pickle.UnpicklingError):
        dist.all_gather_object(found, Harm())
    return "cannot be unpickled"


def prove(rank):
    prove_members(dist.group.WORLD, KEY, generation=1)
    return "proven"


def prove_with_own_key(rank):
    prove_members(dist.group.WORLD, b"%d" % rank, generation=1)


ACTIONS = (give_json, give_pickle, prove, prove_with_own_key)


def take_part(rank, port, harm, answers):
    """Do all actions in a world of two, and tell what came of each."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HARM": harm}
    store = meet(port, is_host=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    for action in ACTIONS:
        try:
            answer = action(rank)
        except (ValueError, dist.DistError) as error:
            answer = f"{type(error).__name__}: {error}"
        answers.put((action.__name__, rank, answer))
    store.set(f"ended {rank}", "")
    store.wait(["ended 0", "ended 1"])
    # A thread of gloo that still runs when the process exits aborts it.
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return what came of each action in both members of a world, by its function and rank."""
    spawned = multiprocessing.get_context("spawn")
    reported, harm = spawned.Queue(), str(tmp_path_factory.mktemp("answers") / "harm")
    arguments = (free_loopback_port(), harm, reported)
    members = [spawned.Process(target=take_part, args=(rank, *arguments)) for rank in (0, 1)]
    for member in members:
        member.start()
    found = [reported.get(timeout=300) for _ in members for _ in ACTIONS]
    for member in members:
        member.join(60)
        assert member.exitcode == 0
    return {(action, rank): answer for action, rank, answer in found} | {"harm": Path(harm)}


def test_members_exchange_json(answers):
    values = [{"rank": 0, "text": ""}, {"rank": 1, "text": "ä"}]
    assert answers["give_json", 0] == answers["give_json", 1] == values


def test_a_pickle_of_a_member_is_refused_and_not_run(answers):
    assert answers["give_pickle", 0].startswith(("UnicodeDecodeError", "JSONDecodeError"))
    assert answers["give_pickle", 1] == "cannot be unpickled"
    assert not answers["harm"].exists()


def test_members_of_a_group_prove_the_key(answers):
    assert answers["prove", 0] == answers["prove", 1] == "proven"


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_member_of_a_group_that_has_another_key_is_refused(answers, rank, other):
    assert answers["prove_with_own_key", rank].startswith(f"DistNetworkError: member {other} of group")
