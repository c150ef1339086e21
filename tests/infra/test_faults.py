"""Every fault at some steps; `python -m tests.benchmarks fault_injection` draws 600 cases."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from heterps_core.hardware import Market
from infra.ledger.ledger import Ledger
from tests.infra.builders import bootstrap
from tests.infra.fault_account import account_after, account_of
from tests.infra.fault_cases import WATCHED, WITHOUT_FAULT, Case, Fault, Kind, draw, draw_passing
from tests.infra.faults import (
    RUN_ID,
    Steps,
    in_a_child,
    live,
    provider_with_roles,
    steps_of_a_life,
    sweep_with,
    unlike_plan,
)
from tests.infra.moto_ec2 import moto_process
from tests.small_disk import CAN_MOUNT
from tests.tiers import weekly_after

pytestmark = pytest.mark.slow

SEEDS = range(20)


@pytest.fixture(scope="module")
def server():
    with moto_process() as running:
        yield running


@pytest.fixture(scope="module")
def steps(server, tmp_path_factory):
    return steps_of_a_life(server, tmp_path_factory.mktemp("dry"))


@pytest.mark.parametrize("seed", weekly_after(2, SEEDS))
def test_after_any_fault_the_sweep_leaves_no_machine_and_no_unpaid_second(server, steps, tmp_path, seed):
    account = account_after(draw(seed, steps=steps), server, tmp_path / "ledger.sqlite")

    assert account.is_clean, account


@pytest.mark.parametrize(
    "kind", [Kind.TAGS_LATE, Kind.MIXED_CODES, Kind.FAILED_LAUNCHES, Kind.OTHER_REGION, *WATCHED]
)
@pytest.mark.parametrize("seed", weekly_after(1, [1, 2]))
def test_no_circumstance_leaves_a_machine_an_unpaid_second_or_a_cap_that_is_passed(
    server, steps, tmp_path, seed, kind
):
    case = draw(seed, steps=steps, kinds=[kind])
    if kind in WITHOUT_FAULT:
        assert case.fault is None

    account = account_after(case, server, tmp_path / "home" / "ledger.sqlite")

    assert account.is_clean, account


@pytest.mark.skipif(not CAN_MOUNT, reason="mounting a small file system needs root")
@pytest.mark.parametrize("seed", weekly_after(1, range(3)))
def test_a_full_disk_keeps_no_machine_alive_and_is_reported(server, steps, tmp_path, seed):
    case = draw(seed, steps=steps, kinds=[Kind.DISK_FULL])

    account = account_after(case, server, tmp_path / "disk" / "ledger.sqlite")

    assert account.is_clean, account


@pytest.mark.parametrize("seed", weekly_after(2, [1, 6, *range(7, 21)]))
def test_no_run_ends_by_what_passes_within_a_minute_or_is_not_everywhere(server, tmp_path, seed):
    account = account_after(draw_passing(seed), server, tmp_path / "home" / "ledger.sqlite")

    assert account.met
    assert account.is_clean, account


def test_the_drawn_cases_contain_every_fault(steps):
    assert {draw(seed, steps=steps).fault for seed in SEEDS} == set(Fault)


def test_a_process_killed_right_after_a_fleet_request_leaves_machines_for_the_sweep(server, tmp_path):
    """The case that the ledger exists for: EC2 has launched, and nobody has written it down."""
    server.reset()
    dry = Steps(None)
    wire = live(server.client(), dry, tmp_path / "dry.sqlite", market=Market.SPOT, zones=0)
    first_fleet = [request["Action"] for request in wire.requests].index("CreateFleet")
    step = [i for i, is_request in enumerate(dry.are_requests) if is_request][first_fleet]
    case = Case(fault=Fault.KILL_AFTER, step=step, market=Market.SPOT, zones=0, is_ledger_lost=True)

    account = account_after(case, server, tmp_path / "ledger.sqlite")

    assert not account.survived
    assert account.launched == 2
    assert account.is_clean, account


@pytest.mark.parametrize("fault", [Fault.KILL_BEFORE, Fault.KILL_AFTER, Fault.RAISE])
@pytest.mark.parametrize("step", weekly_after(1, [4, 0, *range(8, 32, 4)]))
def test_what_a_broken_sweep_leaves_the_next_one_ends(server, tmp_path, fault, step):
    server.reset()
    ledger_path = tmp_path / "ledger.sqlite"
    provider_with_roles(server.own_client).launch(
        unlike_plan(Market.ON_DEMAND),
        run_id=RUN_ID,
        lease_until=datetime.now(UTC),
        bootstrap=bootstrap(Path("/srv/heterps/run")),
        ledger=Ledger(ledger_path),
    )
    case = Case(fault=fault, step=step, market=Market.ON_DEMAND, zones=0, is_ledger_lost=False)

    status = in_a_child(lambda: sweep_with(server.own_client, Steps(case), ledger_path))

    assert status != 0 or fault is Fault.RAISE
    account = account_of(server, ledger_path, survived=False)
    assert account.launched == 4
    assert account.is_clean, account
