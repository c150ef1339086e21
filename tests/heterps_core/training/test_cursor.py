"""The position in the data."""

from heterps_core.training.checkpoint import TrainingCursor


def test_a_cursor_visits_every_batch_of_every_epoch_once():
    cursor, visited = TrainingCursor(), []
    while cursor.epoch < 2:
        visited.append((cursor.epoch, cursor.batch_index))
        cursor = cursor.after_batch(3)

    assert visited == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert cursor.step == 6


def test_a_cursor_survives_json():
    cursor = TrainingCursor(epoch=2, batch_index=5, step=17)

    assert TrainingCursor.from_json(cursor.to_json()) == cursor
