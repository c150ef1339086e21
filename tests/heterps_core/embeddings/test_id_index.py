"""Each dynamic id has a row of its own, or its bucket's shared one, by the kernel and by NumPy alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from heterps_core.data.features import BUCKET_ROWS, NO_ID, DynamicIds, FeatureSpec
from heterps_core.data.hashing import keys_of_hashes, mix
from heterps_core.embeddings import id_index
from heterps_core.embeddings.id_index import HAS_ROW, IdIndex, IdLayout

NUM_BUCKETS = (4, 1, 16)


@pytest.fixture(params=["kernel", "numpy"], autouse=True)
def _way(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(id_index, "compiled_functions", lambda declare: None)
    elif id_index.compiled_functions(id_index._declare) is None:
        pytest.skip("no C++ compiler here")


def features(min_sightings: int = 1) -> FeatureSpec:
    return FeatureSpec(
        num_dense=0,
        slot_rows=tuple(number * BUCKET_ROWS for number in NUM_BUCKETS),
        dynamic_ids=DynamicIds(min_sightings=min_sightings),
    )


def ids_of(slot: int, first: int, stop: int) -> torch.Tensor:
    hashes = mix(np.arange(first, stop, dtype=np.uint64))
    return torch.from_numpy(keys_of_hashes(hashes, slot=slot, hash_bits=features().hash_bits))


def new_index(slots=(0, 1, 2), *, min_sightings: int = 1, day: int = 0) -> tuple[IdIndex, torch.Tensor]:
    layout = IdLayout.of(features(min_sightings), slots)
    index = IdIndex.empty(layout, num_rows=layout.num_rows, day=day)
    return index, torch.zeros(layout.num_rows, dtype=torch.bool)


def test_no_two_ids_have_one_row_where_three_quarters_of_the_rows_are_in_use():
    index, changed = new_index()
    ids = torch.cat([ids_of(slot, 0, number * 384) for slot, number in enumerate(NUM_BUCKETS)])

    rows = index.rows_seen(ids, changed)

    assert len(rows.unique()) == len(ids.unique()) == 21 * 384
    assert not (rows % BUCKET_ROWS == 0).any()
    assert torch.equal(index.rows(ids), rows)
    assert torch.equal(changed.nonzero()[:, 0], rows.sort().values)
    # Each within the rows of its slot: 4, 1 and 16 buckets.
    assert torch.equal(rows // BUCKET_ROWS >= 5, ids >> features().hash_bits == 2)
    assert ((rows // BUCKET_ROWS == 4) == (ids >> features().hash_bits == 1)).all()


def test_an_id_reads_its_buckets_shared_row_until_it_was_seen_often_enough():
    index, changed = new_index(min_sightings=3)
    rare, frequent = ids_of(2, 0, 1), ids_of(2, 1, 2)
    shared = torch.from_numpy(index.layout.bucket_rows(frequent.numpy()))

    # Within one call repetitions count once.
    found = [index.rows_seen(torch.cat([frequent, rare, frequent]), changed)]
    found += [index.rows_seen(frequent, changed) for _ in range(3)]

    assert found[0][0] == found[0][2] == found[1] == shared
    assert found[2] == found[3] != shared
    assert index.rows(frequent) == found[3]
    assert index.rows(rare) == int(index.layout.bucket_rows(rare.numpy())[0])
    assert index.rows(ids_of(2, 2, 3)) == int(index.layout.bucket_rows(ids_of(2, 2, 3).numpy())[0])


@pytest.mark.parametrize("min_sightings", [1, 2])
def test_rows_that_were_found_before_others_were_given_theirs_end_as_rows_that_were_not(min_sightings):
    batches = [torch.cat([ids_of(slot, first, first + 90) for slot in (0, 2)]) for first in (0, 60, 0, 120)]
    ahead, changed_ahead = new_index(min_sightings=min_sightings)
    plain, changed = new_index(min_sightings=min_sightings)

    found = [ahead.find(ids) for ids in batches]
    rows_ahead = [ahead.rows_seen(ids, changed_ahead, own) for ids, own in zip(batches, found, strict=True)]
    rows = [plain.rows_seen(ids, changed) for ids in batches]

    assert torch.equal(torch.stack(rows_ahead), torch.stack(rows))
    assert torch.equal(ahead.sightings_R, plain.sightings_R)
    assert torch.equal(ahead.keys_R, plain.keys_R)
    assert torch.equal(changed_ahead, changed)


def test_rows_that_are_only_read_may_be_found_before():
    index, changed = new_index()
    ids = ids_of(0, 0, 100)
    found = index.find(ids)
    index.rows_seen(ids[:40], changed)

    rows = index.rows(ids, found)

    assert torch.equal(rows, index.rows(ids))
    assert (rows[40:] % BUCKET_ROWS == 0).all()


def test_reading_gives_no_id_a_row():
    index, _ = new_index()

    rows = index.rows(ids_of(0, 0, 50))

    assert (rows % BUCKET_ROWS == 0).all()
    assert not (index.keys_R > 0).any()


def test_ids_without_room_read_the_shared_row_of_their_full_bucket():
    index, changed = new_index()
    ids = ids_of(1, 0, 530)

    rows = index.rows_seen(ids, changed)

    own = rows[rows != 4 * BUCKET_ROWS]
    assert len(own.unique()) == len(own) == BUCKET_ROWS - 1
    assert torch.equal(index.rows_seen(ids, changed), rows)


def test_a_place_after_the_end_of_a_list_stays_one():
    index, changed = new_index()
    ids = torch.tensor([[int(ids_of(0, 0, 1)), NO_ID]])

    assert index.rows_seen(ids, changed)[0, 1] == NO_ID
    assert index.rows(ids)[0, 1] == NO_ID


def test_several_shards_hold_what_one_holds():
    whole, changed = new_index()
    ids = torch.cat([ids_of(slot, 0, 900) for slot in (0, 2)])
    expected = whole.rows_seen(ids, changed)

    found = []
    for first in range(0, whole.layout.num_rows, 7 * BUCKET_ROWS):
        shard = IdIndex.empty(whole.layout, num_rows=7 * BUCKET_ROWS, first_row=first)
        buckets = torch.from_numpy(whole.layout.bucket_rows(ids.numpy()))
        is_own = (buckets >= first) & (buckets < first + 7 * BUCKET_ROWS)
        # Another order, and parts of the ids twice, as replicas ask for them.
        own = ids[is_own].flip(0)
        shard.rows_seen(torch.cat([own, own[:9]]), torch.zeros(7 * BUCKET_ROWS, dtype=torch.bool))
        found.append(shard.rows(ids[is_own]) + first)
        assert torch.equal(found[-1], expected[is_own])
        with pytest.raises(IndexError, match=r"out of range for a table shard of 3584 rows"):
            shard.rows(ids[~is_own])

    assert sum(map(len, found)) == len(ids)


def test_an_id_of_a_slot_that_the_table_does_not_look_up_is_refused():
    index, _ = new_index(slots=(0, 2))

    with pytest.raises(IndexError, match=r"of slots \[0, 2\], got some of \[1\]|out of range"):
        index.rows(ids_of(1, 0, 3))


def test_the_day_on_which_an_id_was_seen_last_is_kept():
    index, changed = new_index(day=5)
    ids = ids_of(0, 0, 3)
    rows = index.rows_seen(ids, changed)

    later = IdIndex(index.layout, *index.tensors().values(), day=9)
    later.note_seen(later.rows_seen(ids[1:], changed))

    assert index.last_seen_day_R[rows].tolist() == [5, 9, 9]
    assert (index.keys_R[rows] & HAS_ROW > 0).all()
