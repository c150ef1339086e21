import argparse
import json
import os
import re
import socket
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from types import SimpleNamespace

import boto3
import pytest

from flows.cli import main
from flows.commands.doctor import add_arguments
from infra.ledger import ledger_file
from infra.ledger.ledger import EntryState, Ledger
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.records.run_files import keep_explanation
from tasks.running.live_fleet import only_fleet
from tests.infra.builders import moto_ec2
from tests.tasks.report_builders import make_plan_report


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """Run `heterps doctor` in an empty workspace with ports that are free."""
    probes = [socket.socket() for _ in range(2)]
    for probe, variable in zip(probes, ("HETERPS_PREFECT_PORT", "HETERPS_MLFLOW_PORT"), strict=True):
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv(variable, str(probe.getsockname()[1]))
    for probe in probes:
        probe.close()
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    for name in ("HETERPS_TIMEZONE", "MLFLOW_TRACKING_URI", "HETERPS_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["heterps", "doctor", *arguments])
        return main(), capsys.readouterr()

    return run


def checks(printed):
    return {check["what"]: check for check in json.loads(printed.out)}


def test_a_machine_that_can_run_the_line_ends_with_0_and_nothing_is_written(doctor, tmp_path):
    status, printed = doctor("--json")

    assert status == 0, printed.err
    assert {check["state"] for check in checks(printed).values()} <= {"ok", "note"}
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_a_trial_launch_boots_measures_and_ends_a_machine_that_the_ledger_charges(doctor, tmp_path):
    status, printed = doctor("--provider", "local", "--launch", "--json")

    assert status == 0, printed.err
    trial = checks(printed)["trial launch"]
    machine, usd = re.fullmatch(
        r"(\S+) was up after .* and is ended: (\d\.\d{4}) USD", trial["found"]
    ).groups()
    [entry] = Ledger(tmp_path / "home" / "ledger.sqlite").entries()
    assert (entry.instance_type, entry.state) == (machine, EntryState.ENDED)
    assert 0 < float(usd) < 0.01
    assert provider_of(Workspace.locate(), "local").list_instances() == ()


def test_a_trial_launch_beside_another_run_is_refused_and_leaves_no_key(doctor, tmp_path):
    workspace = Workspace(root=tmp_path / "home").create()

    with only_fleet(workspace, "another"):
        status, printed = doctor("--provider", "local", "--launch", "--json")

    assert status == 1
    assert "another" in checks(printed)["trial launch"]["found"]
    assert not [*workspace.keys_directory.iterdir()]


def test_nothing_is_launched_where_something_is_missing(doctor, tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_TIMEZONE", "Nowhere/At All")

    status, printed = doctor("--provider", "local", "--launch", "--json")

    assert status == 1
    assert "trial launch" not in checks(printed)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("text", "mode", "state", "found", "fix"),
    [
        ("heterps:secret", 0o600, "ok", "can be read by you alone", None),
        ("heterps:secret", 0o644, "missing", "can be read by other accounts", "chmod 600"),
        ("", 0o600, "missing", "must hold user:password", "delete it"),
    ],
)
def test_the_password_is_looked_at(doctor, tmp_path, text, mode, state, found, fix):
    path = Workspace(root=tmp_path / "home").create().password_path
    path.write_text(text)
    path.chmod(mode)

    check = checks(doctor("--json")[1])["password"]

    assert check["state"] == state
    assert found in check["found"]
    assert fix is None or fix in check["fix"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a second account needs root")
def test_a_workspace_of_another_account_is_named(doctor, tmp_path):
    os.chown(Workspace(root=tmp_path / "home").create().root, 65_534, -1)

    assert "belongs to the account of number 65534" in checks(doctor("--json")[1])["account"]["found"]


def test_every_line_says_what_and_state_and_what_is_to_be_mended_says_how(doctor):
    _, text = doctor()
    _, printed = doctor("--json")

    found = checks(printed)
    assert all(check["fix"] for check in found.values() if check["state"] != "ok")
    for check in found.values():
        assert f"{check['what']} " in text.out
        assert check["fix"] is None or f"fix: {check['fix']}" in text.out


def test_a_taken_port_is_missing_with_its_holder_and_its_variable(doctor, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setenv("HETERPS_PREFECT_PORT", str(listener.getsockname()[1]))
        status, printed = doctor("--json")

    assert status == 1
    check = checks(printed)["port of Prefect server"]
    assert f"taken by process {os.getpid()}" in check["found"]
    assert "HETERPS_PREFECT_PORT=<port>" in check["fix"]
    assert printed.err.startswith("heterps: error: missing: port of Prefect server")


@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [
        ("HETERPS_TIMEZONE", "Mars/Olympus", "nightly zone"),
        ("HETERPS_MLFLOW_PORT", "http", "port of MLflow UI"),
    ],
)
def test_what_is_set_wrong_is_missing(doctor, monkeypatch, variable, value, what):
    monkeypatch.setenv(variable, value)

    status, printed = doctor("--json")

    assert status == 1
    assert variable in checks(printed)[what]["found"]


def test_a_locked_ledger_is_missing(doctor, monkeypatch):
    monkeypatch.setattr(ledger_file, "_LOCK_TIMEOUT_S", 0.2)
    workspace = Workspace.locate().create()
    Ledger(workspace.ledger_path)
    with closing(sqlite3.connect(workspace.ledger_path)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        status, printed = doctor("--json")
        holder.rollback()

    assert status == 1
    assert "database is locked" in checks(printed)["ledger"]["found"]


def test_a_tracking_server_that_is_not_used_is_noted(doctor, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")

    _, printed = doctor("--json")

    assert "HETERPS_TRACKING_URI" in checks(printed)["MLFLOW_TRACKING_URI"]["fix"]


def test_an_emptied_ledger_is_missing_and_the_sweep_rebuilds_it(doctor):
    workspace = Workspace.locate().create()
    Ledger(workspace.ledger_path)
    workspace.ledger_path.write_bytes(b"")

    status, printed = doctor("--json")

    assert status == 1
    assert checks(printed)["ledger"]["fix"].startswith("heterps sweep ")


def test_a_misspelt_profile_is_a_line_among_the_others(doctor, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "prodution")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)

    status, printed = doctor("--provider", "aws", "--json")

    found = checks(printed)
    assert status == 1
    assert found["ledger"]["state"] == "ok"
    assert "profile (prodution) could not be found" in found["provider aws"]["found"]
    assert "aws configure list-profiles" in found["provider aws"]["fix"]


@pytest.fixture
def quota(monkeypatch):
    """Gives an account of the simulation so many vCPUs of each quota."""

    def act(vcpus):
        answer = SimpleNamespace(status_code=200), {"Quota": {"Value": vcpus}}
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", boto3.Session())
        boto3.DEFAULT_SESSION.events.register(
            "before-call.service-quotas.GetServiceQuota", lambda **_: answer, unique_id="quota"
        )

    with moto_ec2() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield act


@pytest.mark.parametrize(("allowed", "state"), [(8, "ok"), (7, "note")])
def test_the_newest_plan_is_held_against_the_quotas_of_the_account(doctor, quota, allowed, state):
    """The plan buys a c7i.2xlarge, of 8 vCPUs, and a card of 4 that counts against another quota."""
    report = make_plan_report(provider="aws")
    assert "1 x c7i.2xlarge" in report.provisioning.cloud_plan.machines
    keep_explanation(Workspace.locate().create(), report)
    quota(allowed)

    _, printed = doctor("--provider", "aws", "--json")

    found = checks(printed)[f"quotas for {report.run_id}"]
    assert found["state"] == state
    if state == "ok":
        assert found["found"] == report.provisioning.cloud_plan.machines
    else:
        assert "the plan must keep within the 7 of 7 vCPUs" in found["found"]
        assert "--desired-value 8, or plan with --device-types" in found["fix"]


def test_a_plan_is_not_held_against_what_its_own_machines_leave_of_the_quotas(doctor, quota):
    report, workspace = make_plan_report(provider="aws"), Workspace.locate().create()
    keep_explanation(workspace, report)
    quota(0)
    assert f"quotas for {report.run_id}" in checks(doctor("--provider", "aws", "--json")[1])
    for request in report.provisioning.cloud_plan.node_requests():
        Ledger(workspace.ledger_path).intend(report.run_id, "aws", request, at=datetime.now(UTC))

    _, printed = doctor("--provider", "aws", "--json")

    assert f"quotas for {report.run_id}" not in checks(printed)


@pytest.mark.parametrize("text", ["{", '{"machines": {"groups": 3}}'], ids=["cut off", "another form"])
def test_a_damaged_plan_of_an_earlier_run_hides_no_check_of_the_provider(doctor, tmp_path, text):
    folder = Workspace(root=tmp_path / "home").create().run_folder("20261101-000000-aaaa")
    folder.mkdir(parents=True)
    (folder / "explanation.json").write_text(text)

    assert "provider local" not in checks(doctor("--provider", "local", "--json")[1])


def test_a_report_holds_the_checks_and_neither_keys_nor_accounts(doctor, monkeypatch, tmp_path):
    key, account = "AKIAIOSFODNN7EXAMPLE", "123456789012"
    monkeypatch.setenv("AWS_PROFILE", f"{key}-of-{account}")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)

    doctor("--provider", "aws", "--report", str(tmp_path / "report.json"))

    text = (tmp_path / "report.json").read_text()
    found = {check["what"]: check for check in json.loads(text)["checks"]}
    assert "profile (KEY-of-ACCOUNT) could not be found" in found["provider aws"]["found"]
    assert key not in text
    assert account not in text


def test_a_report_holds_no_password_of_an_address_and_keeps_paths_where_the_home_is_the_root(
    doctor, monkeypatch, tmp_path
):
    secret = "sqlite://ann:p@ss@db.example/a"
    monkeypatch.setenv("AWS_PROFILE", secret)
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)

    doctor("--provider", "aws", "--report", str(tmp_path / "report.json"))

    text = (tmp_path / "report.json").read_text()
    assert "profile (sqlite://...@db.example/a) could not be found" in text
    assert "ann" not in re.findall(r"\w+", text)


def test_the_region_of_the_shell_is_not_where_machines_are_looked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    rented_from = provider_of(Workspace(root=tmp_path), "aws", region=parser.parse_args([]).region)
    assert rented_from.client.meta.region_name == "us-east-1"
