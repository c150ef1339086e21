"""Lives of a run on EC2 as moto serves it, each with one fault or one hostile circumstance in it.

In the first half of the cases nothing may end the run, as it passes within a minute or is not everywhere: parts that
AWS knows late, throttling and outages, machines that end while pending, full zones and subnets, roles that nodes get
late. In the second half a fault hits a request or a write to the ledger: refused, timed out after it was executed, or
the process killed before or after it. A circumstance is a ledger that is truncated, a disk that is full, a clock that
is wrong, a shell set to another region, tags that come late, mixed answers of EC2, or launches that fail under a cap.
Nothing here is a speed: figures are counts, and all but the first two should be 0; a cap may be passed by a minute,
which is billed at least.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.infra.fault_account import Account, account_after
from tests.infra.fault_cases import PASSES, Fault, Kind, draw, draw_passing
from tests.infra.faults import steps_of_a_life
from tests.infra.moto_ec2 import moto_process
from tests.small_disk import CAN_MOUNT

KINDS = [kind for kind in Kind if kind not in PASSES and (kind is not Kind.DISK_FULL or CAN_MOUNT)]


def run(*, seed: int = 0, num_cases: int = 600) -> list[dict[str, Any]]:
    """Run the cases of consecutive seeds, print a table and return its figures."""
    accounts: dict[Kind, list[Account]] = defaultdict(list)
    faults: Counter[Fault | None] = Counter()
    logging.getLogger("infra").setLevel(logging.CRITICAL)
    with moto_process() as server, tempfile.TemporaryDirectory() as folder:
        dry = Path(folder) / "dry"
        dry.mkdir()
        steps = steps_of_a_life(server, dry)
        for case_seed in range(seed, seed + num_cases):
            is_passing = case_seed < seed + num_cases // 2
            case = draw_passing(case_seed) if is_passing else draw(case_seed, steps=steps, kinds=KINDS)
            account = account_after(case, server, Path(folder) / f"case-{case_seed}" / "ledger.sqlite")
            accounts[case.kind].append(account)
            faults[case.fault] += 1
            if not account.is_clean:
                print(f"seed {case_seed}: {case} leaves {account}", flush=True)
            if (done := case_seed - seed + 1) % 50 == 0:
                print(f"{done} of {num_cases} cases: {_unclean(accounts)} unclean", flush=True)
    print(
        f"{'circumstance':<28} {'cases':>6} {'instances':>10} {'met':>5} {'unclean':>8} {'over the cap, min':>18}"
    )
    for kind in (*KINDS, *PASSES):
        of_kind = accounts[kind]
        launched = sum(account.launched for account in of_kind)
        unclean = sum(not account.is_clean for account in of_kind)
        over = max((account.cap_excess_minutes for account in of_kind), default=0.0)
        met = sum(account.met > 0 for account in of_kind) if kind in PASSES else len(of_kind)
        print(f"{kind:<28} {len(of_kind):>6} {launched:>10} {met:>5} {unclean:>8} {over:>18.2f}")
    print(", ".join(f"{fault or 'no fault'}: {count}" for fault, count in faults.most_common()))
    if Kind.DISK_FULL not in KINDS:
        print(f"{Kind.DISK_FULL}: not tried, mounting a small file system needs root")
    every = [account for of_kind in accounts.values() for account in of_kind]
    return [
        {"name": "fault_cases", "value": len(every), "unit": "", "higher_is_better": True},
        {
            "name": "fault_instances",
            "value": sum(account.launched for account in every),
            "unit": "",
            "higher_is_better": True,
        },
        _zero("live_instances_after_sweep", sum(account.live for account in every), ""),
        _zero(
            "unaccounted_instance_seconds_after_sweep", sum(account.unaccounted_s for account in every), "s"
        ),
        _zero("failing_sweeps", sum(account.failed_sweeps for account in every), ""),
        _zero(
            "runs_over_their_cap_by_more_than_a_billing_minute",
            sum(account.cap_excess_minutes > 1.0 for account in every),
            "",
        ),
        _zero("healthy_instances_ended_by_a_sweep", sum(account.healthy_ended for account in every), ""),
        _zero("runs_ended_by_what_passes_or_by_a_full_zone", sum(account.gave_up for account in every), ""),
        _zero("entries_at_a_wrong_price", sum(account.wrong_prices for account in every), ""),
        _zero("templates_and_groups_after_sweep", sum(account.leftovers for account in every), ""),
    ]


def _unclean(accounts: dict[Kind, list[Account]]) -> int:
    return sum(not account.is_clean for of_kind in accounts.values() for account in of_kind)


def _zero(name: str, value: float, unit: str) -> dict[str, Any]:
    print(f"{name:<50} {value:>8.0f} {unit}")
    return {"name": name, "value": value, "unit": unit, "higher_is_better": False}
