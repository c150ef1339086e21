import os
import socket
import sys
import threading
import time

import psutil
import pytest

from flows.supervisor import (
    MAX_RESTARTS,
    Service,
    ServiceError,
    Supervisor,
    check_port_is_free,
    last_lines,
)
from heterps_core.errors import ConfigurationError

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


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def own_children():
    return psutil.Process().children(recursive=True)


def test_stopping_ends_a_service_with_its_children(tmp_path, supervisor):
    before = set(own_children())
    supervisor.start(make_service(tmp_path, WITH_CHILD))
    wait_until(lambda: len(set(own_children()) - before) == 2)
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


def test_a_service_that_does_not_answer_is_given_up(tmp_path, supervisor):
    with pytest.raises(ServiceError, match="must answer within 0 s"):
        supervisor.start(make_service(tmp_path, SLEEP, is_ready=lambda: False, start_timeout_s=0.1))


def test_what_dies_is_started_again(tmp_path, supervisor):
    before = set(own_children())
    supervisor.start(make_service(tmp_path, SLEEP))
    [first] = set(own_children()) - before
    watching = threading.Thread(target=supervisor.watch)
    watching.start()

    first.kill()
    wait_until(lambda: supervisor.lines[-1:] == ["thing is up again"])
    supervisor.request_stop()
    watching.join(5)

    [second] = set(own_children()) - before
    assert second.pid != first.pid


def test_what_keeps_dying_is_given_up(tmp_path, supervisor, monkeypatch):
    supervisor.start(make_service(tmp_path, "print('broken', flush=True)"))
    # The waits between restarts double; nobody waits for them here.
    monkeypatch.setattr("flows.supervisor.POLL_S", 0.01)
    monkeypatch.setattr(supervisor._stop_requested, "wait", lambda seconds: time.sleep(min(seconds, 0.02)))

    with pytest.raises(ServiceError, match=rf"more than {MAX_RESTARTS} restarts are not tried[\s\S]*broken"):
        supervisor.watch()


def test_a_free_port_passes_and_a_taken_one_names_its_owner():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=rf"port {port}.*by process {os.getpid()}.*PORT_X=<port>"
        ):
            check_port_is_free(port, purpose="a test", variable="PORT_X")

    check_port_is_free(port, purpose="a test", variable="PORT_X")


def test_last_lines_of_a_log_that_is_not_there(tmp_path):
    assert "nothing was written" in last_lines(tmp_path / "none.log")
