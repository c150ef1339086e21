"""Small files of a run: whole or absent."""

import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.training.storage.run_directory import RunDirectory
from tests.s3_server import bucket_location


def test_what_was_written_is_read(tmp_path):
    run = RunDirectory(str(tmp_path / "run"))

    run.write_json("nodes/a/exit.json", {"exit_status": 3})

    assert run.read_json("nodes/a/exit.json") == {"exit_status": 3}
    assert run.names("nodes") == ["a"]
    assert run.exists("nodes/a")


def test_a_missing_file_is_none_and_a_required_one_an_error(tmp_path):
    run = RunDirectory(str(tmp_path))

    assert run.read_bytes("job.json") is None
    assert run.names("steps") == []
    with pytest.raises(ConfigurationError, match=r"job\.json must stand in"):
        run.require_json("job.json")


def test_a_write_that_fails_leaves_the_old_file_and_no_part_of_the_new_one(tmp_path, monkeypatch):
    run = RunDirectory(str(tmp_path))
    run.write_bytes("progress.json", b"old")
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))

    with pytest.raises(OSError, match="disk full"):
        run.write_bytes("progress.json", b"new")

    assert run.read_bytes("progress.json") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """What was brought to the disk or renamed, in order, by its name."""
    events = []
    sync, replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        events.append(f"sync {'draft' if name.endswith('.part') else name}")
        sync(descriptor)

    def rename(path: Path, target: str) -> Path:
        events.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    return events


def test_a_durable_file_is_on_the_disk_before_it_has_its_name_and_the_name_before_the_return(
    tmp_path, synced
):
    run = RunDirectory(str(tmp_path))

    run.write_bytes("00000010/manifest.json", b"content", is_durable=True)
    run.write_bytes("progress.json", b"content")

    assert synced == ["sync draft", "rename", "sync 00000010", "rename"]


def test_what_was_appended_and_the_folders_that_name_it_are_on_the_disk_at_the_end(tmp_path, synced):
    run = RunDirectory(str(tmp_path))

    with run.appending("checkpoints/00000010/rank-00000.bin") as append:
        append(memoryview(b"con"))
        append(memoryview(b"tent"))

    assert run.read_bytes("checkpoints/00000010/rank-00000.bin") == b"content"
    assert synced == ["sync rank-00000.bin", "sync 00000010", "sync checkpoints"]


def test_deleting_what_is_not_there_is_no_error(tmp_path):
    run = RunDirectory(str(tmp_path))

    run.delete_file("stop")
    run.delete_folder("checkpoints/00000010")


@pytest.mark.parametrize("kept", [(), ("b.json",), ("nowhere.json",)])
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_cleared_run_has_the_files_that_are_kept_and_no_others(kind, kept, tmp_path, monkeypatch):
    with bucket_location(monkeypatch) if kind == "bucket" else nullcontext(str(tmp_path / "run")) as location:
        run = RunDirectory(location)
        for key, size in {"a.json": 1, "b.json": 20, "nodes/0/exit.json": 300, ".half.part": 4_000}.items():
            run.write_bytes(key, bytes(size))
        assert (run.num_bytes(), run.num_bytes("nodes")) == (4_321, 300)

        run.clear(kept=kept)
        run.clear(kept=kept)

        assert run.names("") == [name for name in kept if name == "b.json"]
        assert run.num_bytes() == (20 if "b.json" in kept else 0)


def test_a_link_in_a_run_is_deleted_and_what_it_leads_to_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("stays")
    run = RunDirectory(str(tmp_path / "run"))
    run.write_bytes("nodes/0/exit.json", b"")
    (tmp_path / "run" / "nodes" / "link").symlink_to(elsewhere)
    (tmp_path / "run" / "link").symlink_to(elsewhere)

    run.clear()

    assert not (tmp_path / "run").exists()
    assert (elsewhere / "file").read_text() == "stays"


def test_a_location_of_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="s3://bucket/prefix"):
        RunDirectory("ftp://host/folder")


def test_a_folder_that_comes_and_goes_is_listed_or_empty(tmp_path):
    run = RunDirectory(str(tmp_path))
    folder = tmp_path / "nodes"
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            folder.mkdir()
            folder.rmdir()

    maker = threading.Thread(target=come_and_go)
    maker.start()
    try:
        seen = [(run.stamps("nodes"), run.names("nodes")) for _ in range(2_000)]
    finally:
        ended.set()
        maker.join()

    assert seen == [({}, [])] * 2_000


@pytest.mark.weekly
def test_a_file_in_a_bucket_that_is_replaced_all_the_time_is_never_read_in_parts(monkeypatch):
    with bucket_location(monkeypatch) as location:
        writing, reading = RunDirectory(location), RunDirectory(location)
        versions = [{"text": "x" * length} for length in (1, 40, 7, 300)]
        writing.write_json("progress.json", versions[0])
        ended = threading.Event()

        def replace_all_the_time() -> None:
            while not ended.is_set():
                for version in versions:
                    writing.write_json("progress.json", version)

        writer = threading.Thread(target=replace_all_the_time)
        writer.start()
        try:
            seen = [reading.read_json("progress.json") for _ in range(100)]
        finally:
            ended.set()
            writer.join()

    assert all(document in versions for document in seen)
    assert len({len(document["text"]) for document in seen}) > 1


def test_a_tag_that_only_looks_like_a_hash_is_believed_when_it_comes_twice(monkeypatch):
    """As of objects that are encrypted with one's own keys."""
    monkeypatch.setattr("heterps_core.training.storage.run_directory._tag", lambda metadata: "0" * 32)
    with bucket_location(monkeypatch) as location:
        run = RunDirectory(location)
        run.write_bytes("job.json", b"content")

        assert run.read_bytes("job.json") == b"content"
