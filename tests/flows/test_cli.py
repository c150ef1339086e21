import errno
import os
import subprocess
import sys

import pytest

from flows.cli import COMMANDS, FLOWS, main
from flows.commands.planning import plan as plan_command
from tests.flows.new_process import check_starts_light, ends_of_helps
from tests.paths import TESTS

FIVE_LAYERS = str(TESTS / "golden" / "problems" / "five_layers_1.json")


def test_an_interrupt_ends_with_the_shells_status(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "run", interrupted)

    assert main(["plan", FIVE_LAYERS, "--scheduler", "exact"]) == 130
    assert capsys.readouterr().err == "heterps: interrupted\n"


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"]])
def test_help_is_given(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 0
    assert "heterps plan" in capsys.readouterr().out or arguments == ["--help"]


@pytest.mark.parametrize(
    "arguments",
    [["runs", "--last", "x"], ["plan"], ["train", "--epochs"], ["nope"]],
    ids=lambda given: given[0],
)
def test_a_wrong_argument_is_one_line(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("heterps")
    assert ": error: " in said
    assert said.count("\n") == 1


def test_the_help_of_no_command_loads_a_library_that_takes_long():
    assert ends_of_helps() == ["0 []"] * (len(COMMANDS) + len(FLOWS))


def test_parameters_of_flows_are_known_without_numpy_and_arrow():
    program = "import sys, flows.parameters; print(sorted({'numpy', 'pyarrow'} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_the_help_of_a_flow_is_reported_without_its_services():
    program = (
        "import sys, flows.command_line as line, flows.parameters as known; "
        "line._parser_for(known.TrainParameters, program='x').format_help(); "
        "print(sorted({'prefect', 'flows.service.prefect_connection'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_a_folder_of_prefect_that_cannot_be_made_is_not_reported(tmp_path):
    # A file in its place cannot be made a folder, for root neither.
    (tmp_path / ".prefect").write_text("")

    done = subprocess.run(
        [sys.executable, "-c", "import flows, prefect"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PREFECT_HOME": str(tmp_path / ".prefect" / "x")},
    )

    assert done.stderr == ""


def test_exact_starts_without_torch_and_optuna():
    check_starts_light("plan", FIVE_LAYERS, "--scheduler", "exact")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EACCES, "Permission denied: plan.json"),
        (errno.ENOSPC, "No space left on device: plan.json"),
        (errno.ENOENT, "No such file or directory: plan.json"),
    ],
)
def test_what_the_system_refuses_is_one_line(monkeypatch, capsys, number, message):
    def refused(options):
        raise OSError(number, os.strerror(number), "plan.json")

    monkeypatch.setattr(plan_command, "run", refused)

    assert main(["plan", FIVE_LAYERS, "--scheduler", "exact"]) == 2
    assert capsys.readouterr().err == f"heterps: error: {message}\n"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def broken(options):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(plan_command, "run", broken)

    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["plan", FIVE_LAYERS, "--scheduler", "exact"])


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m flows.cli plan {FIVE_LAYERS} --scheduler exact | true"

    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


TELL_CORES = """
import ctypes, threading
import flows.cli
import torch
maps = open("/proc/self/maps").read().split()
openmp = ctypes.CDLL(next(path for path in maps if "gomp" in path or "iomp" in path))
beside = threading.Thread(target=lambda: print(openmp.omp_get_max_threads()))
beside.start()
beside.join()
print(torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "reported"), [({}, ["1", "1"]), ({"OMP_NUM_THREADS": "2"}, ["2", "2"])])
def test_each_thread_of_a_command_computes_with_one_core_where_nobody_says_otherwise(given, reported):
    ended = subprocess.run(
        [sys.executable, "-c", TELL_CORES],
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"], **given},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ended.stdout.split() == reported
