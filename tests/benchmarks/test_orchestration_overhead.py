import pytest

from heterps_core.training.storage.run_directory import RunDirectory
from tests.benchmarks.orchestration_overhead import PARTS, NightStart, first_told, ready_workers


def test_the_parts_of_a_start_are_what_passes_between_moments_and_add_up():
    moments = {moment: 100.0 + 2.0**number for number, (_, moment) in enumerate(PARTS)}

    night = NightStart(asked=100.0, moments=moments)

    assert list(night.parts_s.values()) == [1, 1, 2, 4, 8, 16, 32, 64]
    assert night.asked_to_first_step_s == pytest.approx(sum(night.parts_s.values()))
    assert night.start_to_first_step_s == pytest.approx(127)


def test_a_word_counts_from_when_it_was_told_first():
    story = [("  data       days", 1.0), ("\n", 2.0), ("  plan       x", 3.0), ("  data  in the report", 4.0)]

    told = first_told(story)

    assert (told["data"], told["plan"]) == (1.0, 3.0)


def test_workers_are_ready_when_their_logs_say_that_they_start(tmp_path):
    directory = RunDirectory(str(tmp_path))
    log = "2026-11-21 20:38:54,046 __main__ INFO rank 0 is stage 0 replica 0 on cpu, starts at step 0\n"
    directory.write_bytes("nodes/a/workers.log", f"noise\n{log}noise\n".encode())
    directory.write_bytes("nodes/b/workers.log", log.replace("54,046", "56,500").encode())

    first, second = sorted(ready_workers(directory))

    assert second - first == pytest.approx(2.454)
