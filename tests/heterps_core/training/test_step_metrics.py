"""Metrics of steps: written together, and kept while they cannot be."""

from heterps_core.training.step_metrics import MetricWriter, StepMetrics, read_progress, read_steps
from heterps_core.training.storage.run_directory import RunDirectory


def make_step(step: int) -> StepMetrics:
    return StepMetrics(step=step, epoch=0, num_samples=10, loss=0.5, elapsed_s=float(step))


def test_steps_are_read_as_they_were_written_by_attempt(tmp_path):
    run = RunDirectory(str(tmp_path))
    for attempt, steps in enumerate([[1, 2, 3], [3, 4]]):
        writer = MetricWriter(run, num_steps=4, attempt=attempt)
        for step in steps:
            writer.add(make_step(step))
        writer.flush("training")

    assert [[metrics.step for metrics in attempt] for attempt in read_steps(run)] == [[1, 2, 3], [3, 4]]
    assert read_progress(run).step == 4


def test_what_cannot_be_written_is_written_later(tmp_path, monkeypatch):
    run = RunDirectory(str(tmp_path))
    writer = MetricWriter(run, num_steps=2, attempt=0)
    with monkeypatch.context() as full:
        full.setattr(
            run, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        writer.add(make_step(1))
    writer.add(make_step(2))
    writer.flush("training")

    assert [metrics.step for metrics in read_steps(run)[0]] == [1, 2]


def test_no_progress_before_the_first_step(tmp_path):
    assert read_progress(RunDirectory(str(tmp_path))) is None
    assert read_steps(RunDirectory(str(tmp_path))) == []


def test_last_words_are_written_in_the_reserved_space(tmp_path, monkeypatch):
    run = RunDirectory(str(tmp_path))
    run.reserve_space()
    write_json = run.write_json

    def write_where_there_is_room(key, document):
        if run.exists("reserve"):
            raise OSError(28, "No space left on device")
        write_json(key, document)

    monkeypatch.setattr(run, "write_json", write_where_there_is_room)
    run.write_last_words("nodes/a/exit.json", {"exit_status": 1})

    assert run.read_json("nodes/a/exit.json") == {"exit_status": 1}
    assert not run.exists("reserve")
