"""Machines for a run, and their end: the context manager for a flow, and the same by id for its hooks."""

from __future__ import annotations

import logging
import posixpath
from collections import defaultdict
from datetime import UTC, datetime

from heterps_core.cluster import Cluster
from heterps_core.data.manifest import DatasetManifest, read_manifest
from heterps_core.data.reading.bucket_path import BucketPath
from heterps_core.errors import LedgerError, ProvisioningError
from heterps_core.json_codec import from_json, to_json
from heterps_core.training.storage.run_directory import DATA, RunDirectory
from heterps_core.training.storage.store import StorageUsage
from infra.billing.bill import Bill, bill_for_run
from infra.billing.budget import spent_usd, start_of_month
from infra.billing.caps import Spent
from infra.bootstrap.node_start import Bootstrap, publish_node_wheel
from infra.ledger.ledger import EndReason, EntryState, Ledger, LedgerEntry
from infra.ledger.ledger_entry import Instance
from infra.machines.lifecycle import terminate_run
from infra.machines.sweeper import possible_providers, providers_in_use, regions_of, usable_ledger
from infra.prices.region_rates import rates_between
from infra.prices.spot_charges import SpotHistory
from infra.providers import PROVIDERS, Provider, get_provider, provider_of
from infra.workspace import LAUNCH_SEPARATOR, Workspace, region_of_run_store, run_of_launch

STORAGE_FILE = "storage.json"
"""In a run's folder of the workspace."""

SPOT_FILE = "spot.json"
"""Beside it: the price history of spot machines that have ended."""

logger = logging.getLogger(__name__)


def directory_of_run(workspace: Workspace, provider: str, run_id: str) -> RunDirectory:
    """Return the run directory of a run that is trained, with its key.

    Raises:
        ConfigurationError: See `Provider.run_location`.
    """
    location = get_provider(provider).run_location(workspace, run_id)
    return RunDirectory(location, secret=workspace.run_key(run_id))


def spent_before_launch(provider: Provider, ledger: Ledger, run_id: str) -> Spent:
    """Return the spending that counts against the caps before a launch, without the live machines of the run."""
    now = provider.now()
    entries = [entry for entry in ledger.entries() if entry.provider == provider.name]
    of_run = [entry for entry in entries if run_of_launch(entry.run_id) == run_id]
    alive = {entry for entry in of_run if entry.ended_at is None}
    failed = [entry for entry in of_run if entry.reason == EndReason.LAUNCH_FAILED]
    others = [entry for entry in entries if entry not in alive]
    return Spent(
        failed_launches_usd=spent_usd(failed, provider, now=now),
        month_usd=spent_usd(others, provider, now=now, since=start_of_month(now)),
    )


def node_bootstrap(provider: str, run_directory: RunDirectory, *, model: str) -> Bootstrap:
    """Return the settings of the nodes of a run; puts the code of rented ones into the run directory."""
    rented_from = get_provider(provider)
    manifest = read_manifest(lambda name: run_directory.open_file(f"{DATA}/{name}"))
    return Bootstrap(
        run_location=run_directory.location,
        data_folders=() if rented_from.runs_here or manifest is None else data_folders(manifest),
        python=rented_from.node_python,
        run_key=run_directory.secret,
        wheel=None if rented_from.runs_here else publish_node_wheel(run_directory, model),
        lifetime_s=rented_from.lifetime_s,
    )


def data_folders(manifest: DatasetManifest) -> tuple[str, ...]:
    """Return the folders of buckets that hold the rows of a run, one for each bucket; none where they are copied."""
    folders = defaultdict(list)
    for number in manifest.bucket_files:
        folder = BucketPath.parse(manifest.sources[number].path).parent
        folders[folder.parts[0]].append(folder.key)
    return tuple(posixpath.commonpath(of_bucket) for of_bucket in folders.values())


def next_launch_id(ledger: Ledger, run_id: str) -> str:
    """Return a new id for a launch of a run: the run's own at first, then with a number.

    A launch id stands for one plan in the ledger, and a run that is resumed launches again.
    """
    used = _launch_ids_of(ledger, run_id)
    return run_id if not used else f"{run_id}{LAUNCH_SEPARATOR}{len(used) + 1}"


def _launch_ids_of(ledger: Ledger, run_id: str) -> list[str]:
    """Return the ids of all launches of a run, in order."""
    ids = dict.fromkeys(entry.run_id for entry in ledger.entries())
    return [launch_id for launch_id in ids if run_of_launch(launch_id) == run_id]


def end_machines_of(workspace: Workspace, run_id: str) -> int:
    """Terminate the remaining machines of a run, found by its id alone; return how many. May be called again.

    A damaged ledger is set aside, and the machines are found by their own tags, as where it was deleted.

    Raises:
        ProvisioningError: Machines are left.
        LedgerError: All were asked to end, and it could not be written down.
    """
    problems: list[Exception] = []
    ledger: Ledger | None = None
    launches: set[tuple[str, str, str]] = set()
    is_complete, had_ledger = False, workspace.ledger_path.exists()
    try:
        ledger, note = usable_ledger(workspace)
        launches = {(entry.provider, entry.region, entry.run_id) for entry in ledger.entries()}
        is_complete = had_ledger and note is None
    except (LedgerError, OSError) as problem:
        problems.append(problem)
    if not is_complete:
        names = possible_providers() if ledger is None else providers_in_use(ledger.entries())
        places = [(name, region) for name in names for region in regions_of(workspace, name, None)]
        for name, region in places:
            try:
                machines = provider_of(workspace, name, region=region).list_instances()
            except ProvisioningError as problem:
                problems.append(problem)
            else:
                launches |= {(name, region, machine.run_id) for machine in machines}
    ended = 0
    for name, region, launch_id in sorted(launches):
        if run_of_launch(launch_id) != run_id:
            continue
        provider = provider_of(workspace, name, region=region)
        try:
            # Without a ledger the sweep writes them down.
            ended += len(
                provider.terminate(launch_id)
                if ledger is None
                else terminate_run(provider, launch_id, ledger=ledger)
            )
        except (ProvisioningError, LedgerError) as problem:
            # The machines of the other launches must end all the same.
            problems.append(problem)
    if problems:
        raise problems[0]
    return ended


def providers_of_run(workspace: Workspace) -> dict[str, str]:
    """Return the provider of every run that the ledger knows, the newest run last."""
    return {run_of_launch(entry.run_id): entry.provider for entry in ledger_entries(workspace)}


def ledger_entries(workspace: Workspace, run_id: str | None = None) -> list[LedgerEntry]:
    """Return the machines of all runs, or of all launches of one; none where nothing was ever launched."""
    if not workspace.ledger_path.exists():
        return []
    entries = Ledger(workspace.ledger_path).entries()
    return [entry for entry in entries if run_id in (None, run_of_launch(entry.run_id))]


def machines_of_run(workspace: Workspace, run_id: str) -> tuple[Instance, ...]:
    """Return the machines of all launches of a run that exist right now."""
    entries = ledger_entries(workspace, run_id)
    launches = dict.fromkeys((entry.provider, entry.region, entry.run_id) for entry in entries)
    return tuple(
        machine
        for name, region, launch_id in launches
        for machine in provider_of(workspace, name, region=region).list_instances(launch_id)
    )


def live_run_ids(workspace: Workspace) -> set[str]:
    """Return the runs that have processes of this machine as nodes right now."""
    return {
        run_of_launch(instance.run_id)
        for name, provider in PROVIDERS.items()
        if provider.runs_here
        for instance in provider_of(workspace, name).list_instances()
    }


def keep_spot_prices(workspace: Workspace, provider: Provider, run_id: str) -> None:
    """Keep the price history of a run's spot machines that have ended: the cloud forgets them within the hour.

    Where the cloud does not answer, they stay billed at the price that was planned with, which is logged.
    """
    ended = [entry for entry in ledger_entries(workspace, run_id) if entry.ended_at is not None]
    try:
        found = provider.spot_prices(ended)
    except ProvisioningError as problem:
        logger.warning(
            "spot machines of run %s are billed at the prices of their launch: %s", run_id, problem
        )
        return
    if found:
        prices = {**_spot_prices_of(workspace, run_id), **found}
        local_folder(workspace, run_id).write_json(SPOT_FILE, to_json(prices))


def keep_storage_usage(
    workspace: Workspace,
    run_id: str,
    run: RunDirectory,
    cluster: Cluster,
    of_nodes: StorageUsage,
    *,
    crosses: bool = False,
) -> None:
    """Add the requests and the stored data of a launch to the usage of the bucket, for the bill.

    What stands there at the end counts for the whole time: the data came before the launch, and of checkpoints as
    many are kept at any time. This host still has to read the newest of them, for the model that is registered. A
    store that does not answer costs a line of the bill, not the night.

    Args:
        crosses: The nodes are in another region than the store or the rows; all that they read and wrote crossed.
    """
    from heterps_core.training.checkpoint import newest_checkpoint_bytes

    usage = _storage_of(workspace, run_id) + of_nodes
    if crosses:
        usage += StorageUsage(crossing_bytes=of_nodes.bytes_read + of_nodes.bytes_written)
    if not run.is_local:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(cluster.created_at)).total_seconds()
        try:
            model_bytes = newest_checkpoint_bytes(run)
            usage += StorageUsage(stored_byte_s=run.num_bytes() * seconds)
            if not get_provider(cluster.provider).is_beside_store():
                usage += StorageUsage(egress_bytes=run.usage.bytes_read + model_bytes)
        except OSError as problem:
            logger.warning("what %s keeps is not in the bill: %s", run.location, problem)
    usage += run.usage
    local_folder(workspace, run_id).write_json(STORAGE_FILE, to_json(usage))


def bills_of_run(workspace: Workspace, provider: str, run_id: str) -> tuple[Bill, ...]:
    """Return the bill of each launch of a run, from the files of this machine alone.

    What all launches asked of the bucket stands in the bill of the last.
    """
    ledger = Ledger(workspace.ledger_path)
    now = datetime.now(UTC)
    launch_ids = _launch_ids_of(ledger, run_id)
    return tuple(
        bill_for_run(
            provider_of(workspace, provider),
            launch_id,
            ledger=ledger,
            now=now,
            storage=_storage_of(workspace, run_id) if launch_id == launch_ids[-1] else None,
            spot_prices=_spot_prices_of(workspace, run_id),
            rates=rates_between(
                workspace.price_folder, ledger.entries(run_id=launch_id)[0].region, region_of_run_store()
            ),
        )
        for launch_id in launch_ids
    )


def local_folder(workspace: Workspace, run_id: str) -> RunDirectory:
    """Return a run's folder on this machine, wherever its nodes write."""
    return RunDirectory(str(workspace.run_folder(run_id)))


def nodes_folder(workspace: Workspace, run_id: str) -> RunDirectory:
    """Return where the nodes of a run write, to read; that of a run that had no machine is its own folder.

    Raises:
        ConfigurationError: See `Provider.run_location`.
    """
    provider = providers_of_run(workspace).get(run_id)
    if provider is None:
        return local_folder(workspace, run_id)
    return RunDirectory(get_provider(provider).run_location(workspace, run_id))


def _storage_of(workspace: Workspace, run_id: str) -> StorageUsage:
    return StorageUsage(**(local_folder(workspace, run_id).read_json(STORAGE_FILE) or {}))


def _spot_prices_of(workspace: Workspace, run_id: str) -> dict[str, SpotHistory]:
    document = local_folder(workspace, run_id).read_json(SPOT_FILE) or {}
    return {instance_id: from_json(SpotHistory, history) for instance_id, history in document.items()}


def cost_metrics(workspace: Workspace, run_id: str) -> dict[str, float | None]:
    """Return the cost of a run so far by the ledger; nothing for a run of another workspace.

    A run that had no machine has cost 0, where its folder shows that it was begun here.
    """
    provider = providers_of_run(workspace).get(run_id)
    if provider is not None:
        usd = sum(bill.total_usd for bill in bills_of_run(workspace, provider, run_id))
    elif workspace.run_folder(run_id).exists():
        usd = 0.0
    else:
        return {}
    return {"cost/billed_usd": usd, "night/usd": float(f"{usd:.4g}")}


def runs_with_machines(workspace: Workspace) -> set[str]:
    """Return the runs with machines that are not terminated, as far as the ledger knows: their bills still grow."""
    return {
        run_of_launch(entry.run_id)
        for entry in ledger_entries(workspace)
        if entry.state is EntryState.LAUNCHED
    }
