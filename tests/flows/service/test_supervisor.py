import os
import subprocess
import sys
import threading
import time

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
from tests.waiting import wait_for

SLEEP = "import time; time.sleep(60)"
WITH_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).wait()"
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
    """All living descendants, but the guard that every supervisor has."""
    return [child for child in psutil.Process().children(recursive=True) if not is_over_or_guard(child)]


def is_over_or_guard(process):
    try:
        return "flows.service.guard" in process.cmdline()
    except psutil.Error:
        return True


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


SUPERVISED = """
import os, sys, time
from pathlib import Path
from flows.service.supervisor import Service, Supervisor

supervisor = Supervisor(environment=dict(os.environ), report=print)
program = {program!r}
supervisor.start(
    Service(name="thing", command=[sys.executable, "-c", program], is_ready=lambda: True, log_path=Path({log!r}))
)
print("up", flush=True)
time.sleep(60)
"""


def test_a_killed_supervisor_leaves_nothing(tmp_path):
    # The service ends at once when its parent is gone, and its child would outlive it.
    program = SUPERVISED.format(program=WITH_CHILD, log=str(tmp_path / "thing.log"))
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert killed.stdout.readline() == "up\n"
    wait_for(lambda: len(psutil.Process(killed.pid).children(recursive=True)) == 3)
    family = psutil.Process(killed.pid).children(recursive=True)

    killed.kill()
    killed.communicate()

    wait_for(lambda: not any(process.is_running() for process in family), timeout_s=15.0)


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
    supervisor.request_stop()
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
    supervisor.request_stop()
    watching.join(5)

    assert second.pid != first.pid


def test_what_keeps_dying_is_given_up(tmp_path, supervisor, monkeypatch):
    supervisor.start(make_service(tmp_path, "print('broken', flush=True)"))
    # The waits between restarts double; nobody waits for them here.
    monkeypatch.setattr("flows.service.supervisor.POLL_S", 0.01)
    monkeypatch.setattr(supervisor._stop_requested, "wait", lambda seconds: time.sleep(min(seconds, 0.02)))

    with pytest.raises(ServiceError, match=rf"more than {MAX_RESTARTS} restarts are not tried[\s\S]*broken"):
        supervisor.watch()


def test_last_lines_of_a_log_that_is_not_there(tmp_path):
    assert "nothing was written" in last_lines(tmp_path / "none.log")
