"""The file of cold rows says where it finds no room, and belongs to one table of one process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from heterps_core.data.batch import ClickBatch
from heterps_core.embeddings.swept.cold_rows import ColdRows
from heterps_core.errors import ConfigurationError, TrainingError
from heterps_core.training.pipeline.stage_runner import MicroBatch
from heterps_core.training.swept_batches import _BatchFile

SMALL_BYTES = 8 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "none", folder], check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_blocks_come_back_as_they_were_written(tmp_path):
    rows = ColdRows([tmp_path], what="a table", num_rows=200_000, width=17)
    buffer = rows.new_buffer()
    for block in range(rows.num_blocks):
        buffer[:] = block + np.arange(17) / 32
        rows.write(block, buffer)

    for block in reversed(range(rows.num_blocks)):
        rows.read(block, buffer)
        assert (buffer == np.float32(block + np.arange(17) / 32)).all()
    assert rows.num_blocks * rows.rows_per_block >= 200_000
    assert rows.block_bytes % 4096 == 0


def test_a_block_that_the_system_writes_and_reads_in_pieces_is_whole(tmp_path):
    rows = ColdRows([tmp_path], what="a table", num_rows=10, width=4)
    (file,) = rows._files
    written, found = rows.new_buffer(), rows.new_buffer()
    written[:] = np.arange(written.size).reshape(written.shape)

    def of_one_page(call):
        return lambda number, parts, start: call(number, [parts[0][:4096]], start)

    file.transfer(of_one_page(os.pwritev), 0, written)
    file.transfer(of_one_page(os.preadv), 0, found)

    assert written.nbytes > 4096
    assert (found == written).all()


def test_two_files_in_one_folder_are_apart_and_have_no_names(tmp_path):
    first, second = (ColdRows([tmp_path], what="a table", num_rows=10, width=4) for _ in range(2))
    ones = first.new_buffer()
    ones[:] = 1.0
    first.write(0, ones)

    second.read(0, ones)

    assert not ones.any()
    assert list(tmp_path.iterdir()) == []


def test_space_comes_back_when_a_table_is_gone(tmp_path, small_disk):
    rows = ColdRows([small_disk], what="a table", num_rows=100_000, width=4)
    used = shutil.disk_usage(small_disk).used
    del rows

    assert used >= 100_000 * 16
    assert shutil.disk_usage(small_disk).used == 0


@pytest.mark.root
def test_a_disk_that_is_full_leaves_its_blocks_to_the_others(tmp_path, small_disk):
    other = tmp_path / "other"

    rows = ColdRows([small_disk, other], what="a table", num_rows=400_000, width=17)

    buffer = rows.new_buffer()
    for block in range(rows.num_blocks):
        buffer[:] = block
        rows.write(block, buffer)
    for block in reversed(range(rows.num_blocks)):
        rows.read(block, buffer)
        assert (buffer == block).all()
    used = shutil.disk_usage(small_disk).used
    assert SMALL_BYTES - rows.block_bytes < used <= SMALL_BYTES


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigurationError, match=r"folder for rows on disk must exist.*file/rows"):
        ColdRows([tmp_path, tmp_path / "file" / "rows"], what="a table", num_rows=10, width=4)


@pytest.mark.root
def test_disks_that_have_no_room_together_are_all_named(tmp_path, small_disk):
    with pytest.raises(ConfigurationError) as failure:
        ColdRows([small_disk, small_disk / "more"], what="table 'embedding'", num_rows=2_000_000, width=4)

    message = str(failure.value)
    assert (
        f"{small_disk} has {SMALL_BYTES:,} free and {small_disk / 'more'} has {SMALL_BYTES:,} free: "
        in message
    )


@pytest.mark.root
def test_a_table_that_the_disk_has_no_room_for_is_refused_before_it_is_filled(small_disk):
    with pytest.raises(ConfigurationError) as failure:
        ColdRows([small_disk], what="table 'embedding'", num_rows=1_000_000, width=4)

    message = str(failure.value)
    assert "table 'embedding'" in message
    # 66 blocks of 15 x 1,024 rows, which are no more than a 64th.
    assert "need 16,220,160 bytes of disk" in message
    assert f"has {SMALL_BYTES:,} free: no space is left" in message
    assert "raise embedding_memory_bytes" in message
    assert shutil.disk_usage(small_disk).used == 0


@pytest.mark.root
def test_a_disk_that_fills_up_later_leaves_rows_their_room_and_refuses_batches(small_disk):
    rows = ColdRows([small_disk], what="a table", num_rows=100_000, width=4)
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    buffer = rows.new_buffer()
    for block in range(rows.num_blocks):
        rows.write(block, buffer)

    batch = ClickBatch(dense=torch.ones(4, 2), ids=torch.ones(4, 3).long(), labels=torch.ones(4))
    with pytest.raises(TrainingError) as failure:
        _BatchFile().append([MicroBatch(4, batch)], small_disk)

    assert str(failure.value).startswith(
        f"batches that wait for their rows must find room in {small_disk}, but could not be written: "
    )
    assert "No space left on device; free space there and resume the run" in str(failure.value).replace(
        "[Errno 28] ", ""
    )
