import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from flows.service.supervisor import (
    MAX_RESTARTS,
    Service,
    ServiceError,
    Supervisor,
    last_lines,
)
from heterps_core.errors import ConfigurationError
from tests.benchmarks.served_processes import words_of
from tests.waiting import wait_for

SLEEP = "import time; time.sleep(60)"
WITH_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"
WITH_ORPHAN = f"""
import subprocess, sys
middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}])"
subprocess.run([sys.executable, "-c", middle])
subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True).wait()
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""


@pytest.fixture
def supervisor():
    lines = []
    made = Supervisor(environment=dict(os.environ), report=lines.append)
    made.lines = lines
    yield made
    made.stop()


def make_service(tmp_path, program, *, is_ready=lambda: True, start_timeout_s=10.0, stop_timeout_s=5.0):
    return Service(
        name="thing",
        command=[sys.executable, "-c", program],
        is_ready=is_ready,
        log_path=tmp_path / "thing.log",
        start_timeout_s=start_timeout_s,
        stop_timeout_s=stop_timeout_s,
    )


def own_children():
    return descendants(psutil.Process())


def descendants(process):
    return [each for each in psutil.Process(process.pid).children(recursive=True) if is_living(each)]


def is_living(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_stopping_ends_a_service_with_its_children(tmp_path, supervisor):
    before = set(own_children())
    supervisor.start(make_service(tmp_path, WITH_CHILD))
    wait_for(lambda: len(set(own_children()) - before) == 2)
    started = set(own_children()) - before

    supervisor.stop()
    supervisor.stop()

    assert not any(process.is_running() for process in started)


def test_a_service_that_ignores_the_request_is_killed(tmp_path, supervisor):
    log = tmp_path / "thing.log"
    before = set(own_children())
    is_deaf = lambda: log.exists() and "deaf" in log.read_text()  # noqa: E731
    supervisor.start(make_service(tmp_path, STUBBORN, is_ready=is_deaf, stop_timeout_s=0.2))

    supervisor.stop()

    assert set(own_children()) <= before


def test_a_service_that_ends_while_starting_is_shown_with_its_last_lines(tmp_path, supervisor):
    program = "import sys; print('no such database'); sys.exit(3)"

    with pytest.raises(ServiceError, match=r"ended with status 3 while starting[\s\S]*no such database"):
        supervisor.start(make_service(tmp_path, program, is_ready=lambda: False))


def test_a_service_that_calls_its_settings_wrong_ends_all_in_one_line(tmp_path, supervisor):
    program = "import sys; print('error: zone must be a name, got 7'); sys.exit(2)"

    with pytest.raises(
        ConfigurationError, match=r"^thing must have settings that can be used: zone must be a name, got 7$"
    ):
        supervisor.start(make_service(tmp_path, program, is_ready=lambda: False))


def test_a_service_that_does_not_answer_is_given_up(tmp_path, supervisor):
    with pytest.raises(ServiceError, match="must answer within 0 s"):
        supervisor.start(make_service(tmp_path, SLEEP, is_ready=lambda: False, start_timeout_s=0.1))


def test_what_a_service_has_started_ends_well_before_it(tmp_path, supervisor):
    """Prefect's serving process kills its flow runs at once when it is told to end."""
    mark, log = tmp_path / "mark", tmp_path / "thing.log"
    run = f"""
import signal, sys, time
from pathlib import Path
def end(*_):
    time.sleep(0.3)
    Path({str(mark)!r}).write_text("machines ended")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("runs", flush=True)
time.sleep(60)
"""
    program = f"""
import signal, subprocess, sys
run = subprocess.Popen([sys.executable, "-c", {run!r}])
signal.signal(signal.SIGTERM, lambda *_: (run.kill(), sys.exit()))
run.wait()
"""
    supervisor.start(make_service(tmp_path, program, is_ready=lambda: "runs" in log.read_text()))

    supervisor.stop()

    assert mark.read_text() == "machines ended"


GUARDED = """
import os, sys, time
from pathlib import Path
from flows.service.supervisor import Service, Supervisor, run_guarded

supervisor = Supervisor(environment=dict(os.environ), report=print)
services = [
    Service(name=f"thing {{number}}", command=[sys.executable, "-c", {program!r}], is_ready=lambda: True,
            log_path=Path({log!r}))
    for number in range(2)
]

def work():
    supervisor.start(*services)
    print("up", flush=True)
    try:
        supervisor.watch()
    finally:
        supervisor.stop()
    return 5

sys.exit(run_guarded(supervisor, work))
"""


@pytest.fixture
def guarded(tmp_path):
    """A guarding process, its child with the supervisor, and what is below that."""
    program = GUARDED.format(program=WITH_ORPHAN, log=str(tmp_path / "thing.log"))
    guard = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert guard.stdout.readline() == "up\n"
    # Of each of two services one orphan, and one in a session of its own.
    wait_for(lambda: [words_of(each)[-1:] for each in descendants(guard)].count([SLEEP]) == 4)
    [child] = psutil.Process(guard.pid).children()
    yield guard, child, descendants(guard)
    guard.communicate(timeout=15)


def test_a_stop_ends_orphans_and_other_sessions_too(guarded):
    guard, _, below = guarded

    guard.send_signal(signal.SIGTERM)

    assert guard.wait(15) == 5
    assert not any(is_living(process) for process in below)


@pytest.mark.parametrize("killed", ["guard", "child"])
def test_whichever_process_is_killed_nothing_is_left(guarded, killed):
    guard, child, below = guarded

    (guard if killed == "guard" else child).kill()

    wait_for(lambda: not any(is_living(process) for process in below), timeout_s=15.0)
    assert guard.wait(15) == (-9 if killed == "guard" else 128 + 9)


def test_what_ends_with_its_thread_is_not_left_by_a_killed_process(tmp_path):
    program = f"""
import os, time
from pathlib import Path
from tests.flows.service.test_supervisor import SLEEP, make_service
from flows.service.supervisor import Supervisor
supervisor = Supervisor(environment=dict(os.environ), report=print, ends_with_thread=True)
supervisor.start(make_service(Path({str(tmp_path)!r}), SLEEP))
print("up", flush=True)
time.sleep(60)
"""
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert killed.stdout.readline() == "up\n"
    [service] = psutil.Process(killed.pid).children()

    killed.kill()
    killed.communicate()

    wait_for(lambda: not is_living(service))


def test_a_service_that_dies_while_it_is_restarted_is_tried_again(tmp_path, supervisor, monkeypatch):
    """A port may be held for a moment yet by what has died."""
    starts = tmp_path / "starts"
    program = f"""
import sys, time
from pathlib import Path
starts = Path({str(starts)!r})
starts.write_text((starts.read_text() if starts.exists() else "") + "x")
if starts.read_text() == "xx":
    sys.exit("the port is taken")
Path({str(tmp_path / "ready")!r}).write_text(starts.read_text())
time.sleep(1 if starts.read_text() == "x" else 60)
"""
    ready = tmp_path / "ready"
    seen = [""]

    def is_ready():
        text = ready.read_text() if ready.exists() else ""
        is_new, seen[0] = text != seen[0], text
        return is_new

    supervisor.start(make_service(tmp_path, program, is_ready=is_ready))
    watching = threading.Thread(target=supervisor.watch)
    watching.start()

    wait_for(lambda: supervisor.lines[-1:] == ["thing is up again"])
    supervisor.stop_requested.set()
    watching.join(5)

    assert starts.read_text() == "xxx"


def test_what_dies_is_started_again(tmp_path, supervisor):
    before = set(own_children())
    supervisor.start(make_service(tmp_path, SLEEP))
    [first] = set(own_children()) - before
    watching = threading.Thread(target=supervisor.watch)
    watching.start()

    first.kill()
    wait_for(lambda: supervisor.lines[-1:] == ["thing is up again"])
    # Before the thread ends: Linux counts the thread that started a process as its parent.
    [second] = set(own_children()) - before
    supervisor.stop_requested.set()
    watching.join(5)

    assert second.pid != first.pid


def test_what_keeps_dying_is_given_up(tmp_path, supervisor, monkeypatch):
    supervisor.start(make_service(tmp_path, "print('broken', flush=True)"))
    # The waits between restarts double; nobody waits for them here.
    monkeypatch.setattr("flows.service.supervisor.POLL_S", 0.01)
    wait = supervisor.stop_requested.wait
    monkeypatch.setattr(supervisor.stop_requested, "wait", lambda seconds: wait(min(seconds, 0.02)))

    with pytest.raises(ServiceError, match=rf"more than {MAX_RESTARTS} restarts are not tried[\s\S]*broken"):
        supervisor.watch()


def test_last_lines_of_a_log_that_is_not_there(tmp_path):
    assert "nothing was written" in last_lines(tmp_path / "none.log")
