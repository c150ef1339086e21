import os
import shutil
import subprocess
import time

import pytest

from infra.checks import CheckState, machine_checks, package_checks
from infra.workspace import Workspace
from tests.paths import PROJECT


def by_name(checks):
    return {check.what: check for check in checks}


def test_this_machine_can_run_the_line(tmp_path):
    found = by_name(machine_checks(Workspace(root=tmp_path / "new")))

    assert {check.state for check in found.values()} <= {CheckState.OK, CheckState.NOTE}
    assert "not made yet" in found["workspace"].found
    assert f"{os.cpu_count()}" in found["processor cores"].found
    assert not (tmp_path / "new").exists()


def test_the_way_out_make_clean_leaves_bills_and_champions_alone():
    project = PROJECT

    done = subprocess.run(["make", "-n", "clean"], cwd=project, capture_output=True, text=True, check=True)

    assert ".venv" in done.stdout
    assert ".heterps" not in done.stdout


def test_packages_are_held_against_the_lock_file(tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text("# comment\npytest==0.0.1\nno-such-package-at-all==1.0\n")

    absent, other = package_checks(lock)

    assert (absent.state, other.state) == (CheckState.MISSING, CheckState.NOTE)
    assert "no-such-package-at-all" in absent.found
    assert f"pytest {pytest.__version__} instead of 0.0.1" in other.found
    assert str(lock) in absent.fix


def test_the_versions_that_are_installed_pass(tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"pytest=={pytest.__version__}\n")

    [check] = package_checks(lock)

    assert (check.state, check.found) == (CheckState.OK, "all 1 of requirements.lock")


def test_a_missing_compiler_is_a_note_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    check = by_name(machine_checks(Workspace(root=tmp_path)))["C++ compiler"]

    assert (check.state, check.fix) == (CheckState.NOTE, "apt-get install g++")


def test_a_full_disk_is_missing_room(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100 * 2**30, 99 * 2**30, 2**30)
    )

    check = by_name(machine_checks(Workspace(root=tmp_path)))["disk"]

    assert (check.state, check.found) == (
        CheckState.MISSING,
        "1.0 GiB free, 99% used; at least 5 GiB are needed",
    )


def test_a_clock_before_the_last_entry_is_seen(tmp_path):
    workspace = Workspace(root=tmp_path)
    workspace.ledger_path.touch()
    tomorrow = time.time() + 86_400
    os.utime(workspace.ledger_path, (tomorrow, tomorrow))

    check = by_name(machine_checks(workspace))["clock"]

    assert check.state is CheckState.MISSING
    assert "86,4" in check.found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_missing(tmp_path):
    tmp_path.chmod(0o500)

    assert by_name(machine_checks(Workspace(root=tmp_path)))["workspace"].state is CheckState.MISSING
