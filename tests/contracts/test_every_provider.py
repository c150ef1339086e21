"""One suite that every listed provider must pass: on this machine, EC2 as moto serves it, real Ray and real Slurm."""

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from heterps_core.errors import BudgetExceededError, ConfigurationError, UnknownNameError
from infra.billing.bill import bill_for_run
from infra.billing.caps import Caps
from infra.bootstrap.node_start import Bootstrap
from infra.ledger.ledger import EndReason, EntryState, Ledger
from infra.machines.lifecycle import running_cluster, terminate_run
from infra.machines.sweeper import sweep
from infra.providers import PROVIDERS, Provider, get_provider, provider_of
from infra.workspace import Workspace
from tests.infra.builders import bootstrap, moto_ec2, plan
from tests.moto_server import REGION
from tests.ray_cluster import ray_cluster
from tests.slurm_cluster import slurm_cluster

NO_CAPS = Caps()


@pytest.fixture(scope="module")
def aws_environment():
    with moto_ec2() as environment:
        yield environment


@dataclass
class Bench:
    """A provider with a run of its own."""

    provider: Provider
    ledger: Ledger
    run_id: str
    bootstrap: Bootstrap

    def launch(self, *, run_id: str | None = None, lease_s: float = 60.0):
        return self.provider.launch(
            plan(),
            run_id=run_id or self.run_id,
            lease_until=datetime.now(UTC) + timedelta(seconds=lease_s),
            bootstrap=self.bootstrap,
            ledger=self.ledger,
        )

    def running(self, caps: Caps = NO_CAPS):
        return running_cluster(
            self.provider,
            plan(),
            run_id=self.run_id,
            bootstrap=self.bootstrap,
            ledger=self.ledger,
            caps=caps,
            predicted_cost_usd=1.0,
        )

    def live(self):
        return self.provider.list_instances(self.run_id)


@pytest.fixture(scope="module")
def slurm_environment():
    with slurm_cluster() as cluster:
        yield cluster.environment


@pytest.fixture(scope="module")
def ray_started():
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture
def ray_environment(ray_started):
    with ray_started.entered():
        yield ray_started.environment


ENVIRONMENTS = {"aws": "aws_environment", "ray": "ray_environment", "slurm": "slurm_environment"}
"""Fixtures of the servers that a provider asks."""

MARKS = dict.fromkeys(("ray", "slurm"), (pytest.mark.slow, pytest.mark.root))


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in PROVIDERS])
def bench(request, tmp_path: Path, monkeypatch):
    environment = (
        request.getfixturevalue(ENVIRONMENTS[request.param]) if request.param in ENVIRONMENTS else {}
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run_id = f"run-{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv("HETERPS_AWS_WORKSPACE", run_id)
    provider = provider_of(Workspace(root=tmp_path), request.param, region=REGION)
    yield Bench(
        provider=provider,
        ledger=Ledger(tmp_path / "ledger.sqlite"),
        run_id=run_id,
        bootstrap=bootstrap(tmp_path / "run"),
    )
    for instance in provider.list_instances():
        provider.terminate(instance.run_id)


def test_launches_each_node_of_the_plan_at_its_price(bench):
    cluster = bench.launch()
    bench.provider.wait_until_ready(cluster, timeout_s=20.0)

    assert [(node.node_id, node.stage, node.num_workers) for node in cluster.nodes] == [
        ("stage0-node0", 0, 1),
        ("stage1-node0", 1, 1),
    ]
    assert cluster.price_usd_per_hour == pytest.approx(0.09 + 0.17)
    assert all(node.address for node in cluster.nodes)
    assert cluster.rendezvous.startswith(f"{cluster.nodes[0].address}:")


def test_every_machine_carries_its_run_and_its_lease(bench):
    before = datetime.now(UTC)
    cluster = bench.launch(lease_s=60.0)

    live = bench.live()

    assert {(i.run_id, i.provider_instance_id) for i in live} == {
        (bench.run_id, node.provider_instance_id) for node in cluster.nodes
    }
    for instance in live:
        assert before < instance.lease_until - timedelta(seconds=60) < datetime.now(UTC)
        assert abs(instance.launched_at - before) < timedelta(seconds=30)
        assert not instance.is_owner_dead


def test_launching_again_under_the_same_run_adopts_what_is_there(bench):
    first, second = bench.launch(), bench.launch()

    assert second.nodes == first.nodes
    assert second.rendezvous == first.rendezvous
    assert len(bench.live()) == 2
    assert len(bench.ledger.entries(run_id=bench.run_id)) == 2


@pytest.mark.slow
def test_ending_a_run_twice_ends_it_once(bench):
    cluster = bench.launch()

    ended = bench.provider.terminate(bench.run_id)

    assert set(ended) == {node.provider_instance_id for node in cluster.nodes}
    assert bench.live() == ()
    assert bench.provider.terminate(bench.run_id) == ()


def test_ending_or_renewing_what_never_was_is_no_error(bench):
    bench.provider.renew_lease("never-was", until=datetime.now(UTC))

    assert bench.provider.terminate("never-was") == ()


def test_ending_one_run_leaves_the_others(bench):
    other = f"{bench.run_id}-other"
    bench.launch()
    bench.launch(run_id=other)

    bench.provider.terminate(bench.run_id)

    assert len(bench.provider.list_instances(other)) == 2


def test_renewing_moves_the_lease_of_every_machine(bench):
    bench.launch()
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)

    bench.provider.renew_lease(bench.run_id, until=until)

    assert [instance.lease_until for instance in bench.live()] == [until, until]


def test_a_cluster_lives_as_long_as_its_block(bench):
    with bench.running() as cluster:
        assert len(bench.live()) == len(cluster.nodes) == 2
        assert {e.state for e in bench.ledger.entries(run_id=bench.run_id)} == {EntryState.LAUNCHED}

    assert bench.live() == ()
    assert {(e.state, e.reason) for e in bench.ledger.entries(run_id=bench.run_id)} == {
        (EntryState.ENDED, EndReason.RUN_ENDED)
    }


def test_a_cluster_is_ended_when_its_block_fails(bench):
    with pytest.raises(ZeroDivisionError), bench.running():
        _ = 1 / 0

    assert bench.live() == ()


@pytest.mark.parametrize(
    ("caps", "complaint"),
    [
        # By hand: machines of 0.09 and 0.17; on AWS each with 0.005 for an address, 40 GB at 0.08 USD a month, and
        # 0.0018 for heartbeats and looks at the lease.
        (
            Caps(max_usd_per_hour=0.2),
            r"within 0\.2 USD per hour, but takes (0\.26: 0\.06 \(30%\)|0\.2825: 0\.08246 \(41%\)) too much",
        ),
        (Caps(max_usd_per_run=0.5), r"within 0\.5 USD per run, but takes 1: 0\.5 \(100%\) too much"),
    ],
)
def test_a_cap_refuses_before_anything_is_launched(bench, caps, complaint):
    with pytest.raises(BudgetExceededError, match=complaint), bench.running(caps):
        pytest.fail("the block must not run")

    assert bench.live() == ()
    assert bench.ledger.entries() == ()


def test_the_sweep_ends_what_has_expired_and_leaves_what_lives(bench):
    expired = f"{bench.run_id}-expired"
    bench.launch(lease_s=60.0)
    bench.launch(run_id=expired, lease_s=-1.0)

    swept = sweep(bench.provider, now=datetime.now(UTC), ledger=bench.ledger)

    assert sorted((m.run_id, m.node_id, m.reason) for m in swept) == [
        (expired, "stage0-node0", EndReason.LEASE_EXPIRED),
        (expired, "stage1-node0", EndReason.LEASE_EXPIRED),
    ]
    assert len(bench.live()) == 2
    assert bench.provider.list_instances(expired) == ()
    assert {e.reason for e in bench.ledger.entries(run_id=expired)} == {EndReason.LEASE_EXPIRED}
    assert sweep(bench.provider, now=datetime.now(UTC), ledger=bench.ledger) == []


def test_hooks_can_end_a_run_of_which_they_know_only_the_id(bench):
    bench.launch()

    assert len(terminate_run(bench.provider, bench.run_id, ledger=bench.ledger)) == 2
    assert terminate_run(bench.provider, bench.run_id, ledger=bench.ledger) == ()
    assert bench.live() == ()


def test_the_bill_is_seconds_times_the_frozen_price(bench):
    bench.launch()
    entries = sorted(bench.ledger.entries(run_id=bench.run_id), key=lambda entry: entry.stage)
    launched = [entry.launched_at for entry in entries]
    later = max(launched) + timedelta(hours=1)

    bill = bill_for_run(bench.provider, bench.run_id, ledger=bench.ledger, now=later)

    hours = [(later - at).total_seconds() / 3600 for at in launched]
    # Of the machines alone: a cloud's bill has their disks and traffic on lines of their own.
    assert sum(line.usd for line in bill.lines) == pytest.approx(0.09 * hours[0] + 0.17 * hours[1])
    assert bill.failed_launches_usd == 0.0
    assert bill.is_dry_run == bench.provider.is_dry_run


@pytest.mark.parametrize("run_id", ["", "../elsewhere", "a b", "x" * 65])
def test_refuses_a_run_id_that_could_lead_elsewhere(bench, run_id):
    with pytest.raises(ConfigurationError, match="a run id must be"):
        bench.provider.launch(
            plan(),
            run_id=run_id,
            lease_until=datetime.now(UTC),
            bootstrap=bench.bootstrap,
            ledger=bench.ledger,
        )


def test_an_unknown_provider_is_answered_with_the_known_ones():
    with pytest.raises(
        UnknownNameError, match=r"known are: aws, here, local, ray, slurm\. Did you mean 'local'"
    ):
        get_provider("locla")
