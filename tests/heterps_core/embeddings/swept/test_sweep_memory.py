"""Memory is divided among tables by what batches touch."""

from __future__ import annotations

from fractions import Fraction

import pytest

from heterps_core.embeddings.swept.sweep_memory import ShardSize, memory_of_batches, slots_by_table
from heterps_core.errors import ConfigurationError


def size(num_rows: int, most_rows: int) -> ShardSize:
    return ShardSize(num_rows=num_rows, width=17, most_rows=most_rows)


def test_small_tables_are_in_memory_and_what_they_leave_is_for_the_others():
    shards = {"large": size(50_000_000, 100_000), "small": size(10_000, 10_000)}
    memory_bytes = 400_000_000

    slots = slots_by_table(shards, memory_bytes)

    assert slots["small"] is None
    left = memory_bytes - shards["small"].whole_bytes - shards["large"].fixed_bytes
    assert slots["large"] == left // shards["large"].slot_bytes


def test_a_slot_takes_its_row_a_share_of_checkpoints_and_lists():
    """By hand: 17 float32, three parts of a 32nd for checkpoints, 33 bytes of lists."""
    assert size(10, 1).slot_bytes == 68 + 6 + 33


def test_memory_for_all_rows_leaves_nothing_on_disk():
    shards = {"a": size(50_000, 1_000), "b": size(70_000, 1_000)}

    assert slots_by_table(shards, 120_000 * 68) == {"a": None, "b": None}


def test_memory_that_holds_no_rows_is_refused_with_what_suffices_for_eight_batches():
    shards = {"a": size(50_000_000, 100_000)}
    enough = memory_of_batches(shards.values(), 8)

    with pytest.raises(ConfigurationError) as failure:
        slots_by_table(shards, shards["a"].fixed_bytes)

    assert f"at most {enough:,} bytes for a, got {shards['a'].fixed_bytes:,}" in str(failure.value)
    assert slots_by_table(shards, enough) == {"a": 800_000}


def test_memory_of_some_batches_has_the_rows_of_so_many_of_each_table():
    shards = {
        "narrow": ShardSize(num_rows=1_000_000, width=2, most_rows=3_000),
        "wide": size(1_000_000, 2_000),
    }
    batches = memory_of_batches(shards.values(), Fraction(7, 2))

    assert slots_by_table(shards, batches) == {"narrow": 10_500, "wide": 7_000}

    shards["whole"] = size(5_000, 2_000)
    slots = slots_by_table(shards, memory_of_batches(shards.values(), Fraction(7, 2)))

    # Of the memory for 7,000 rows a table of 5,000 needs a part, and leaves the others some.
    assert slots["whole"] is None
    assert slots["narrow"] >= 10_500
    assert slots["wide"] >= 7_000


def test_buffers_are_small_beside_a_small_shard():
    # Five blocks of a 64th, and 4 bits a row.
    assert size(640 * 1024, 1).fixed_bytes == 5 * 10 * 1024 * 68 + 640 * 1024 * 4 // 8
    assert size(50_000_000, 1).buffer_bytes <= 5 * 4 * 1024**2
