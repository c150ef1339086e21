import os

import pytest

from heterps_core.errors import HeterpsError
from heterps_core.profiling.measurement.neighbour import neighbour_process


def test_a_neighbour_takes_steps_only_while_it_is_said_to_work():
    reading, writing = os.pipe()

    with neighbour_process(lambda: lambda: os.write(writing, b".")) as neighbour:
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        with neighbour.working():
            assert os.read(reading, 1) == b"."
        while len(os.read(reading, 1 << 16)) == 1 << 16:
            pass
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)


def test_a_neighbour_that_fails_ends_the_measurement_with_one_line():
    def fail():
        raise SystemExit(1)

    with (
        neighbour_process(fail) as neighbour,
        pytest.raises(HeterpsError, match="the process that trains beside"),
        neighbour.working(),
    ):
        pass
