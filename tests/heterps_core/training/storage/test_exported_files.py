"""Hashes of exported files: a large file is read once, and again when anything about it has changed."""

import hashlib
import os

import pytest

from heterps_core.training.storage import exported_files
from heterps_core.training.storage.exported_files import file_sha256


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    return path


def test_an_unchanged_file_is_read_once(monkeypatch, path):
    monkeypatch.setattr(exported_files, "REMEMBERED_BYTES", 0)
    monkeypatch.setattr(exported_files, "SETTLED_NS", -(10**12))
    reads = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *asked: reads.append(1) or digest(*asked))

    assert {file_sha256(path) for _ in range(3)} == {hashlib.sha256(b"first").hexdigest()}
    assert len(reads) == 1


@pytest.mark.parametrize("settled_ns", [-(10**12), exported_files.SETTLED_NS])
def test_other_bytes_of_the_same_length_and_time_are_read_again(monkeypatch, path, settled_ns):
    monkeypatch.setattr(exported_files, "REMEMBERED_BYTES", 0)
    monkeypatch.setattr(exported_files, "SETTLED_NS", settled_ns)
    before, stat = file_sha256(path), path.stat()

    while path.stat().st_ctime_ns == stat.st_ctime_ns:
        path.write_bytes(b"other")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert file_sha256(path) == hashlib.sha256(b"other").hexdigest() != before
