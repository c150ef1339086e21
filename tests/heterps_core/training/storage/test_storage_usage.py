"""What a run asks of a bucket, counted by us and by the server that answered."""

from collections import Counter

import pytest
from moto.server import DomainDispatcherApplication

from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.store import StorageUsage
from tests.s3_server import bucket_location

pytestmark = pytest.mark.slow

MB = 1_000_000


@pytest.fixture
def answered(monkeypatch):
    """Requests for keys of the bucket, in the classes that S3 charges for, as the server saw them."""
    seen = Counter()
    answer = DomainDispatcherApplication.__call__

    def count(application, environment, start_response):
        method, query = environment["REQUEST_METHOD"], environment.get("QUERY_STRING", "")
        if environment["PATH_INFO"].startswith("/runs"):
            is_dear = method in ("PUT", "POST") or "list-type" in query
            seen["put" if is_dear else "free" if method == "DELETE" else "get"] += 1
        return answer(application, environment, start_response)

    monkeypatch.setattr(DomainDispatcherApplication, "__call__", count)
    return seen


@pytest.fixture
def run(answered, monkeypatch):
    with bucket_location(monkeypatch) as location:
        yield RunDirectory(location)


def write_files(folder, *sizes):
    folder.mkdir()
    for index, size in enumerate(sizes):
        (folder / f"{index}").write_bytes(bytes(size))
    return folder


def append_parts(run, *sizes):
    with run.appending("checkpoints/1/a") as append:
        for size in sizes:
            append(memoryview(bytes(size)))


def read_parts(run, key, parts):
    with run.open_file(key) as file:
        for first, stop in parts:
            file.seek(first)
            file.read(stop - first)


CALLS = {
    "a small file": lambda run, tmp: run.write_bytes("progress.json", bytes(300)),
    "a file in parts": lambda run, tmp: run.write_bytes("big", bytes(12 * MB)),
    "a file that is read": lambda run, tmp: run.read_bytes("there/0"),
    "a file that is missing": lambda run, tmp: run.read_bytes("none"),
    "a look for what is there": lambda run, tmp: run.exists("there/0"),
    "a look for what is not": lambda run, tmp: run.exists("none"),
    "names": lambda run, tmp: run.names("there"),
    "sizes": lambda run, tmp: run.file_sizes("there"),
    "stamps of all nodes": lambda run, tmp: run.stamps("there"),
    "an uploaded folder": lambda run, tmp: run.upload_folder(write_files(tmp / "up", 10, 12 * MB), "data"),
    "a file that is appended to": lambda run, tmp: append_parts(run, 3, 12 * MB),
    "ranges that are read": lambda run, tmp: list(run.read_ranges("there/1", [(0, 9), (MB, 18 * MB)])),
    "parts of an opened file": lambda run, tmp: read_parts(run, "there/1", [(0, 9), (MB, 18 * MB)]),
    "a deleted file": lambda run, tmp: run.delete_file("there/0"),
    "a deleted folder": lambda run, tmp: run.delete_folder("there"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_every_call_counts_the_requests_that_the_server_answers(run, answered, tmp_path, call):
    run.upload_folder(write_files(tmp_path / "there", 100, 18 * MB), "there")
    answered.clear()
    run.usage = StorageUsage()

    call(run, tmp_path)

    assert (run.usage.put_requests, run.usage.get_requests) == (answered["put"], answered["get"])


def test_bytes_are_those_of_the_files(run, tmp_path):
    run.upload_folder(write_files(tmp_path / "there", 100, 2 * MB), "there")
    append_parts(run, 7)
    list(run.read_ranges("there/0", [(90, 120)]))
    read_parts(run, "there/1", [(5, 9)])

    assert run.usage.bytes_written == 2 * MB + 107
    assert run.usage.bytes_read == 10 + 4


def test_a_folder_of_this_machine_costs_nothing(tmp_path):
    run = RunDirectory(str(tmp_path))
    run.write_bytes("a", b"x")
    run.read_bytes("a")

    assert run.usage == StorageUsage()
