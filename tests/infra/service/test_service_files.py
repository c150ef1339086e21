"""The units of systemd and the containers of a team's server: that they are whole, and say what the code reads.

Not run here: the containers themselves, which need images from outside, and systemd as the first process.
"""

import ast
import configparser
import re
import shlex
import shutil
import subprocess

import pytest
import yaml

from flows.service.prefect_connection import project_environment
from infra.workspace import Workspace
from tests.paths import PROJECT

SERVICE = PROJECT / "infra" / "service"
UNITS = sorted((SERVICE / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((SERVICE / "compose" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]

OF_ONE_MACHINE = {"HETERPS_HOME", "PREFECT_HOME"}
"""Paths, which are others in a container."""


def variables_in_code() -> set[str]:
    """Return every upper-case name with underscores that stands as a string in the project's code."""
    names = set()
    for room in ("heterps_core", "infra", "tasks", "flows"):
        for path in (PROJECT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names |= set(re.findall(r"\bHETERPS_[A-Z_]+\b", node.value))
    return names


def module_exists(name: str) -> bool:
    return (PROJECT / name.replace(".", "/")).with_suffix(".py").exists()


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_takes_the_unit(unit, tmp_path):
    # What stands at the paths of another machine is put in place of those, as systemd looks whether it is there.
    text = unit.read_text().replace("%h/heterps/.venv/bin/python", "/bin/true")
    text = text.replace("/srv/heterps/.venv/bin/python", "/bin/true")
    text = re.sub(r"^(User|Group)=heterps$", r"\1=root", text, flags=re.MULTILINE)
    copy = tmp_path / "heterps.service"
    copy.write_text(text)

    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )

    complaints = [line for line in done.stderr.splitlines() if "heterps.service" in line]
    assert complaints == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_there_is_and_gives_it_time_to_end(unit):
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(unit)
    service = parser["Service"]

    assert module_exists(shlex.split(service["ExecStart"])[2])
    # The services' own times to end are 10 and 30 s, one after the other.
    assert int(service["TimeoutStopSec"]) >= 60
    assert service["KillMode"] == "mixed"
    assert service["RestartPreventExitStatus"] == "2"
    assert set(re.findall(r"HETERPS_[A-Z_]+", unit.read_text())) <= variables_in_code()


def test_both_units_differ_in_place_and_protection_alone():
    kept = [
        "Restart=on-failure",
        "RestartSec=10",
        "KillMode=mixed",
        "TimeoutStopSec=90",
        "Type=exec",
        "StartLimitBurst=5",
    ]
    assert [[line for line in kept if line not in unit.read_text().splitlines()] for unit in UNITS] == [
        [],
        [],
    ]


@pytest.mark.parametrize("name", ["prefect", "heterps"])
def test_containers_run_modules_that_exist(name):
    command = SERVICES[name]["command"]

    assert command[:2] == ["python", "-m"]
    assert command[2] == "prefect" or module_exists(command[2])


def test_the_serving_container_has_the_environment_of_make_serve(tmp_path):
    given = SERVICES["heterps"]["environment"]
    wanted = project_environment(Workspace(root=tmp_path))

    assert {name: given.get(name) for name in wanted if name not in OF_ONE_MACHINE} == {
        name: value for name, value in wanted.items() if name not in OF_ONE_MACHINE
    }
    assert given.keys() >= OF_ONE_MACHINE


def test_every_variable_of_the_serving_container_is_read_by_the_code():
    own = {name for name in SERVICES["heterps"]["environment"] if name.startswith("HETERPS_")}

    assert own <= variables_in_code()


def test_every_variable_that_a_person_sets_is_in_the_example_and_used():
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", (SERVICE / "compose" / "compose.yaml").read_text()))
    lines = (SERVICE / "compose" / "environment.example").read_text().splitlines()
    example = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}

    assert used == example


def test_nothing_is_published_beyond_loopback_unless_asked_for_and_databases_never():
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}

    assert {name for name, ports in published.items() if ports} == {"prefect", "mlflow"}
    assert all(
        port.startswith("${HETERPS_BIND:-127.0.0.1}:") for ports in published.values() for port in ports
    )


def test_both_pages_ask_for_a_password_that_must_be_set():
    prefect, mlflow = SERVICES["prefect"]["environment"], SERVICES["mlflow"]["environment"]

    assert ":?" in prefect["PREFECT_SERVER_API_AUTH_STRING"]
    assert ":?" in mlflow["MLFLOW_AUTH_ADMIN_PASSWORD"]
    assert "--app-name basic-auth" in SERVICES["mlflow"]["command"][2]


def test_every_database_that_is_named_is_made():
    made = set(re.findall(r"CREATE DATABASE (\w+)", (SERVICE / "compose" / "databases.sql").read_text()))
    text = (SERVICE / "compose" / "compose.yaml").read_text()

    assert set(re.findall(r"@postgres:5432/(\w+)", text)) == made


def test_the_image_has_everything_that_is_imported():
    copied = re.findall(r"^COPY (\w+) \w+$", (SERVICE / "compose" / "Dockerfile").read_text(), re.MULTILINE)

    assert set(copied) == {"heterps_core", "infra", "tasks", "flows"}


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker")
def test_docker_reads_the_compose_file(tmp_path):
    example = (SERVICE / "compose" / "environment.example").read_text()
    filled = tmp_path / "env"
    filled.write_text(re.sub(r"=$", "=team:a-long-enough-secret", example, flags=re.MULTILINE))
    file = SERVICE / "compose" / "compose.yaml"

    done = subprocess.run(
        ["docker", "compose", "--file", str(file), "--env-file", str(filled), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "is not a docker command" in done.stderr or "unknown flag" in done.stderr:
        pytest.skip("docker has no compose")

    assert (done.returncode, done.stderr) == (0, "")
