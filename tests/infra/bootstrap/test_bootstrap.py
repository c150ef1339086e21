"""What a node does from its first boot on: the script itself, and a fleet of hosts that run it."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from heterps_core.training.storage.run_directory import RunDirectory
from infra.bootstrap.node_start import BOOTSTRAP_SCRIPT, publish_node_wheel
from tests.heterps_core.training.node_processes import make_job, prepare_clicks
from tests.heterps_core.training.reference import run_plainly
from tests.network_hosts import why_no_hosts
from tests.s3_server import bucket_location
from tests.tiers import weekly_after
from tests.waiting import wait_for

TERMINATED = -signal.SIGTERM
TIMED_OUT = 124
"""Of the command timeout, which a local node becomes."""

WHERE_IS_THE_CODE = ("-c", "import heterps_core; print(heterps_core.__file__)")

ARROW_TAIL_BYTES = 2**16
"""What Arrow reads of the end of a file, in which its footer lies."""


@pytest.fixture
def environment(tmp_path):
    """Of a node on this machine, without a wheel."""
    return {
        **os.environ,
        "HETERPS_NODE_IS": "process",
        "HETERPS_RUN_ID": "r1",
        "HETERPS_NODE_ID": "stage0-node0",
        "HETERPS_RUN_DIR": str(tmp_path / "run"),
        "HETERPS_PYTHON": sys.executable,
        "HETERPS_LIFETIME_S": "100",
        "HETERPS_LEASE_S": "100",
        "TMPDIR": str(tmp_path),
    }


def boot(environment, *arguments):
    """Run the script in an empty folder, since Python would find the checkout's code in this one."""
    return subprocess.run(
        ["bash", str(BOOTSTRAP_SCRIPT), *arguments],
        env=environment,
        cwd=environment["TMPDIR"],
        capture_output=True,
        text=True,
        check=False,
    )


def start(environment, *arguments):
    """The same, not waited for."""
    return subprocess.Popen(
        ["bash", str(BOOTSTRAP_SCRIPT), *arguments],
        env=environment,
        cwd=environment["TMPDIR"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def with_wheel(environment):
    wheel = publish_node_wheel(RunDirectory(environment["HETERPS_RUN_DIR"]), "ctrdnn")
    return wheel, {**environment, "HETERPS_WHEEL": wheel.key, "HETERPS_WHEEL_SHA256": wheel.sha256}


def test_a_node_runs_the_code_of_the_wheel_and_not_what_is_installed(environment, tmp_path):
    _, with_code = with_wheel(environment)

    ended = boot(with_code, *WHERE_IS_THE_CODE)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{tmp_path}/tmp.")


def test_a_wheel_that_was_replaced_is_not_run(environment):
    wheel, with_code = with_wheel(environment)
    RunDirectory(environment["HETERPS_RUN_DIR"]).write_bytes(wheel.key, wheel.content + b"more")

    ended = boot(with_code, *WHERE_IS_THE_CODE)

    assert ended.returncode == 1
    assert f"must have the SHA-256 {wheel.sha256}, but has" in ended.stderr
    assert ended.stdout == ""


def test_a_node_whose_bucket_answers_late_says_that_it_is_up_and_fetches_again(environment, monkeypatch):
    """The code appears in the bucket once the node has said that it tries again."""
    with bucket_location(monkeypatch) as location:
        late = {**environment, **os.environ, "HETERPS_RUN_DIR": location, "TMPDIR": environment["TMPDIR"]}
        elsewhere = RunDirectory(environment["TMPDIR"] + "/elsewhere")
        wheel = publish_node_wheel(elsewhere, "ctrdnn")
        late |= {"HETERPS_WHEEL": wheel.key, "HETERPS_WHEEL_SHA256": wheel.sha256}
        node = subprocess.Popen(
            ["bash", str(BOOTSTRAP_SCRIPT), *WHERE_IS_THE_CODE],
            env=late,
            cwd=late["TMPDIR"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said = list(itertools.takewhile(lambda line: "tries again" not in line, node.stderr))
        RunDirectory(location).write_bytes(wheel.key, wheel.content)
        printed, _ = node.communicate()

    assert "the node is up and fetches its code" in said[0]
    assert "cannot be read" in said[-1]
    assert node.returncode == 0
    assert printed.startswith(f"{late['TMPDIR']}/tmp.")


def test_an_image_without_torch_is_reported_what_it_lacks(environment, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{os.path.realpath(sys.executable)}" -I -S "$@"\n')
    bare.chmod(0o755)

    ended = boot({**environment, "HETERPS_PYTHON": str(bare)}, *WHERE_IS_THE_CODE)

    assert ended.returncode == 1
    assert "must be Python 3.11 or later with torch, numpy and pyarrow" in ended.stderr


SLEEPS = ("-c", "import time; time.sleep(100)")
CRASHES = ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
RENEWALS = 8


def renew(environment, number):
    folder = Path(environment["HETERPS_RUN_DIR"]) / "leases"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / ".part"
    part.write_text(f"renewal {number}")
    part.rename(folder / environment["HETERPS_RUN_ID"])


@pytest.fixture
def short_lease(environment):
    """Four seconds, looked for every second."""
    return {**environment, "HETERPS_LEASE_S": "4"}


def wait_for_end(node):
    """Return the exit status of a node that must end by itself, long before its training would."""
    return node.wait(timeout=300)


@pytest.mark.slow
def test_a_node_whose_lease_is_not_renewed_ends_itself(short_lease):
    """Neither flow nor sweeper is there: nothing but the script itself ends it."""
    renew(short_lease, 0)

    ended = boot(short_lease, *SLEEPS)

    assert ended.returncode == TERMINATED


@pytest.mark.weekly
def test_a_node_that_never_saw_a_lease_ends_itself(short_lease):
    assert boot(short_lease, *SLEEPS).returncode == TERMINATED


@pytest.mark.weekly
def test_a_node_ends_itself_at_its_lifetime_however_often_its_lease_is_renewed(short_lease):
    node = start({**short_lease, "HETERPS_LIFETIME_S": "6"}, *SLEEPS)
    for number in itertools.count():
        renew(short_lease, number)
        try:
            status = node.wait(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            assert number < 100

    assert status == TIMED_OUT


@pytest.mark.weekly
def test_a_node_lives_as_long_as_its_lease_is_renewed(short_lease, tmp_path):
    """Each renewal waits until the node has looked at the one before, so that this takes more than one lease."""
    looks = tmp_path / "looks"
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "cat").write_text(f'#!/bin/sh\necho >> "{looks}"\nexec /bin/cat "$@"\n')
    (tools / "cat").chmod(0o755)
    node = start({**short_lease, "PATH": f"{tools}:{short_lease['PATH']}"}, *SLEEPS)
    for number in range(RENEWALS):
        renew(short_lease, number)
        wait_for(
            lambda seen=number: looks.exists() and len(looks.read_text()) > seen,
            what="a look at the lease",
        )
        assert node.poll() is None

    # Renewed no more.
    assert wait_for_end(node) == TERMINATED
    assert len(looks.read_text()) > RENEWALS


def rented(environment, tmp_path, **commands):
    """The same on a rented machine, which only writes its shutdown down; without disks of its own, if none are given.

    Args:
        commands: Shell scripts in place of the machine's commands.
    """
    tools = tmp_path / "sbin"
    tools.mkdir()
    shutdown = f'echo "$@" >> "{tmp_path / "shutdowns"}"'
    for name, script in {"shutdown": shutdown, "lsblk": "", **commands}.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    return {**environment, "HETERPS_NODE_IS": "machine", "PATH": f"{tools}:{environment['PATH']}"}


def shutdowns(tmp_path):
    """Return what the machine was asked for so far."""
    asked = tmp_path / "shutdowns"
    return asked.read_text().splitlines() if asked.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("store", weekly_after(1, ["unreachable", "silent"]))
def test_a_rented_machine_shuts_down_where_its_lease_is_not_renewed_or_cannot_be_read(
    short_lease, tmp_path, store
):
    environment = rented(short_lease, tmp_path)
    if store == "unreachable":
        environment["HETERPS_RUN_DIR"] = f"file://{tmp_path / 'nowhere'}"

    node = start(environment, *SLEEPS)
    try:
        wait_for(lambda: shutdowns(tmp_path)[1:], what="the shutdown")
    finally:
        node.kill()
        node.wait()

    # The clock of its lifetime of 100 s, in whole minutes, and then the lease.
    assert shutdowns(tmp_path)[:2] == ["-P +2", "-P now"]


@pytest.mark.weekly
def test_a_rented_machine_reads_its_lease_from_the_bucket(short_lease, tmp_path, monkeypatch):
    """Renewed at each of a dozen looks it lives longer than the ten that are its lease; then it shuts down."""
    environment = rented({**short_lease, "HETERPS_LEASE_S": "40"}, tmp_path)
    looks = tmp_path / "looks"
    # Each look is made under a time limit and followed by a pause, which is a second here.
    (tmp_path / "sbin" / "timeout").write_text(f'#!/bin/sh\n/usr/bin/timeout "$@"\necho >> "{looks}"\n')
    (tmp_path / "sbin" / "timeout").chmod(0o755)
    (tmp_path / "sbin" / "sleep").write_text("#!/bin/sh\nexec /bin/sleep 1\n")
    (tmp_path / "sbin" / "sleep").chmod(0o755)
    with bucket_location(monkeypatch) as location:
        run = RunDirectory(location)
        environment |= {
            "HETERPS_RUN_DIR": location,
            **{name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")},
        }
        run.write_bytes("leases/r1", b"0")
        node = start(environment, *SLEEPS)
        try:
            for number in range(12):
                run.write_bytes("leases/r1", str(number).encode())
                wait_for(
                    lambda seen=number: looks.exists() and len(looks.read_text()) > seen,
                    what="a look at the lease",
                )
                assert "-P now" not in shutdowns(tmp_path)
            wait_for(lambda: "-P now" in shutdowns(tmp_path), what="the shutdown")
        finally:
            node.kill()
            node.wait()


def test_a_rented_machine_whose_program_crashes_shuts_down_at_once(environment, tmp_path):
    ended = boot(rented(environment, tmp_path), *CRASHES)

    assert ended.returncode != 0
    assert shutdowns(tmp_path) == ["-P +2", "-P now"]


def test_a_rented_machine_whose_script_is_killed_shuts_down_all_the_same(short_lease, tmp_path):
    """The kernel may kill the very shell that waits for training: what looks at the lease sees it gone."""
    node = start(rented(short_lease, tmp_path), *SLEEPS)
    shell = psutil.Process(node.pid)

    def is_training():
        with contextlib.suppress(psutil.Error):
            # A fork of the shell still has the arguments of the shell.
            return any(child.cmdline() == [sys.executable, *SLEEPS] for child in shell.children())

    # By then the process that looks at the lease is there.
    wait_for(is_training, what="the training")
    children = shell.children(recursive=True)
    renew(short_lease, 0)
    node.kill()
    node.wait()

    wait_for(lambda: "-P now" in shutdowns(tmp_path), what="the shutdown")
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


FOLDERS = ("-c", "import os; print(os.environ['TMPDIR'], os.environ['HETERPS_OWN_DISKS'])")
TWO_DISKS = """
echo '/dev/nvme0n1 Amazon Elastic Block Store'
echo '/dev/nvme1n1 Amazon EC2 NVMe Instance Storage'
echo '/dev/nvme2n1 Amazon EC2 NVMe Instance Storage'"""


def pretended_disks(tmp_path, lsblk=TWO_DISKS, **commands):
    """Return commands that write down how they were called with a disk."""

    def noted(name):
        return f'echo {name} "$@" >> "{tmp_path / "calls"}"'

    return {
        "lsblk": lsblk,
        "wipefs": "",
        "mkdir": 'case "$2" in /mnt/*) ;; *) exec /bin/mkdir "$@" ;; esac',
        "mkfs.xfs": noted("mkfs.xfs"),
        "mount": noted("mount"),
        **commands,
    }


def test_a_rented_machine_formats_and_mounts_its_own_disks(environment, tmp_path):
    ended = boot(rented(environment, tmp_path, **pretended_disks(tmp_path)), *FOLDERS)

    folders = ["/mnt/heterps/nvme1n1", "/mnt/heterps/nvme2n1"]
    assert ended.stdout.split() == [str(tmp_path), ":".join(folders)], ended.stderr
    # Not the volume that the machine boots from.
    assert (tmp_path / "calls").read_text().splitlines() == [
        "mkfs.xfs -q -K /dev/nvme1n1",
        f"mount -o noatime /dev/nvme1n1 {folders[0]}",
        "mkfs.xfs -q -K /dev/nvme2n1",
        f"mount -o noatime /dev/nvme2n1 {folders[1]}",
    ]


def test_a_disk_that_holds_anything_is_left_alone(environment, tmp_path):
    disks = pretended_disks(
        tmp_path, wipefs='case "$2" in */nvme1n1) echo 0x218 LVM2_member ;; esac', mount="exit 0"
    )

    ended = boot(rented(environment, tmp_path, **disks), *FOLDERS)

    assert ended.stdout.split() == [str(tmp_path), "/mnt/heterps/nvme2n1"]
    assert "nvme1n1" not in (tmp_path / "calls").read_text()
    assert "the disk /dev/nvme1n1 is not used: it is not empty" in ended.stderr


@pytest.mark.parametrize(
    "commands",
    [{"lsblk": "echo '/dev/nvme0n1 Amazon Elastic Block Store'"}, {"lsblk": "exit 1"}, {"mount": "exit 32"}],
    ids=["without disks", "without lsblk", "that cannot be mounted"],
)
def test_temporary_files_go_to_the_volume_and_not_into_memory(environment, tmp_path, commands):
    machine = rented(environment, tmp_path, **pretended_disks(tmp_path, **commands))
    del machine["TMPDIR"]

    ended = subprocess.run(
        ["bash", str(BOOTSTRAP_SCRIPT), *FOLDERS],
        env=machine,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "/var/tmp \n"


@pytest.mark.root
def test_a_real_file_system_is_made_and_mounted_on_an_empty_disk(environment, tmp_path):
    """A loop device stands for the disk; what follows is the machine's own mkfs and mount."""
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(400 * 2**20)
    attached = subprocess.run(
        ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False
    )
    if attached.returncode:
        pytest.skip(f"needs a loop device: {attached.stderr.strip()}")
    device = attached.stdout.strip()
    folder = f"/mnt/heterps/{Path(device).name}"
    try:
        lsblk = f"echo '{device} Amazon EC2 NVMe Instance Storage'"
        machine = rented(environment, tmp_path, lsblk=lsblk)

        ended = boot(
            machine, "-c", "import shutil, os; print(shutil.disk_usage(os.environ['HETERPS_OWN_DISKS']).free)"
        )

        assert ended.returncode == 0, ended.stderr
        assert os.path.ismount(folder)
        # Two hundredths are left to the file system.
        assert 0.9 * image.stat().st_size < int(ended.stdout) < image.stat().st_size
    finally:
        subprocess.run(["umount", folder], check=False)
        subprocess.run(["losetup", "--detach", device], check=False)
        for empty in (Path(folder), Path(folder).parent):
            with contextlib.suppress(OSError):
                empty.rmdir()


@pytest.mark.slow
@pytest.mark.root
def test_a_fleet_boots_from_its_user_data_and_trains_across_hosts_through_a_bucket(tmp_path):
    """Three hosts, 200 Mbit/s each; every loss must be that of the same training in one process."""
    if (reason := why_no_hosts()) is not None:
        pytest.skip(reason)
    (tmp_path / "clicks").mkdir()
    clicks = prepare_clicks(tmp_path / "clicks")
    plain = run_plainly(make_job(clicks, (2, 1)))

    command = ["unshare", "--net", sys.executable, "-m", "tests.infra.bootstrap.fleet_in_namespaces"]
    ended = subprocess.run(
        [*command, str(tmp_path / "fleet")], capture_output=True, text=True, timeout=240, check=False
    )

    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout)
    assert found["error"] is None
    assert found["losses"] == pytest.approx(plain.losses, abs=1e-6)
    assert found["auc"] == pytest.approx(plain.quality.auc, abs=1e-5)
    for host in found["hosts"]:
        # The clock that ends the machine whatever happens, and the end that it gives itself.
        assert host["exit_status"] == 0, host["log"]
        assert host["shutdowns"] == ["-P +60", "-P now"]
    # Of the rows a host for labels alone reads far less than those for features; all read what describes them.
    in_common = ARROW_TAIL_BYTES + (clicks / "manifest.json").stat().st_size
    read = sorted(usage["bytes_read"] - in_common for usage in found["usage"])
    assert 0 < read[0] * 10 < read[-1]
