"""Lives of a run on EC2 as moto serves it, each with one fault in it: what lives after the sweep, what is unpaid.

The fault hits a request or a write to the ledger: refused, timed out after it was executed, or the process killed
before or after it. Nothing here is a speed: the figures are counts, and all but the first two should be 0.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.infra.faults import Fault, account_after, draw, steps_of_a_life
from tests.infra.moto_ec2 import moto_process


def run(*, seed: int = 0, num_cases: int = 300) -> list[dict[str, Any]]:
    """Run the cases of consecutive seeds, print a table and return its figures."""
    cases: Counter[Fault] = Counter()
    launched: Counter[Fault] = Counter()
    unclean: Counter[Fault] = Counter()
    live = leftovers = wrong_prices = 0
    unaccounted_s = 0.0
    with moto_process() as server, tempfile.TemporaryDirectory() as folder:
        steps = steps_of_a_life(server, Path(folder))
        for case_seed in range(seed, seed + num_cases):
            case = draw(case_seed, steps=steps)
            account = account_after(case, server, Path(folder) / f"case-{case_seed}.sqlite")
            cases[case.fault] += 1
            launched[case.fault] += account.launched
            live += account.live
            leftovers += account.leftovers
            wrong_prices += account.wrong_prices
            unaccounted_s += account.unaccounted_s
            if not account.is_clean:
                unclean[case.fault] += 1
                print(f"seed {case_seed}: {case} leaves {account}")
    print(f"{'fault':<20} {'cases':>6} {'instances':>10} {'unclean':>8}")
    for fault in Fault:
        print(f"{fault:<20} {cases[fault]:>6} {launched[fault]:>10} {unclean[fault]:>8}")
    return [
        {"name": "fault_cases", "value": cases.total(), "unit": "", "higher_is_better": True},
        {"name": "fault_instances", "value": launched.total(), "unit": "", "higher_is_better": True},
        _zero("live_instances_after_sweep", live, ""),
        _zero("unaccounted_instance_seconds_after_sweep", unaccounted_s, "s"),
        _zero("entries_at_a_wrong_price", wrong_prices, ""),
        _zero("templates_and_groups_after_sweep", leftovers, ""),
    ]


def _zero(name: str, value: float, unit: str) -> dict[str, Any]:
    print(f"{name:<44} {value:>8.0f} {unit}")
    return {"name": name, "value": value, "unit": unit, "higher_is_better": False}
