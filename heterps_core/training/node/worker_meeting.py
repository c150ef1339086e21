"""How the workers of a generation meet: each joins the others at the rendezvous and finds its place in the plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from heterps_core.cluster import Cluster
from heterps_core.hardware import is_gpu
from heterps_core.training.job import TrainingJob
from heterps_core.training.node.node_life import own_node, runs_here_as_dry_run
from heterps_core.training.node.worker_life import SignsOfLife
from heterps_core.training.pipeline.stage_device import stage_device
from heterps_core.training.pipeline.stage_place import StagePlace, join_stage, world_group
from heterps_core.training.storage.run_directory import CLUSTER, RunDirectory
from heterps_core.training.storage.verified_files import read_signed_json
from heterps_core.transport.json_messages import gather_json
from heterps_core.transport.rank_layout import START_LIMIT_S, WorkerPlace, fingerprint, layout_from_places
from heterps_core.transport.rendezvous import open_store, prove_members

_START_LIMIT = timedelta(seconds=START_LIMIT_S)


def meet(run: RunDirectory, job: TrainingJob, signs: SignsOfLife) -> tuple[StagePlace, Store]:
    """Join the other workers of a generation; all of them call it.

    Args:
        signs: Of this worker; they learn its stage and replica.

    Returns:
        The place of this worker, and the store of the groups, which must be kept for as long as they are used.

    Raises:
        ConfigurationError: The workers are not those of the job, or this node lacks the cards for its stage.
        DistNetworkError: The store is not there in time, or a member does not prove the run's key.
    """
    rank, generation = signs.rank, signs.attempt
    cluster = Cluster.from_json(read_signed_json(run, CLUSTER))
    if cluster.generation != generation:
        raise RuntimeError(f"generation {cluster.generation} follows {generation} already")
    node, slot = own_node(cluster), int(os.environ["LOCAL_RANK"])
    host, _, port = cluster.rendezvous.rpartition(":")
    is_host = node == cluster.rendezvous_node and slot == 0
    store = open_store(
        host, int(port), key=run.secret, generation=generation, is_host=is_host, limit=_START_LIMIT
    )
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_START_LIMIT)
    assert dist.group.WORLD is not None
    proof_key = store.proof_key(run.secret)
    prove_members(dist.group.WORLD, proof_key, generation=generation)

    def new_group(ranks: Sequence[int], limit: timedelta) -> ProcessGroup:
        group = world_group(ranks, limit)
        if rank in ranks:
            prove_members(group, proof_key, generation=generation)
        return group

    own = WorkerPlace(node.node_id, slot, fingerprint(job.to_json(), cluster.to_json()))
    places = [WorkerPlace(*place) for place in gather_json(own)]
    layout = replace(layout_from_places(cluster, places, job.replicas_per_stage), shares=job.shares)
    stage, replica = signs.place = layout.position(rank)
    is_dry_run = runs_here_as_dry_run()
    # In a dry run all nodes of the stage are this machine.
    slot, num_slots = (replica, job.replicas_per_stage[stage]) if is_dry_run else (slot, node.num_workers)
    place = join_stage(
        layout,
        rank,
        new_group=new_group,
        device=stage_device(node.device_type, slot, num_slots=num_slots, is_dry_run=is_dry_run),
        has_cards=any(is_gpu(each.device_type) for each in cluster.nodes),
        is_on_one_node=sum(each.stage == stage for each in cluster.nodes) == 1,
    )
    return place, store
