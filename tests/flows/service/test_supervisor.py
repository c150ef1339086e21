import os
import subprocess
import sys
import threading
from contextlib import suppress

import psutil
import pytest

from flows.service.supervisor import (
    MAX_RESTARTS,
    SERVICE_VARIABLE,
    Service,
    ServiceError,
    Supervisor,
    _last_lines,
    end_leftovers,
)
from heterps_core.errors import ConfigurationError
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


def make_service(tmp_path, program, *, is_ready=lambda: True, start_timeout_s=120.0, stop_timeout_s=5.0):
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


def words_of(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


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
    """Prefect's serving process kills its flow runs at once when it is asked to end."""
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


@pytest.fixture
def killed_supervisor(tmp_path):
    """Two services whose supervisor was killed, each with an orphan and a process in a session of its own."""
    program = f"""
import os, time
from pathlib import Path
from tests.flows.service.test_supervisor import WITH_ORPHAN, two_services
from flows.service.supervisor import Supervisor
Supervisor(environment=dict(os.environ), report=print).start(*two_services(Path({str(tmp_path)!r})))
print("up", flush=True)
time.sleep(60)
"""
    environment = {"TESTED_IN": str(tmp_path)}
    killed = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert killed.stdout.readline() == "up\n"
    wait_for(lambda: [words_of(each)[-1:] for each in of_environment(environment)].count([SLEEP]) == 4)
    killed.kill()
    killed.communicate()
    yield environment
    for process in of_environment(environment):
        process.kill()


def two_services(tmp_path):
    made = [make_service(tmp_path, WITH_ORPHAN) for _ in range(2)]
    for number, service in enumerate(made):
        service.name = f"thing {number}"
    return made


def of_environment(environment):
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if environment.items() <= process.environ().items() and is_living(process):
                found.append(process)
    return found


def test_what_a_killed_supervisor_has_left_is_ended_by_the_next_one(tmp_path, killed_supervisor):
    other = subprocess.Popen(
        [sys.executable, "-c", SLEEP],
        env={**os.environ, **killed_supervisor, SERVICE_VARIABLE: "another thing"},
        start_new_session=True,
    )

    assert end_leftovers(two_services(tmp_path), environment=killed_supervisor)

    assert [process.pid for process in of_environment(killed_supervisor)] == [other.pid]
    assert not end_leftovers(two_services(tmp_path), environment=killed_supervisor)
    other.kill()
    other.wait()


def test_stopping_ends_orphans_and_other_sessions_too(tmp_path, supervisor):
    before = set(own_children())
    supervisor.environment = {**os.environ, "TESTED_IN": str(tmp_path)}
    supervisor.start(*two_services(tmp_path))
    below = {"TESTED_IN": str(tmp_path)}
    wait_for(lambda: [words_of(each)[-1:] for each in of_environment(below)].count([SLEEP]) == 4)

    supervisor.stop()

    wait_for(lambda: not of_environment(below))
    assert set(own_children()) <= before


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
    watching.join(120)

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
    watching.join(120)

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
    assert _last_lines(tmp_path / "none.log") == []
