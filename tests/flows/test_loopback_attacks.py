"""What another account of the machine, or a page in this user's browser, can do to a workspace that is served."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served_workspace import ServedWorkspace

pytestmark = pytest.mark.weekly

NOBODY = 65_534
PYTHON = "/usr/bin/python3"

ASK = """
import json, sys, urllib.error, urllib.request
method, url, body, headers = json.loads(sys.argv[1])
request = urllib.request.Request(url, method=method, data=body and body.encode(), headers=headers)
try:
    print(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20).status)
except urllib.error.HTTPError as refused:
    print(refused.code)
"""

READ = """
import os, sys
try:
    os.listdir(sys.argv[1]) if os.path.isdir(sys.argv[1]) else open(sys.argv[1]).read()
    print("read")
except OSError as refused:
    print(type(refused).__name__)
"""

needs_second_account = pytest.mark.skipif(os.geteuid() != 0, reason="a second account needs root")


@pytest.fixture(scope="module")
def service() -> Iterator[ServedWorkspace]:
    # Not below pytest's folder, which no other account may enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        served = ServedWorkspace(Path(folder) / "home")
        try:
            served.wait_until_up()
            yield served
        finally:
            if served.process.poll() is None:
                served.stop()


def run_as(user: int, program: str, *arguments: str) -> str:
    return subprocess.run(
        [PYTHON, "-I", "-c", program, *arguments],
        user=user,
        group=user,
        extra_groups=[],
        env={},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def status(service, method, path, body=None, *, user=0, **headers):
    """Return the status that a request is answered with; `path` begins with the server's name."""
    server, _, rest = path.partition("/")
    url = service.api_url if server == "prefect" else service.mlflow_url
    asked = [
        method,
        f"{url}/{rest}",
        body,
        {name.replace("_", "-"): value for name, value in headers.items()},
    ]
    return int(run_as(user, ASK, json.dumps(asked)))


ATTACKS = [
    ("POST", "prefect/deployments/filter", "{}"),
    ("PATCH", "prefect/deployments/00000000-0000-0000-0000-000000000000", '{"pull_steps": []}'),
    ("POST", "prefect/deployments/00000000-0000-0000-0000-000000000000/create_flow_run", "{}"),
    ("POST", "prefect/automations/", "{}"),
    (
        "POST",
        "mlflow/api/2.0/mlflow/registered-models/alias",
        '{"name": "ctr", "alias": "champion", "version": "2"}',
    ),
    ("PUT", "mlflow/api/2.0/mlflow-artifacts/artifacts/0/m/artifacts/MLmodel", "loader_module: evil"),
    ("POST", "mlflow/ajax-api/2.0/mlflow/upload-artifact?run_uuid=0&path=MLmodel", "loader_module: evil"),
    ("POST", "mlflow/ajax-api/2.0/mlflow/runs/search", "{}"),
    ("GET", "mlflow/get-artifact?path=MLmodel&run_uuid=0", None),
    ("GET", "mlflow/", None),
]


@pytest.mark.root
@needs_second_account
@pytest.mark.parametrize(("method", "path", "body"), ATTACKS)
def test_another_account_is_asked_for_a_password_that_it_cannot_read(service, method, path, body):
    assert status(service, method, path, body, user=NOBODY, content_type="application/json") == 401


@pytest.mark.parametrize(("method", "path", "body"), ATTACKS[1:7:2])
@pytest.mark.parametrize(
    "of_page", [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}], ids=str
)
def test_a_foreign_page_is_refused_even_where_the_browser_knows_the_password(
    service, method, path, body, of_page
):
    assert status(service, method, path, body, authorization=service.sign_in, **of_page) == 403


@pytest.mark.root
@needs_second_account
@pytest.mark.parametrize(
    "name",
    ["", "password", "services.json", "mlflow.db", "prefect", "prefect/prefect.db", "runs", "mlartifacts"],
)
def test_another_account_reads_nothing_of_the_workspace(service, name):
    path = service.home / name

    assert path.exists()
    assert run_as(NOBODY, READ, str(path)) == "PermissionError"


def test_no_request_replaces_the_files_of_a_model_even_with_the_password(service):
    path = "mlflow/api/2.0/mlflow-artifacts/artifacts/0/m/artifacts/MLmodel"

    assert status(service, "PUT", path, "loader_module: evil", authorization=service.sign_in) == 503


def test_the_user_is_answered_with_the_password_that_was_printed_once(service):
    password = service.workspace.password()
    known = {"authorization": service.sign_in, "content_type": "application/json"}

    assert service.output.read_text().count(password) == 1
    assert service.workspace.password_path.stat().st_mode & 0o777 == 0o600
    assert status(service, "POST", "prefect/deployments/filter", "{}", **known) == 200
    assert status(service, "GET", "mlflow/", **known) == 200
    assert (
        status(service, "POST", "mlflow/api/2.0/mlflow/experiments/search", '{"max_results": 1}', **known)
        == 200
    )


def test_the_literal_command_needs_neither_password_nor_the_projects_folder(service, tmp_path):
    assert "'name': 'train-ctr'" in service.command("deployment", "inspect", "train-ctr", folder=tmp_path)


def test_status_signs_in_by_itself(service):
    found = json.loads(service.heterps("status", "--json"))

    assert found["services"]["serving process"] == "up"
    assert found["flow_runs"] == []
