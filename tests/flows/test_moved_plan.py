"""A whole rented fleet that looks at the prices of now, by a night that is really planned; only its machines are not
launched."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from prefect import flow

from flows.night import fleet as fleet_module
from flows.night.fleet import growth_of
from flows.night.plan import begin_run, plan_night
from flows.parameters import TrainParameters
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ProvisioningError
from heterps_core.training.storage.run_directory import STOP
from infra.prices.price_catalogue import PriceCatalogue, write_refreshed
from infra.providers.aws.prices import AwsPrices
from infra.providers.base import InsufficientCapacityError
from infra.workspace import HOME_VARIABLE, RUN_STORE_VARIABLE, Workspace
from tasks import prices as prices_module
from tasks.prices import price_folder, refresh_prices_of
from tests.moto_server import REGION
from tests.tasks.builders import cluster_of, look_and_decide

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


def no_answer():
    raise ProvisioningError("no credentials")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A run whose night takes hours, and its plan at the bundled prices: on c7i or m7a machines."""
    folder = tmp_path_factory.mktemp("moved")
    clicks = write_click_stream(folder / "clicks.tsv", num_rows=2_000, seed=5).path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(folder / "home"))
        patch.setenv(RUN_STORE_VARIABLE, f"file://{folder}/runs")
        # No cloud answers here: files of prices stand for what it would say.
        patch.setattr(AwsPrices, "with_own_clients", no_answer)
        patch.setattr(prices_module, "refresh_prices_of", refresh_prices_of.fn)
        patch.setattr(fleet_module, "PRICES_INTERVAL_S", 0.0)
        workspace = Workspace.locate().create()
        asked = TrainParameters(
            data=str(clicks),
            provider="aws",
            scheduler="exact",
            budget_evaluations=64,
            batch_size=128,
            epochs=100_000,
            device_types=["cpu-c7i", "cpu-m7a"],
        )
        run_id = "20261124-2200-00000000"

        @flow
        def planned():
            run = begin_run(workspace, asked, None, run_id=run_id, is_resumed=False)
            return run, plan_night(run)

        yield planned()


@flow(validate_parameters=False)
def look(opened, *, share=1.0, max_usd_per_hour=None, times_the_price=1.0):
    """Look at the fleet of a plan once, where all machines of other families cost a share of what they did.

    Args:
        times_the_price: Of the plan, that the fleet costs; above 1 its machines are others than those of the plan.
    """
    run, plan = opened
    run = replace(run, asked=run.asked.model_copy(update={"max_usd_per_hour": max_usd_per_hour}))
    cluster = cluster_of(plan.report.provisioning)
    if times_the_price > 1.0:
        nodes = [
            replace(node, zone="us-east-1f", price_usd_per_hour=node.price_usd_per_hour * times_the_price)
            for node in cluster.nodes
        ]
        cluster = replace(cluster, provider="aws", nodes=tuple(nodes))
    present = plan.report.provisioning, cluster
    used = {group.offer.instance_type.family for group in present[0].launch_plan.groups}
    others = [
        each for each in PriceCatalogue().offers(region=REGION) if each.instance_type.family not in used
    ]
    now = datetime.now(UTC)
    cheap = [
        replace(each, price_usd_per_hour=each.price_usd_per_hour * share, price_as_of=now.isoformat())
        for each in others
    ]
    write_refreshed(price_folder(run.workspace), cheap, at=now)
    run.directory.delete_file(STOP)
    with growth_of(ExitStack(), run, plan, present, present) as found:
        look_and_decide(found)
    return found.grown or found.wants_replan, run.directory.exists(STOP)


def test_at_prices_that_stay_the_fleet_stays(opened, caplog):
    assert look(opened) == (False, False)
    assert "re-plan: the plan that trains is the cheapest one" in caplog.text


def test_where_other_machines_cost_half_the_training_stops_to_be_planned_again(opened, caplog):
    assert look(opened, share=0.5) == (True, True)
    assert "prices     re-plan, of re-plan " in caplog.text


def test_a_plan_that_a_cap_refuses_is_found_out_while_the_fleet_trains(opened, caplog):
    assert look(opened, share=0.5, max_usd_per_hour=1e-3) == (False, False)
    assert "re-plan: the plan must stay within 0.001 USD per hour" in caplog.text


def test_a_fleet_that_costs_more_than_the_one_in_its_place_moves_once_that_can_be_had(
    opened, monkeypatch, caplog
):
    launched = []

    @contextmanager
    def planned_machines(workspace, cluster, bought, **others):
        launched.append(bought.launch_plan)
        if len(launched) == 1:
            raise InsufficientCapacityError("none can be had")
        yield "moved", bought

    monkeypatch.setattr(fleet_module, "planned_machines", planned_machines)

    assert look(opened, times_the_price=1.5) == (False, False)
    assert "move: none can be had" in caplog.text
    (moved, _), is_stopped = look(opened, times_the_price=1.5)
    assert (moved, is_stopped) == ("moved", True)
    assert [each.groups for each in launched] == [opened[1].report.provisioning.launch_plan.groups] * 2


def test_a_fleet_of_another_zone_at_the_same_price_stays(opened, caplog):
    assert look(opened, times_the_price=1.01) == (False, False)
    assert ", move " in caplog.text
