import logging
from datetime import UTC, datetime

import pytest

from flows.cli import main
from heterps_core.errors import DataError
from heterps_core.training.storage.run_directory import CLUSTER, JOB, PROGRESS, RunDirectory
from heterps_core.training.storage.verified_files import write_signed_json
from tasks.running import run_lifecycle
from tasks.running.progress import log_step
from tasks.running.run_log import FLOW_LOG, kept_log, state_of

RUN = "20261121-0430-1a2b3c4d"
FLOW_LINES = """\
2026-11-21 04:30:01,000 tasks.running.progress INFO   run        20261121-0430-1a2b3c4d
2026-11-21 04:30:09,000 tasks.running.progress INFO   machines   1 x c7i.large
"""
NODE_LINES = """\
2026-11-21 04:30:05,000 heterps_core.training.worker ERROR it failed
Traceback (most recent call last):
"""


@pytest.fixture
def run(workspace):
    directory = RunDirectory(str(workspace.run_folder(RUN)))
    directory.write_bytes(FLOW_LOG, FLOW_LINES.encode())
    return directory


def lines_of(capsys, *arguments):
    status = main(["logs", *arguments])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out.splitlines()


def test_lines_of_flow_and_nodes_stand_by_their_times_each_with_its_place(run, capsys):
    run.write_bytes("nodes/stage0-node0/workers.log", NODE_LINES.encode())
    run.write_bytes("nodes/stage1-node0/workers.log", b"2026-11-21 04:30:04,000 worker INFO it starts\nhal")

    lines = lines_of(capsys)

    assert [line.partition(" ")[0] for line in lines] == [
        "flow",
        "stage1-node0",
        "stage0-node0",
        "stage0-node0",
        "flow",
    ]
    assert lines[3].endswith("Traceback (most recent call last):")
    assert not any("hal" in line for line in lines)


def test_what_a_node_says_does_not_steer_the_terminal(run, capsys):
    said = "2026-11-21 04:30:05,000 worker INFO \x1b]0;owned\x07\x1b[2J\x1b[1;1Hall is well\n"
    run.write_bytes("nodes/stage0\x1b[7m/workers.log", said.encode())

    printed = "\n".join(lines_of(capsys))

    assert "\x1b" not in printed
    assert r"stage0\x1b[7m" in printed
    assert r"\x1b]0;owned\x07\x1b[2J\x1b[1;1Hall is well" in printed


def test_following_a_run_that_is_over_ends(run, capsys):
    assert len(lines_of(capsys, RUN[:13], "-f")) == 2


def test_a_followed_run_is_read_until_its_record_closes(workspace, run, capsys, monkeypatch):
    tracked = run_lifecycle.open_run(workspace, run_id=RUN, run_name="ctrdnn exact", tags={})

    def more_then_end(seconds):
        path = run.path(FLOW_LOG)
        path.write_text(path.read_text() + FLOW_LINES.splitlines()[-1].replace(":09,", ":10,") + "\n")
        run_lifecycle.close_run(workspace, tracked, status="FINISHED", reason="completed")

    monkeypatch.setattr("flows.commands.logs.time.sleep", more_then_end)

    assert [line[13:36] for line in lines_of(capsys, "-f")][-1] == "2026-11-21 04:30:10,000"


def test_a_run_without_a_log_is_refused_in_one_line(workspace, capsys):
    workspace.run_folder(RUN).mkdir()

    assert main(["logs"]) == 2
    assert f"{RUN} left none in {workspace.run_folder(RUN)}" in capsys.readouterr().err


def test_the_log_of_a_run_has_its_steps_and_what_ended_it(workspace):
    logging.getLogger("tasks").setLevel(logging.INFO)

    def fail():
        with kept_log(workspace, RUN, loggers=["tasks"]):
            log_step("data", "clicks.tsv: 5 rows")
            raise DataError("clicks.tsv", "line 3 is short")

    with pytest.raises(DataError):
        fail()
    log_step("data", "of another run")

    first, last = (workspace.run_folder(RUN) / FLOW_LOG).read_text().splitlines()
    assert first.endswith("tasks.running.progress INFO   data       clicks.tsv: 5 rows")
    assert last.endswith("ERROR DataError: clicks.tsv: line 3 is short")
    assert datetime.strptime(first[:19], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).year >= 2026


def test_a_run_that_trains_tells_step_speed_and_time_left(workspace, run):
    assert state_of(workspace, RUN, run)["phase"] == "launching"
    run.write_json(CLUSTER, {})
    write_signed_json(run, JOB, {"config": {"batch_size": 100}})
    run.write_json(
        PROGRESS,
        {
            "phase": "training",
            "step": 30,
            "num_steps": 80,
            "num_samples": 2_000,
            "loss": 0.5,
            "elapsed_s": 4.0,
            "attempt": 1,
        },
    )

    state = state_of(workspace, RUN, run)

    # By hand: 2,000 samples of this launch in 4 s; 50 steps of 100 samples are left.
    assert (state["phase"], state["step"], state["num_steps"]) == ("training", 30, 80)
    assert (state["samples_per_s"], state["seconds_left"]) == (500.0, 10.0)


def test_a_run_that_is_planned_again_does_not_tell_steps_of_the_launch_before(workspace, run):
    path = run.path(FLOW_LOG)
    run.write_json(PROGRESS, {"phase": "training", "step": 30, "num_steps": 80})
    path.write_text(path.read_text() + FLOW_LINES.splitlines()[0] + "\n")

    state = state_of(workspace, RUN, run)

    assert (state["phase"], state["step"]) == ("preparing data", None)
