"""What a node does from its first boot on: the script itself, and a fleet of hosts that run it."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from heterps_core.training.run_directory import RunDirectory
from infra.bootstrap.node_wheel import publish_node_wheel
from infra.providers.base import BOOTSTRAP_SCRIPT
from tests.heterps_core.training.node_processes import make_job, prepare_clicks
from tests.heterps_core.training.reference import run_plainly

WHERE_IS_THE_CODE = ("-c", "import heterps_core; print(heterps_core.__file__)")


@pytest.fixture
def environment(tmp_path):
    """Of a node on this machine, without a wheel."""
    return {
        **os.environ,
        "HETERPS_PROVIDER": "local",
        "HETERPS_RUN_ID": "r1",
        "HETERPS_NODE_ID": "stage0-node0",
        "HETERPS_RUN_DIR": str(tmp_path / "run"),
        "HETERPS_PYTHON": sys.executable,
        "HETERPS_LIFETIME_S": "100",
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


def test_an_image_without_torch_is_told_what_it_lacks(environment, tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{os.path.realpath(sys.executable)}" -I -S "$@"\n')
    bare.chmod(0o755)

    ended = boot({**environment, "HETERPS_PYTHON": str(bare)}, *WHERE_IS_THE_CODE)

    assert ended.returncode == 1
    assert "must be Python 3.11 or later with torch, numpy and pyarrow" in ended.stderr


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))),
    reason="hosts with addresses of their own need root, iproute2 and util-linux",
)
def test_a_fleet_boots_from_its_user_data_and_trains_across_hosts_through_a_bucket(tmp_path):
    """Three hosts, 200 Mbit/s each; every loss must be that of the same training in one process."""
    allowed = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "cloud", "type", "bridge"], check=False
    )
    if allowed.returncode:
        pytest.skip("namespaces with bridges are not permitted here")
    (tmp_path / "clicks").mkdir()
    plain = run_plainly(make_job(prepare_clicks(tmp_path / "clicks"), (2, 1)))

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
    # One host for labels alone reads far less than those that read features.
    read = sorted(usage["bytes_read"] for usage in found["usage"])
    assert read[0] * 10 < read[-1]
