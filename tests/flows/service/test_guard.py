import subprocess
import sys

import psutil

from flows.service.guard import end_session, line_for
from tests.waiting import wait_for

SLEEP = "import time; time.sleep(60)"
WITH_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def start(program):
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    return process, psutil.Process(process.pid).create_time()


def test_what_a_dead_leader_left_behind_is_ended():
    leader, started = start(WITH_CHILD)
    child = psutil.Process(int(leader.stdout.readline()))
    leader.communicate()
    assert child.is_running()

    end_session(leader.pid, started, patience_s=10.0)

    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_what_a_process_has_started_ends_well_before_it(tmp_path):
    """Prefect's serving process kills its flow runs at once when it is told to end."""
    mark = tmp_path / "mark"
    child = f"""
import signal, sys, time
from pathlib import Path
def end(*_):
    time.sleep(0.3)
    Path({str(mark)!r}).write_text("machines ended")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
    program = f"""
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit()))
print(child.stdout.readline().decode(), flush=True)
child.wait()
"""
    leader, started = start(program)
    assert leader.stdout.readline() == "up\n"

    end_session(leader.pid, started, patience_s=10.0)

    leader.communicate()
    assert mark.read_text() == "machines ended"


def test_a_leader_that_does_not_end_is_killed_after_the_wait():
    leader, started = start(DEAF)
    leader.stdout.readline()

    end_session(leader.pid, started, patience_s=0.1)

    assert leader.wait(5) == -9
    leader.stdout.close()


def test_a_process_that_has_got_an_old_number_is_left_alone():
    other, started = start(SLEEP)

    end_session(other.pid, started - 100.0, patience_s=0.0)

    assert other.poll() is None
    other.kill()
    other.communicate()


def test_the_guard_acts_when_its_pipe_closes():
    leader, _ = start(WITH_CHILD)
    child = psutil.Process(int(leader.stdout.readline()))
    line = line_for(leader.pid, patience_s=10.0)
    leader.communicate()

    guard = [sys.executable, "-m", "flows.service.guard"]
    subprocess.run(guard, input=line, text=True, check=True, timeout=30)

    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, timeout_s=5)
