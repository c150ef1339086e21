"""The account after a life with a fault in it: what lives, what was not charged, what failed, what was overspent."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from flows.commands.sweep import add_arguments
from flows.commands.sweep import run as run_sweep
from heterps_core.errors import HeterpsError
from heterps_core.hardware import Market
from heterps_core.units import SECONDS_PER_HOUR
from infra.ledger.ledger import EntryState, Ledger
from infra.providers.aws.launch import DEFAULT_MACHINES
from infra.providers.aws.provider import LONGEST_PLAN, AwsEc2Provider
from infra.workspace import run_of_launch
from tests.infra.fault_cases import PASSES, Case, Fault, Kind
from tests.infra.faults import PRICES, RUN_ID, Steps, in_a_child, live, truncate, unlike_plan
from tests.infra.late_role import node_boots
from tests.infra.moto_ec2 import MotoServer
from tests.infra.passing_faults import PretendedTime, live_through
from tests.moto_server import REGION
from tests.small_disk import SmallDisk, mounted


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What is left after the sweeps."""

    launched: int
    live: int
    unaccounted_s: float
    wrong_prices: int
    leftovers: int
    """Launch templates, security groups, roles and profiles, after a sweep when the machines have gone."""

    survived: bool
    """The block was left without an error."""

    failed_sweeps: int = 0
    """That ended with an error; on a full disk, the one that did not where it should have."""

    cap_excess_minutes: float = 0.0
    """Of the whole fleet, beyond the cap of a run; negative where it stayed below."""

    healthy_ended: int = 0
    """Machines of a run that lived, which a sweep ended."""

    gave_up: int = 0
    """1 where a run ended though another zone had machines, or what was against it passes within a minute."""

    met: int = 0
    """How often the run met what passes."""

    waited_s: float = 0.0
    """Pretended seconds of a life in which something passes."""

    @property
    def is_clean(self) -> bool:
        """Nothing is left, unpaid, or wrongly refused, and the cap held but for a minute that is billed at least."""
        wrong = self.live + self.wrong_prices + self.leftovers + self.failed_sweeps
        return (
            wrong + self.healthy_ended + self.gave_up == 0
            and self.unaccounted_s == 0
            and self.cap_excess_minutes <= 1.0
        )


def account_after(case: Case, server: MotoServer, ledger_path: Path) -> Account:
    """Live through a case in a process of its own, sweep when its lease is over, and draw up the account.

    Args:
        case: What happens.
        server: EC2.
        ledger_path: In a folder that does not exist; ledger.sqlite in the folder of a workspace.
    """
    if case.kind is Kind.LATE_ROLE:
        return node_account(case, ledger_path.parent)
    server.reset()
    client = server.client(attempts=2) if case.fault is Fault.TIME_OUT else server.own_client
    with ExitStack() as stack:
        disk = stack.enter_context(mounted(ledger_path.parent)) if case.kind is Kind.DISK_FULL else None
        if case.kind in PASSES:
            clock = PretendedTime()

            def act() -> None:
                clock.install()
                live_through(server, case, ledger_path, clock)

            status = in_a_child(act, without_pauses=False)
            return account_of(server, ledger_path, survived=status == 0, case=case)
        status = in_a_child(
            lambda: live(
                client,
                Steps(case),
                ledger_path,
                market=case.market,
                zones=case.zones,
                kind=case.kind,
                kept_share=case.kept_share,
                cap_usd=case.cap_usd,
            )
        )
        if case.is_ledger_lost:
            ledger_path.unlink(missing_ok=True)
        if case.kind is Kind.LEDGER_TRUNCATED:
            truncate(ledger_path, case.kept_share)
        return account_of(server, ledger_path, survived=status == 0, case=case, disk=disk)


def node_account(case: Case, folder: Path) -> Account:
    """Boot the node of a case, and say whether it came as far as its training."""
    boot = node_boots(case, folder)
    return Account(
        launched=0,
        live=0,
        unaccounted_s=0.0,
        wrong_prices=0,
        leftovers=0,
        survived=boot.survived,
        gave_up=int(not boot.survived),
        met=boot.num_met,
        waited_s=boot.waited_s,
    )


def account_of(
    server: MotoServer,
    ledger_path: Path,
    *,
    survived: bool,
    case: Case | None = None,
    disk: SmallDisk | None = None,
) -> Account:
    """Sweep by the command when every lease is over, and draw up the account."""
    kind = Kind.PLAIN if case is None else case.kind
    after_lease = datetime.now(UTC) + timedelta(seconds=AwsEc2Provider.lease_s + 60.0)
    failed_sweeps = live_on_full_disk = 0
    if disk is not None:
        due = _num_live(server)
        disk.fill()
        has_failed = sweep_by_command(server, ledger_path, now=after_lease, kind=kind) is None
        failed_sweeps += due > 0 and not has_failed
        live_on_full_disk = _num_live(server)
        disk.empty()
    failed_sweeps += sweep_by_command(server, ledger_path, now=after_lease, kind=kind) is None
    again = sweep_by_command(server, ledger_path, now=after_lease + LONGEST_PLAN, kind=kind)
    failed_sweeps += again is None
    instances = server.instances()
    ledger = Ledger(ledger_path)
    notes_path = ledger_path.with_name("notes.json")
    figures = json.loads(notes_path.read_text()) if notes_path.exists() else {}
    if case is not None and case.cap_usd is not None:
        figures["cap_excess_minutes"] = _excess_minutes(ledger, case.cap_usd)
    return Account(
        launched=len(instances),
        live=_num_live(server) + live_on_full_disk + len(again or ()),
        unaccounted_s=sum(_unaccounted_s(instance, ledger) for instance in instances),
        wrong_prices=sum(
            entry.price_usd_per_hour != PRICES[entry.instance_type] for entry in ledger.entries()
        ),
        leftovers=_leftovers(server),
        survived=survived,
        failed_sweeps=failed_sweeps,
        gave_up=int(kind in (Kind.MIXED_CODES, *PASSES) and not survived),
        **figures,
    )


def sweep_by_command(
    server: MotoServer, ledger_path: Path, *, now: datetime, kind: Kind
) -> list[dict[str, Any]] | None:
    """Run `heterps sweep` as a shell would; returns the machines that it tells of, None where it fails."""
    with pytest.MonkeyPatch.context() as shell, redirect_stdout(StringIO()) as printed:
        region = "eu-central-1" if kind is Kind.OTHER_REGION else REGION
        for name, value in {**server.environment, "AWS_DEFAULT_REGION": region}.items():
            shell.setenv(name, value)
        shell.setenv("HETERPS_HOME", str(ledger_path.parent))
        shell.setenv("HETERPS_AWS_WORKSPACE", DEFAULT_MACHINES.workspace)
        shell.setattr(AwsEc2Provider, "now", lambda provider: now)
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        try:
            run_sweep(parser.parse_args(["--provider", "aws", "--json"]))
        except HeterpsError:
            return None
    return list(json.loads(printed.getvalue()))


def _unaccounted_s(instance: dict[str, Any], ledger: Ledger) -> float:
    """Return the seconds of an instance that no entry with a price stands for, by EC2's own words."""
    said = re.search(r"\((.*) UTC\)", instance["StateTransitionReason"])
    ended_at = datetime.fromisoformat(said[1]).replace(tzinfo=UTC) if said else datetime.now(UTC)
    entries = [e for e in ledger.entries() if e.provider_instance_id == instance["InstanceId"]]
    if len(entries) != 1 or entries[0].state is not EntryState.ENDED:
        return max(1.0, (ended_at - instance["LaunchTime"]).total_seconds())
    (entry,) = entries
    assert run_of_launch(entry.run_id) == RUN_ID
    late_start_s = (entry.launched_at - instance["LaunchTime"]).total_seconds()
    early_end_s = (ended_at - entry.ended_at).total_seconds()
    return max(0.0, late_start_s) + max(0.0, early_end_s)


def _num_live(server: MotoServer) -> int:
    return sum(instance["State"]["Name"] != "terminated" for instance in server.instances())


def _excess_minutes(ledger: Ledger, cap_usd: float) -> float:
    """Return by how many minutes of the whole fleet machines that lived a minute each, at least, passed a cap."""
    services_usd_per_hour = AwsEc2Provider.services_usd_per_machine_hour()
    usd = sum(
        max(60.0, (entry.ended_at - entry.launched_at).total_seconds())
        / SECONDS_PER_HOUR
        * (entry.price_usd_per_hour + services_usd_per_hour)
        for entry in ledger.entries()
        if entry.launched_at is not None and entry.ended_at is not None
    )
    fleet_usd_per_minute = AwsEc2Provider.billed_usd_per_hour(unlike_plan(Market.ON_DEMAND)) / 60
    return (usd - cap_usd) / fleet_usd_per_minute


def _leftovers(server: MotoServer) -> int:
    client = server.own_client
    groups = client.describe_security_groups()["SecurityGroups"]
    return (
        len(client.describe_launch_templates()["LaunchTemplates"])
        + sum(group["GroupName"] != "default" for group in groups)
        + server.num_roles_and_profiles()
    )
