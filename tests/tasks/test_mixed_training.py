"""A stage of two device types from the plan file to the bill: bought, launched and trained as one process learns."""

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest

import tasks.provisioning
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.search.plan_file import load_problem_and_plan
from heterps_core.planning.search.schedulers import get_scheduler
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from heterps_core.plans.scheduling_plan import SchedulingPlan, Stage
from heterps_core.training.monitor import follow_training, publish_cluster, submit_job
from heterps_core.training.outcome import Complete
from heterps_core.training.storage.run_directory import RunDirectory
from infra.billing.bill import bill_for_run
from infra.billing.caps import Caps
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import EntryState, Ledger
from infra.machines.lifecycle import running_cluster
from infra.providers import provider_of
from infra.workspace import Workspace
from tasks.planning.problems import with_enough_units
from tasks.provisioning import provision
from tests.heterps_core.training.node_processes import make_job, prepare_clicks
from tests.heterps_core.training.reference import run_plainly
from tests.infra.builders import offer
from tests.tasks.builders import make_problem

NO_CAPS = Caps()
OFFERS = [
    offer("c7i.large", price_usd_per_hour=0.10),
    offer("r6in.large", price_usd_per_hour=0.11),
]


def limited_problem():
    """Layers that take a core 1 s, most of it the first: of three cores that are wanted two may be cheaper ones."""
    problem = make_problem()
    layers = tuple(
        replace(
            problem.layers[0],
            compute_seconds={"cpu-c7i": seconds, "cpu-r6in": 1.01 * seconds},
            communication_seconds={"cpu-c7i": 0.0, "cpu-r6in": 0.0},
        )
        for seconds in (0.9, 0.05, 0.05)
    )
    units = {
        "cpu-c7i": replace(next(iter(problem.device_types.values())), price_usd_per_hour=0.10),
        "cpu-r6in": replace(next(iter(problem.device_types.values())), price_usd_per_hour=0.11),
    }
    problem = replace(
        problem,
        batch_size=60,
        profile_batch_size=60,
        num_samples=2560.0,
        layers=layers,
        device_types=units,
        throughput_floor_samples_per_s=170.0,
        step_model=StepModel.TRAINER,
        single_replica_communicates=False,
    )
    return with_enough_units(problem, {"cpu-c7i": 2})


def test_the_plan_of_limited_units_is_kept_in_a_file_that_old_ones_look_like(tmp_path):
    problem = limited_problem()
    (tmp_path / "problem.json").write_text(json.dumps(problem.to_json()))
    plan = get_scheduler("exact").search(problem, budget_evaluations=100, seed=0).plan

    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    _, read = load_problem_and_plan(tmp_path / "problem.json", tmp_path / "plan.json")

    [stage] = plan.stages
    assert stage.units == "2 x cpu-c7i + 1 x cpu-r6in"
    assert stage.shares == (20, 20, 20)
    assert read == plan
    assert plan.optimality_gap == 0
    alone = replace(plan, stages=(Stage(0, 2, "cpu-r6in", 3),))
    assert alone.to_json()["stages"] == [
        {"first_layer": 0, "last_layer": 2, "device_type": "cpu-r6in", "num_replicas": 3}
    ]


def mixed_plan() -> SchedulingPlan:
    return get_scheduler("exact").search(limited_problem(), budget_evaluations=100, seed=0).plan


def test_machines_of_both_types_are_bought_within_the_caps():
    bought = provision.fn(mixed_plan(), OFFERS, provider="aws", caps=NO_CAPS).cloud_plan

    assert bought.machines == "2 x c7i.large + 1 x r6in.large"
    assert bought.price_usd_per_hour == pytest.approx(0.31)
    assert bought.replicas_of(0) == {"cpu-c7i": 2, "cpu-r6in": 1}
    requests = bought.node_requests()
    assert [(each.node_id, each.device_type, each.num_workers) for each in requests] == [
        ("stage0-node0", "cpu-c7i", 1),
        ("stage0-node1", "cpu-c7i", 1),
        ("stage0-node2", "cpu-r6in", 1),
    ]
    assert ProvisioningPlan.from_json(bought.to_json()) == bought
    left = bought.only(["stage0-node1", "stage0-node2"])
    assert left.replicas_of(0) == {"cpu-c7i": 1, "cpu-r6in": 1}
    assert bought.only(["stage0-node2"]).replicas_of(0) == {"cpu-r6in": 1}


@pytest.mark.slow
def test_a_dry_run_of_two_device_types_learns_what_one_process_learns_and_books_both(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks.provisioning, "num_cores", lambda: 3)
    bought = provision.fn(mixed_plan(), OFFERS, provider="local", caps=NO_CAPS)
    job = replace(make_job(prepare_clicks(tmp_path), (1, 1)), run_id="r1", stages=bought.launch_stages)
    run, ledger = RunDirectory(str(tmp_path / "run")), Ledger(tmp_path / "ledger.sqlite")
    submit_job(run, job)
    provider = provider_of(Workspace(root=tmp_path), "local", region="us-east-1")
    start = Bootstrap(run_location=run.location, python=sys.executable, run_key=run.secret)
    with running_cluster(
        provider,
        bought.launch_plan,
        run_id="r1",
        bootstrap=start,
        ledger=ledger,
        caps=NO_CAPS,
        predicted_cost_usd=0.1,
    ) as cluster:
        publish_cluster(run, cluster)
        outcome = follow_training(run, cluster, on_progress=lambda _: None)

    assert isinstance(outcome, Complete)
    assert [stage.units for stage in job.stages] == ["2 x cpu-c7i + 1 x cpu-r6in"]
    plain = run_plainly(job)
    assert [each.loss for each in outcome.training.steps] == pytest.approx(plain.losses, abs=1e-6)
    assert outcome.training.quality.auc == pytest.approx(plain.quality.auc, abs=1e-5)
    entries = ledger.entries(run_id="r1")
    assert [(each.device_type, each.state) for each in entries] == [
        ("cpu-c7i", EntryState.ENDED),
        ("cpu-c7i", EntryState.ENDED),
        ("cpu-r6in", EntryState.ENDED),
    ]
    bill = bill_for_run(provider, "r1", ledger=ledger, now=datetime.now(UTC))
    assert {line.device_type: line.count for line in bill.lines} == {"cpu-c7i": 2, "cpu-r6in": 1}
