"""A checkpoint gets each changed row once, and no block is written over what it has not read."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from heterps_core.embeddings.swept.block_changes import BlockChanges

NUM_BLOCKS, ROWS_PER_BLOCK = 6, 16


@pytest.fixture
def changes():
    """Return changes of which a checkpoint still has to read rows 2 and 5 of blocks 1, 2 and 4."""
    found = BlockChanges(NUM_BLOCKS, ROWS_PER_BLOCK)
    for block in (1, 2, 4):
        leave(found, block, [2, 5])
        assert found.begin_checkpoint(block, np.array([], dtype=np.int64)).tolist() == []
    return found


def leave(changes, block, rows):
    """Let changed rows of a block leave memory."""
    with changes.at(block):
        slots = np.arange(len(rows), dtype=np.int32)
        changes.take(block, np.ones(len(rows), dtype=bool), (np.array(rows, dtype=np.int32), slots))


def test_a_checkpoint_has_what_changed_since_the_one_before_alone(changes):
    changes.finish(1)
    leave(changes, 1, [3])
    in_memory = np.array([2, 3])
    assert changes.begin_checkpoint(1, in_memory).tolist() == [3]
    assert changes.begin_checkpoint(1, in_memory).tolist() == []


def test_blocks_that_are_written_next_are_read_first(changes):
    with changes.at(2, writes=True):
        pass
    assert changes.pending_blocks() == [4, 1, 2]
    assert changes.pending(2).tolist() == [2, 5]


def test_a_block_is_written_twice_only_where_a_checkpoint_has_read_it(changes):
    has_written = threading.Event()

    def write_twice():
        for _ in range(2):
            with changes.at(1, writes=True):
                pass
        has_written.set()

    thread = threading.Thread(target=write_twice, daemon=True)
    thread.start()
    assert not has_written.wait(0.1)
    with changes.at(1):
        changes.finish(1)
    assert has_written.wait(20)
    with changes.at(1, writes=True):
        pass
