"""Which part of a data set in a bucket a node needs, and how it gets no more than that.

A batch's rows are sorted before they are cut among micro-batches and replicas, so a replica always works on rows from
the same few regions of the files: of four replicas each needs little more than a quarter of the rows. And a
stage that neither looks rows up nor sees labels needs none. The files keep their size on the node, with holes
where nothing is needed, so that training reads them as if they were whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from heterps_core.cluster import Cluster, Node
from heterps_core.data.array_files import ARRAY_NAMES
from heterps_core.data.dataset import epoch_order
from heterps_core.data.manifest import MANIFEST_NAME, DatasetManifest, read_manifest
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.plans.provisioning_plan import NodeRequest
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.pipeline.stage_exchange import batch_slices
from heterps_core.training.storage.run_directory import DATA, RunDirectory
from heterps_core.training.storage.verified_files import merged

LEAST_GAP_ROWS = 16_384
"""Fewer rows between two parts are read along: a request costs more than they do."""

SYSTEM_BYTES = 12e9
"""Of a rented node's disk: the system, the environment with an accelerator's libraries, and logs."""

Regions = npt.NDArray[np.int64]
"""[R, 2]: first row and the one after the last, ascending and apart."""


def replicas_of_node(nodes: Sequence[Node | NodeRequest], node: Node | NodeRequest) -> range:
    """Return the replicas of its stage that run on a node; numbered over the stage's nodes in order."""
    first = 0
    for other in nodes:
        if other.node_id == node.node_id:
            break
        first += other.num_workers if other.stage == node.stage else 0
    return range(first, first + node.num_workers)


def training_regions(
    num_train_rows: int, config: TrainingConfig, *, num_replicas: int, replicas: Sequence[int]
) -> Regions:
    """Return the regions of training rows that some replicas of a stage meet in any batch of any epoch."""
    size = config.batch_size
    num_batches = num_train_rows // size
    if num_batches == 0:
        # The one batch of an epoch repeats all rows.
        return np.array([[0, num_train_rows]])
    parts = []
    for epoch in range(config.num_epochs):
        order = epoch_order(num_train_rows, epoch, config.seed)
        batches = np.sort(order[: num_batches * size].reshape(num_batches, size), axis=1)
        parts += [
            (int(batches[:, first].min()), int(batches[:, stop - 1].max()) + 1)
            for first, stop in _slices(size, config, num_replicas, replicas)
        ]
    return _regions(parts)


def held_out_regions(
    num_eval_rows: int, config: TrainingConfig, *, num_replicas: int, replicas: Sequence[int]
) -> Regions:
    """Return the regions of held-out rows, counted from the first of them, that some replicas predict."""
    return _regions(
        [
            (start + first, start + stop)
            for start in range(0, num_eval_rows, config.batch_size)
            for first, stop in _slices(
                min(config.batch_size, num_eval_rows - start), config, num_replicas, replicas
            )
        ]
    )


def download_slices(run: RunDirectory, job: TrainingJob, cluster: Cluster, node: Node, target: Path) -> None:
    """Copy to `target` what a node needs of the data set in the run directory.

    Raises:
        DataError: The bucket holds no complete data set.
    """
    target.mkdir(parents=True, exist_ok=True)
    content = run.read_bytes(f"{DATA}/{MANIFEST_NAME}")
    if content is not None:
        (target / MANIFEST_NAME).write_bytes(content)
    manifest = read_manifest(target)
    if manifest is None:
        raise DataError(
            f"{run.location}/{DATA}", "must hold a prepared dataset, but has no readable manifest"
        )
    features, labels = _regions_of(manifest, job, node.stage, replicas_of_node(cluster.nodes, node))
    needed = arrays_of_stage(job, node.stage, manifest)
    sizes = run.file_sizes(DATA)
    for name in ARRAY_NAMES:
        file = f"{name}.npy"
        row_bytes = _row_bytes(name, manifest)
        header_bytes = sizes[file] - row_bytes * manifest.num_rows
        regions = labels if name == "labels" else features
        parts = (header_bytes + row_bytes * regions).tolist() if name in needed else []
        run.download_ranges(f"{DATA}/{file}", target / file, [(0, header_bytes), *parts])


def check_slices_fit(
    manifest: DatasetManifest, job: TrainingJob, machines: Sequence[NodeRequest], *, disk_bytes: float
) -> None:
    """Check, before anything is uploaded or launched, that each machine's disk holds its slice of the data.

    Args:
        disk_bytes: Of one machine; the system and the environment take `SYSTEM_BYTES` of it.

    Raises:
        ConfigurationError: One does not; names the slice, the disk and the way out.
    """
    room = disk_bytes - SYSTEM_BYTES
    if manifest.num_rows * sum(_row_bytes(name, manifest) for name in ARRAY_NAMES) <= room:
        return
    for machine in machines:
        features, labels = _regions_of(manifest, job, machine.stage, replicas_of_node(machines, machine))
        needed = arrays_of_stage(job, machine.stage, manifest)
        num_bytes = sum(
            _row_bytes(name, manifest) * int(np.diff(labels if name == "labels" else features).sum())
            for name in needed
        )
        if num_bytes > room:
            raise ConfigurationError(
                f"a rented machine keeps its slice of the data on its disk, of which {room / 1e9:.0f} GB are free, "
                f"but {machine.node_id} needs {num_bytes / 1e9:.0f} GB; nothing was launched. Train on fewer rows, "
                f"or set a higher throughput_floor_samples_per_s, so that more machines share them"
            )


def arrays_of_stage(job: TrainingJob, stage: int, manifest: DatasetManifest) -> frozenset[str]:
    """Return which arrays a stage reads: features where it looks rows up, labels at the end."""
    # A node of a dry run never comes here, and need not wait for torch.
    from heterps_core.models.chain import build_chain
    from heterps_core.models.slot_embedding import SlotEmbedding

    layers = list(build_chain(job.model, manifest.features, seed=job.config.seed).children())
    part = job.stages[stage]
    looks_up = any(
        isinstance(layer, SlotEmbedding) for layer in layers[part.first_layer : part.last_layer + 1]
    )
    is_last = stage == len(job.stages) - 1
    return frozenset(("dense", "ids") if looks_up else ()) | frozenset(("labels",) if is_last else ())


def _regions(parts: Sequence[tuple[int, int]]) -> Regions:
    return np.array(merged(parts, least_gap=LEAST_GAP_ROWS), dtype=np.int64).reshape(-1, 2)


def _regions_of(
    manifest: DatasetManifest, job: TrainingJob, stage: int, replicas: Sequence[int]
) -> tuple[Regions, Regions]:
    """Return the regions of features and of labels: quality is measured on one worker, with all held-out labels."""
    num_replicas = job.replicas_per_stage[stage]
    first_held_out = manifest.num_train_rows
    training = training_regions(first_held_out, job.config, num_replicas=num_replicas, replicas=replicas)
    held_out = held_out_regions(
        manifest.num_eval_rows, job.config, num_replicas=num_replicas, replicas=replicas
    )
    all_held_out = np.array([[0, manifest.num_eval_rows]])
    return (
        np.concatenate([training, held_out + first_held_out]),
        np.concatenate([training, all_held_out + first_held_out]),
    )


def _slices(
    num_rows: int, config: TrainingConfig, num_replicas: int, replicas: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the positions (first, stop) of a batch that some replicas work on."""
    for replica in replicas:
        for _, rows in batch_slices(
            num_rows, num_microbatches=config.num_microbatches, num_replicas=num_replicas, replica=replica
        ):
            if rows.num_rows:
                yield rows.first, rows.stop


def _row_bytes(name: str, manifest: DatasetManifest) -> int:
    features = manifest.features
    return {"dense": 4 * features.num_dense, "ids": 4 * features.num_slots, "labels": 1}[name]
