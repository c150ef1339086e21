"""Look for what is missing on this machine to run the line, and say how to fix it; only --launch buys something.

Looks at Python and packages, compiler, cores, memory, disk and shared memory, the workspace and its databases, clock
and time zone, and the ports of make serve. With --provider aws also at all that an account tells for nothing, from
credentials and quotas to the bucket; a security group and a launch template are made for AWS's dry run, and deleted.
With here, ray or slurm also at the machines there. With --launch, where nothing is missing, the cheapest machine
boots, measures a small model and ends: some minutes and at most 0.25 USD, in most regions about a cent.

examples:
  heterps doctor
  heterps doctor --provider aws
  heterps doctor --provider aws --launch --report doctor.json
  heterps doctor --json | jq '.[] | select(.state == "missing")'

exit status: 0 where nothing that is needed is missing; 1 where something is; notes alone do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from flows.service.addresses import MLFLOW_PORT, PREFECT_PORT
from flows.service.schedule import nightly_timezone
from heterps_core import __version__
from heterps_core.errors import ConfigurationError, HeterpsError, ProvisioningError
from infra.checks import Check, CheckState, machine_checks, package_checks, tried
from infra.inventory import HERE
from infra.machines.sweeper import regions_of
from infra.providers import PROVIDERS, Provider, provider_of
from infra.workspace import HOME_VARIABLE, TRACKING_VARIABLE, Workspace, run_of_launch
from tasks.clusters import ledger_entries
from tasks.records.mlflow_names import DIED
from tasks.records.run_files import newest_machines

MOST_OPEN_RUNS = 1_000
LOCK_FILE = Path(__file__).parents[2] / "requirements.lock"


class _SomethingMissingError(HeterpsError):
    """The line cannot run on this machine as it is."""

    exit_status = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--provider", choices=sorted(PROVIDERS), default=HERE, help="(default: %(default)s)")
    parser.add_argument(
        "--region", help="of the provider, besides those that runs rent in and that the ledger names"
    )
    parser.add_argument("--launch", action="store_true", help="try a launch of the cheapest machine too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    report = "write it here too, without keys and account numbers"
    parser.add_argument("--report", type=Path, metavar="FILE", help=report)


def run(options: argparse.Namespace) -> None:
    """Print what was found."""
    workspace = Workspace.locate()
    checks = list(_all_checks(workspace, provider=options.provider, region=options.region))
    if options.launch and all(check.state is not CheckState.MISSING for check in checks):
        from tasks.running.trial_launch import try_launch

        checks.append(
            tried("trial launch", partial(try_launch, workspace, options.provider, region=options.region))
        )
    print(json.dumps([asdict(check) for check in checks], indent=1) if options.json else as_text(checks))
    if options.report is not None:
        found = {"heterps": __version__, "checks": [asdict(check) for check in checks]}
        options.report.write_text(_without_secrets(json.dumps(found, indent=1)) + "\n")
    missing = [check.what for check in checks if check.state is CheckState.MISSING]
    if missing:
        raise _SomethingMissingError(f"missing: {', '.join(missing)}; the lines above say how to fix them")


def _without_secrets(text: str) -> str:
    """Return a text without keys of AWS, numbers of accounts, the user's name in paths, and names in addresses."""
    # A home that is the root is no name.
    text = re.sub(re.escape(str(Path.home())) + "(?<!/)", "~", text)
    text = re.sub(r"://[^/\s\"]*@", "://...@", re.sub(r"\b\d{12}\b", "ACCOUNT", text))
    return re.sub(r"\b(AKIA|ASIA)[A-Z0-9]{12,}", "KEY", text)


def _all_checks(workspace: Workspace, *, provider: str, region: str | None) -> Iterator[Check]:
    """Yield every check that applies."""
    yield from machine_checks(workspace)
    yield from package_checks(LOCK_FILE)
    yield _time_zone()
    from infra.database_checks import database_checks

    yield from database_checks(workspace)
    yield from _rights(workspace)
    yield from _dead_runs(workspace)
    yield from _ports(workspace)
    if "MLFLOW_TRACKING_URI" in os.environ and TRACKING_VARIABLE not in os.environ:
        yield Check(
            "MLFLOW_TRACKING_URI",
            CheckState.NOTE,
            "is set, and not used: runs are recorded in the workspace",
            f"export {TRACKING_VARIABLE}=$MLFLOW_TRACKING_URI   (to record them there)",
        )
    try:
        entries = ledger_entries(workspace)
        living = {run_of_launch(entry.run_id) for entry in entries if entry.is_open}
        for place in regions_of(workspace, provider, entries, configured=region):
            chosen = provider_of(workspace, provider, region=place)
            for check in chosen.checks():
                yield replace(check, what=" ".join([check.what, place]).strip())
            newest = newest_machines(workspace, cloud=provider, region=place)
            # Its own machines would count against it.
            if newest and newest[0] not in living:
                run_id, plan = newest
                check = tried(f"quotas for {run_id}", partial(chosen.check_quotas, plan), found=plan.machines)
                # A new plan would keep within them.
                yield check if check.state is CheckState.OK else replace(check, state=CheckState.NOTE)
            if chosen.has_inventory:
                yield tried("machines", partial(_machines, chosen, workspace))
    except (ConfigurationError, ProvisioningError) as problem:
        found, _, way_out = str(problem).rpartition("; ")
        yield Check(f"provider {provider}", CheckState.MISSING, found, way_out)


def _machines(provider: Provider, workspace: Workspace) -> str:
    """Return the kinds of machines of a home with their prices; raises as `Provider.kinds`."""
    return ", ".join(
        f"{kind.count} x {kind.kind} at {kind.price_usd_per_hour:g} USD/hour"
        for kind in provider.kinds(workspace)
    )


def as_text(checks: list[Check]) -> str:
    """Return a line for each check, with the fix below where there is one."""
    width = max(len(check.what) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"  {check.state:<8} {check.what:<{width}}  {check.found}")
        if check.fix:
            lines.append(f"  {'':<8} {'':<{width}}  fix: {check.fix}")
    return "\n".join(lines)


def _time_zone() -> Check:
    try:
        return Check("nightly zone", CheckState.OK, nightly_timezone())
    except ConfigurationError as problem:
        return Check(
            "nightly zone", CheckState.MISSING, str(problem), "export HETERPS_TIMEZONE=Europe/Berlin"
        )


def _rights(workspace: Workspace) -> Iterator[Check]:
    """Look at the accounts that own or read the workspace and its password."""
    if not workspace.root.exists():
        return
    if (owner := workspace.root.stat().st_uid) != os.geteuid():
        found = f"{workspace.root} belongs to the account of number {owner}"
        yield Check("account", CheckState.NOTE, found, f"export {HOME_VARIABLE}=a folder of your own")
    if not workspace.password_path.exists():
        return
    readable = f"{workspace.password_path} can be read by"
    check = tried("password", workspace.password, found=f"{readable} you alone")
    if check.state is CheckState.OK and workspace.password_path.stat().st_mode & 0o077:
        fix = f"chmod 600 {workspace.password_path}"
        check = Check("password", CheckState.MISSING, f"{readable} other accounts", fix)
    yield check


def _dead_runs(workspace: Workspace) -> Iterator[Check]:
    from tasks.records.past_runs import past_trainings

    try:
        running = past_trainings(workspace, most=MOST_OPEN_RUNS, status="RUNNING")
    except ConfigurationError:
        # The check of the database says why.
        return
    for run in running:
        if run.outcome == DIED:
            found = f"{run.run_id} died: its process is gone, its record is open"
            fix = f"heterps sweep   (then go on with resume_run_id={run.run_id})"
            yield Check("runs", CheckState.NOTE, found, fix)


def _ports(workspace: Workspace) -> Iterator[Check]:
    if workspace.running_services() is not None:
        yield Check("ports", CheckState.OK, "this workspace is being served")
        return
    for port in (PREFECT_PORT, MLFLOW_PORT):
        what = f"port of {port.purpose.removeprefix('the ')}"
        yield tried(what, partial(_free, port))


def _free(port: Any) -> str:
    port.check_is_free()
    return f"{port.number} is free"
