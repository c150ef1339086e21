"""What streaming costs at a billion rows: state and time of the order, rows lost, and the speed of one core.

The order is planned for 1e9 synthetic rows in 200,000 row groups; that each row is met once is counted by the ids of
real rows, read from Parquet by each replica, also where the replicas change in mid-epoch. The bytes of a fleet are
those that moto's S3 sends to 31 workers, one after the other, and what they read of the prepared data set. The speed
is from Parquet to hashed arrays, beside Arrow's bare read and, where it is installed, Polars' in the same process;
all in CPU seconds, as other work on the machine slows the clock.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boto3
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from moto.server import DomainDispatcherApplication
from torch.nn.functional import binary_cross_entropy_with_logits

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.epoch_order import EpochOrder
from heterps_core.data.numeric_transform import NumericTransform
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.row_groups import RowGroups
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.embeddings.row_range import RowRange
from heterps_core.judging.held_out import judge_held_out
from heterps_core.judging.quality import measure_quality
from heterps_core.serving.exported_model import ClickPredictor
from heterps_core.serving.held_out_predictions import held_out_scores
from heterps_core.training.node.host_memory import peak_bytes
from heterps_core.training.pipeline.stage_exchange import replica_slice
from heterps_core.training.replica_batches import BatchFeed
from tests.heterps_core.data.synthetic_rows import held_out_labels
from tests.heterps_core.serving.builders import write_logistic
from tests.heterps_core.training.reference import plain_model
from tests.moto_server import empty_cloud

NUM_ROWS = 2_000_000
BATCH_SIZE = 4_000
FLEETS = ((1,), (8,), (31,), (31, 30, 8))
"""Replicas of a stage, in equal parts of an epoch."""

FLEET, FLEET_FILES, GROUPS_OF_A_FILE, ROWS_OF_A_GROUP, FLEET_BATCH = 31, 64, 20, 16_384, 16_384

SPEED_ROWS = 400_000
NUM_ROUNDS = 5

FLOW_ROWS, FLOW_BLOCK_ROWS = (1_000_000, 4_000_000), 200_000
"""Of the data that the flow's process handles, in equal blocks; with more cases than the latter, of so many."""

LEARNED_ROWS, LEARNED_BATCH, LEARNING_SEEDS = 60_000, 256, 5

NUMBERED = DataSchema(
    name="numbered",
    label_column="label",
    numeric_columns=("thousands", "rest"),
    categorical_columns=("text",),
)
USED, UNUSED = tuple("abcdefg"), tuple("uvwx")
CLICKS = DataSchema(
    name="clicks", label_column="label", numeric_columns=USED[:2], categorical_columns=USED[2:]
)
AS_THEY_ARE = NumericTransform(is_count=(False, False), means=(0.0, 0.0), standard_deviations=(1.0, 1.0))


def run(*, seed: int = 0, num_cases: int = NUM_ROWS) -> list[dict[str, Any]]:
    """Measure, print each figure as it comes and return all; `num_cases` are the real rows that are counted."""
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: list[Callable[[], list[dict[str, Any]]]] = [
            lambda: order_of_a_billion(seed),
            lambda: counted_rows(folder, num_cases, seed),
            lambda: speeds(folder, seed),
            lambda: fleet_bytes(folder, seed),
            lambda: flow_peaks(folder, seed, most_rows=max(FLOW_ROWS[-1], num_cases)),
            lambda: learning(folder, seed),
        ]
        for part in parts:
            started_s = time.process_time()
            found = part()
            for entry in found:
                print(f"{entry['name']:<44}{entry['value']:>18,.6g} {entry['unit']}")
            print(f"{'':<44}{time.process_time() - started_s:>18,.0f} CPU s", flush=True)
            figures += found
    return figures


def order_of_a_billion(seed: int) -> list[dict[str, Any]]:
    """Plan an epoch of 1e9 rows and resume in its middle, as one of 31 replicas."""
    starts = np.arange(200_001, dtype=np.int64) * 5_000
    EpochOrder(starts[:3], batch_size=1, seed=seed)  # what is loaded by the first is not counted
    mine = replica_slice(4_096, 31, 17)
    tracemalloc.start()
    started_s = time.perf_counter()
    order = EpochOrder(starts, batch_size=4_096, seed=seed)
    order.rows(order.num_batches // 2, np.arange(mine.first, mine.stop))
    seconds = time.perf_counter() - started_s
    held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return [
        figure("order_state_bytes_1e9", held_bytes, "bytes", higher_is_better=False),
        figure("order_peak_bytes_1e9", peak_bytes, "bytes", higher_is_better=False),
        figure("order_seconds_1e9", seconds, "s", higher_is_better=False),
    ]


def counted_rows(folder: Path, num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Count how often each of real rows is read in an epoch, by the replicas of each fleet."""
    dataset = numbered_rows(folder / "numbered", num_rows)
    num_batches = dataset.num_batches(BATCH_SIZE)
    wrong, groups_read = 0, dict.fromkeys(FLEETS, 0)
    for fleet in FLEETS:
        counts = np.zeros(num_rows, dtype=np.int64)
        for part, num_replicas in enumerate(fleet):
            steps = range(part * num_batches // len(fleet), (part + 1) * num_batches // len(fleet))
            for replica in range(num_replicas):
                mine = replica_slice(BATCH_SIZE, num_replicas, replica)
                found, num_read = rows_of_replica(dataset.directory, mine, steps, seed)
                counts += found
                groups_read[fleet] += num_read
        # Batches are full; the order says which rows the last one would not have filled.
        wrong += abs(num_batches * BATCH_SIZE - int((counts == 1).sum())) + int((counts > 1).sum())
    num_groups = dataset.manifest.file_groups[0]
    return [
        figure("rows_lost_or_doubled", wrong, "rows", higher_is_better=False),
        figure("rows_left_out_of_the_epoch", num_rows % BATCH_SIZE, "rows", higher_is_better=False),
        figure(
            "row_groups_read_by_31_over_all", groups_read[(31,)] / num_groups, "ratio", higher_is_better=False
        ),
    ]


def numbered_rows(folder: Path, num_rows: int) -> PreparedDataset:
    """Write rows that bear their number, in row groups of uneven sizes, and prepare them."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    types = {"label": pa.int8(), "thousands": pa.int32(), "rest": pa.int32(), "text": pa.string()}
    with pq.ParquetWriter(folder / "rows.parquet", pa.schema(list(types.items()))) as writer:
        first = 0
        while first < num_rows:
            numbers = np.arange(first, min(first + int(generator.integers(40, 360)), num_rows))
            columns = (numbers % 2, numbers // 1_000, numbers % 1_000, ["x"] * len(numbers))
            arrays = [
                pa.array(column).cast(kind) for column, kind in zip(columns, types.values(), strict=True)
            ]
            writer.write_table(pa.table(arrays, schema=writer.schema))
            first += len(numbers)
    return prepare_dataset(
        folder / "rows.parquet",
        schema=NUMBERED,
        eval_fraction=0.0,
        numeric_transform=AS_THEY_ARE,
        out_dir=folder / "prepared",
    )


def rows_of_replica(
    directory: Path | str, mine: RowRange, steps: range, seed: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Return how often a replica that joins at the first of some steps reads each row, by the row's own number.

    And how many row groups it reads.
    """
    dataset = PreparedDataset.open(directory)
    counts = np.zeros(dataset.manifest.num_rows, dtype=np.int64)
    with patch.object(RowGroups, "read", autospec=True, side_effect=RowGroups.read) as read:
        for step in steps:
            rows = dataset.batch_rows(
                0, step, batch_size=BATCH_SIZE, seed=seed, positions=np.arange(mine.first, mine.stop)
            )
            thousands, rest = dataset.batch(rows).dense.long().numpy().T
            np.add.at(counts, thousands * 1_000 + rest, 1)
    return counts, read.call_count


def fleet_bytes(folder: Path, seed: int, *, num_files: int = FLEET_FILES) -> list[dict[str, Any]]:
    """Count what a fleet is sent of files in S3 that have columns in use and others, in one epoch."""
    sent: Counter[str] = Counter()
    serve = DomainDispatcherApplication.__call__

    def count(application: Any, environment: dict[str, str], start_response: Any) -> Iterator[bytes]:
        for content in serve(application, environment, start_response):
            if environment["REQUEST_METHOD"] == "GET" and "HTTP_RANGE" in environment:
                sent[environment["PATH_INFO"]] += len(content)
            yield content

    with (
        patch.object(DomainDispatcherApplication, "__call__", count),
        empty_cloud() as cloud,
        patch.dict(os.environ, cloud),
    ):
        used_bytes = put_clicks(folder, seed, num_files)
        dataset = prepare_dataset(
            "s3://clicks/rows", schema=CLICKS, eval_fraction=0.0, out_dir=folder / "clicks"
        )
        sent.clear()
        for replica in range(FLEET):
            mine = replica_slice(FLEET_BATCH, FLEET, replica)
            worker = PreparedDataset.open(dataset.directory)
            for step in range(worker.num_batches(FLEET_BATCH)):
                worker.batch(
                    worker.batch_rows(
                        0, step, batch_size=FLEET_BATCH, seed=seed, positions=np.arange(mine.first, mine.stop)
                    )
                )
    prepared_bytes = FLEET * sum(file.stat().st_size for file in Path(dataset.directory).iterdir())
    return [
        figure(
            "fleet_bytes_over_used",
            (sent.total() + prepared_bytes) / used_bytes,
            "ratio",
            higher_is_better=False,
        ),
        figure("fleet_footers_over_used", prepared_bytes / used_bytes, "ratio", higher_is_better=False),
    ]


def put_clicks(folder: Path, seed: int, num_files: int) -> int:
    """Put files of a table into a bucket; returns the bytes of the columns in use."""
    generator = np.random.default_rng(seed)
    client = boto3.client("s3")
    client.create_bucket(Bucket="clicks")
    num_rows, path, used_bytes = GROUPS_OF_A_FILE * ROWS_OF_A_GROUP, folder / "some.parquet", 0
    for number in range(num_files):
        table = {"label": (generator.random(num_rows) < 0.2).astype(np.int8)}
        table |= {name: generator.integers(0, 1 << 20, num_rows) for name in (*USED, *UNUSED)}
        pq.write_table(pa.table(table), path, row_group_size=ROWS_OF_A_GROUP)
        footer = pq.read_metadata(path)
        used_bytes += sum(
            footer.row_group(group).column(column).total_compressed_size
            for group in range(footer.num_row_groups)
            for column in range(1 + len(USED))
        )
        client.upload_file(str(path), "clicks", f"rows/{number:03}.parquet")
    return used_bytes


def learning(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Compare what a model learns in the streamed order and in a full permutation, on rows as they come and sorted.

    A batch comes from 16 row groups of a thousand rows only, where a night's comes from hundreds.
    """
    stream = write_click_stream(folder / "learned.tsv", num_rows=LEARNED_ROWS, seed=seed)
    whole = prepare_dataset(stream.path, schema=CRITEO_SCHEMA, out_dir=folder / "whole")
    table = pq.read_table(Path(whole.directory) / "rows-00000.parquet")
    pq.write_table(table.slice(whole.num_train_rows), folder / "held_out.parquet")
    training = table.slice(0, whole.num_train_rows)
    figures = []
    for name, rows in (("", training), ("_sorted", training.sort_by([("I5", "ascending")]))):
        pq.write_table(rows, folder / f"learned{name}.parquet", row_group_size=1_000)
        dataset = prepare_dataset(
            folder / f"learned{name}.parquet",
            schema=CRITEO_SCHEMA,
            eval_source=folder / "held_out.parquet",
            out_dir=folder / f"learned{name}",
        )
        starts = np.arange(0, dataset.num_train_rows + 1, 1_000, dtype=np.int64)
        differences, permuted, waiting = [], [], []
        for number in range(LEARNING_SEEDS):
            order = EpochOrder(starts, batch_size=LEARNED_BATCH, seed=number, max_lanes=16)
            streamed = [order.rows(index, np.arange(LEARNED_BATCH)) for index in range(order.num_batches)]
            permutation = np.random.default_rng(number).permutation(dataset.num_train_rows)
            at_random = list(permutation[: len(streamed) * LEARNED_BATCH].reshape(-1, LEARNED_BATCH))
            permuted.append(train(dataset, at_random, number)[0])
            auc, share = train(PreparedDataset.open(dataset.directory), streamed, number)
            differences.append(auc - permuted[-1])
            waiting.append(share)
        figures += [
            figure(f"auc_streamed_less_permuted{name}", statistics.fmean(differences), "AUC"),
            figure(
                f"auc_deviation_over_seeds{name}", statistics.stdev(permuted), "AUC", higher_is_better=False
            ),
            figure(
                f"share_of_time_waiting_for_data{name}",
                statistics.median(waiting),
                "ratio",
                higher_is_better=False,
            ),
        ]
    return figures


def train(dataset: PreparedDataset, batches: list[npt.NDArray[np.int64]], seed: int) -> tuple[float, float]:
    """Train CTR-DNN on batches of rows in one process; returns the AUC on held-out rows, and the share of waiting."""
    model = plain_model("ctrdnn(embedding_dim=8)", dataset.features, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    feed = BatchFeed(dataset.batch, batches)
    started_s = time.perf_counter()
    for _, batch in feed:
        loss = binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    share = feed.waited_s / (time.perf_counter() - started_s)
    with torch.no_grad():
        logits = model(dataset.batch(np.arange(dataset.num_train_rows, dataset.manifest.num_rows)))
    auc = measure_quality(held_out_labels(dataset), logits.numpy()).auc
    assert auc is not None
    return auc, share


def speeds(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Measure rows per CPU second from Parquet, on one core."""
    stream = write_click_stream(folder / "clicks.tsv", num_rows=SPEED_ROWS, seed=seed)
    started_s = time.process_time()
    dataset = prepare_dataset(stream.path, schema=CRITEO_SCHEMA, out_dir=folder / "prepared")
    prepare_rate = SPEED_ROWS / (time.process_time() - started_s)
    path = Path(dataset.directory) / "rows-00000.parquet"
    pa.set_cpu_count(1)
    ours = rate(lambda: sum(len(part.labels) for part in dataset.parts(0, SPEED_ROWS)))
    bare = rate(lambda: read_bare(path))
    batches = rate(lambda: drain(dataset, seed), num_rows=dataset.num_batches(BATCH_SIZE) * BATCH_SIZE)
    figures = [
        figure("rows_per_core_second", ours, "rows/s"),
        figure("gathered_rows_per_core_second", batches, "rows/s"),
        figure("arrow_bare_rows_per_core_second", bare, "rows/s"),
        figure("ours_over_arrow_bare", ours / bare, "ratio"),
        figure("prepare_text_rows_per_core_second", prepare_rate, "rows/s"),
        figure("bytes_per_row_on_disk", path.stat().st_size / SPEED_ROWS, "bytes", higher_is_better=False),
    ]
    if find_spec("polars") is not None:
        import polars

        figures.append(
            figure("polars_rows_per_core_second", rate(lambda: polars.read_parquet(path).height), "rows/s")
        )
    return figures


def rate(work: Callable[[], object], *, num_rows: int = SPEED_ROWS) -> float:
    """Return rows per CPU second of the median round, after one to warm up."""
    seconds = []
    for _ in range(NUM_ROUNDS + 1):
        started_s = time.process_time()
        work()
        seconds.append(time.process_time() - started_s)
    return num_rows / statistics.median(seconds[1:])


def read_bare(path: Path) -> int:
    """Read all columns with Arrow, as plain texts."""
    file = pq.ParquetFile(path)
    return sum(file.read_row_group(group, use_threads=False).num_rows for group in range(file.num_row_groups))


def drain(dataset: PreparedDataset, seed: int) -> float:
    """Make the tensors of one epoch's batches, as the only replica."""
    total = 0.0
    for index in range(dataset.num_batches(BATCH_SIZE)):
        total += float(
            dataset.batch(dataset.batch_rows(0, index, batch_size=BATCH_SIZE, seed=seed)).labels.sum()
        )
    return total


def flow_peaks(folder: Path, seed: int, *, most_rows: int) -> list[dict[str, Any]]:
    """Measure the most memory that a process takes for what the flow does with data: of few rows and of many."""
    stream = write_click_stream(folder / "block.tsv", num_rows=FLOW_BLOCK_ROWS, seed=seed)
    block = pq.read_table(
        Path(prepare_dataset(stream.path, schema=CRITEO_SCHEMA, out_dir=folder / "block").directory)
        / "rows-00000.parquet"
    )
    peaks = {}
    for num_rows in (FLOW_ROWS[0], most_rows):
        with pq.ParquetWriter(folder / f"{num_rows}.parquet", block.schema, compression="zstd") as writer:
            for _ in range(num_rows // FLOW_BLOCK_ROWS):
                writer.write_table(block, row_group_size=FLOW_BLOCK_ROWS // 2)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
            peaks[num_rows] = child.submit(flow_peak_bytes, str(folder / f"{num_rows}.parquet")).result()
    few, many = sorted(peaks)
    slope = (peaks[many] - peaks[few]) / (many - few)
    return [
        figure("flow_peak_bytes", peaks[many], "bytes", higher_is_better=False),
        figure("flow_peak_bytes_slope", slope, "bytes/row", higher_is_better=False),
    ]


def flow_peak_bytes(path: str) -> int:
    """Prepare rows, fit the baseline, judge two models, as the flow's process; returns its largest resident size."""
    from tasks.data import PreparedClicks
    from tasks.judging.baseline import measure_baselines

    dataset = prepare_dataset(path, schema=CRITEO_SCHEMA, out_dir=f"{path}.prepared")
    baseline = measure_baselines.fn(
        PreparedClicks(directory=str(dataset.directory), description="", best_reachable=None)
    )
    assert not any(isinstance(each, str) for each in baseline.values()), baseline
    num_weights = dataset.features.num_dense + dataset.features.total_rows + 1
    folders = [
        write_logistic(
            Path(f"{path}.{seed}"), dataset, np.random.default_rng(seed).normal(0, 0.1, num_weights)
        )
        for seed in (0, 1)
    ]
    judgement = judge_held_out(*(held_out_scores(ClickPredictor(folder), dataset) for folder in folders))
    assert judgement.num_rows == dataset.num_eval_rows
    found = peak_bytes()
    assert found is not None
    return found


def figure(name: str, value: float, unit: str, *, higher_is_better: bool = True) -> dict[str, Any]:
    """Return one figure in the form of the benchmark contract."""
    return {"name": name, "value": float(value), "unit": unit, "higher_is_better": higher_is_better}
