"""Tables whose rows are in a mapped file or a key-value store, for the comparison with sweeps.

The distinct rows of a batch are fetched when it is looked up, and put back when they are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.embeddings.sharded_table import RowExchange, ShardedTable, copy_rows
from heterps_core.models.architectures.ctr_dnn import EMBEDDING_DIMENSION

WIDTH = EMBEDDING_DIMENSION + 1
ROWS_AT_ONCE = 100_000
ROWS_OF_FILE = 1_000_000


def first_parts(num_rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield row indices in order, some at a time, and what these rows begin with.

    Nothing of it is zero, which a file system could leave out.
    """
    for first in range(0, num_rows, ROWS_AT_ONCE):
        rows = np.arange(first, min(first + ROWS_AT_ONCE, num_rows))
        drawn = np.random.default_rng(first).random((len(rows), WIDTH), dtype=np.float32)
        yield rows, drawn * np.float32(0.01) + np.float32(1e-6)


class MappedTable(ShardedTable):
    """Rows and optimizer state in mapped files, which the kernels work on."""

    def __init__(self, folder: Path, *, num_rows: int, memory_bytes: int) -> None:
        self._folder = folder
        super().__init__(
            name="mapped",
            num_rows=num_rows,
            dimension=EMBEDDING_DIMENSION,
            optimizer=RowWiseAdagrad(),
            seed=0,
            initial_standard_deviation=0.01,
        )

    def _new_rows(self, **_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight = np.memmap(
            self._folder / "weight", np.float32, "w+", shape=(self.num_rows, EMBEDDING_DIMENSION)
        )
        state = np.memmap(self._folder / "state", np.float32, "w+", shape=(self.num_rows,))
        for rows, records in first_parts(self.num_rows):
            weight[rows], state[rows] = records[:, :-1], records[:, -1]
        return torch.from_numpy(weight), {"accumulator": torch.from_numpy(state)}


class StoreTable(ShardedTable):
    """Rows that are fetched and put by their keys; those of a batch are in memory between look-up and update."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        super().__init__(
            name="store",
            num_rows=num_rows,
            dimension=EMBEDDING_DIMENSION,
            optimizer=RowWiseAdagrad(),
            seed=0,
            initial_standard_deviation=0.01,
        )

    def fetch(self, rows: np.ndarray) -> np.ndarray:
        """Return the records of rows."""
        raise NotImplementedError

    def put(self, rows: np.ndarray, records: np.ndarray) -> None:
        """Replace the records of rows."""
        raise NotImplementedError

    def fill(self, records: Iterator[tuple[bytes, bytes]]) -> None:
        """Put all records into the store, which is empty, in the order of their keys."""
        raise NotImplementedError

    def _new_rows(self, **_: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.fill(
            record for rows, records in first_parts(self._num_rows) for record in records_of(rows, records)
        )
        return torch.empty(0, EMBEDDING_DIMENSION), {"accumulator": torch.empty(0)}

    def _gather(self, rows_BS: torch.Tensor, out_BX: torch.Tensor) -> RowExchange:
        rows_U, inverse_BS = self._distinct(rows_BS)
        records = torch.from_numpy(self.fetch(rows_U.numpy()))
        self._rows = rows_U.numpy()
        self.weight_RD = records[:, :-1].contiguous()
        self.state = {"accumulator": records[:, -1].contiguous()}
        copy_rows(self.weight_RD, inverse_BS, out_BX)
        return RowExchange(inverse_BS, len(rows_U), [], [], rows_U)

    def _scatter(
        self, rows_BS: torch.Tensor, exchange: RowExchange | None, gradients_BX: torch.Tensor
    ) -> None:
        assert exchange is not None
        self._pending.append((exchange.inverse_BS, gradients_BX))

    def apply_gradients(self, *, learning_rate: float) -> None:
        """Update the rows of the batch and put them back."""
        super().apply_gradients(learning_rate=learning_rate)
        self.put(self._rows, torch.cat([self.weight_RD, self.state["accumulator"][:, None]], 1).numpy())


def keys_of(rows: np.ndarray) -> list[bytes]:
    """Return keys in the order of rows."""
    content = rows.astype(">u4").tobytes()
    return [content[place : place + 4] for place in range(0, len(content), 4)]


def records_of(rows: np.ndarray, records: np.ndarray) -> Iterator[tuple[bytes, bytes]]:
    """Yield the key and the content of each row's record."""
    size, content = 4 * WIDTH, records.tobytes()
    return zip(
        keys_of(rows),
        (content[place : place + size] for place in range(0, len(content), size)),
        strict=True,
    )


class RocksTable(StoreTable):
    """RocksDB, with half the memory as cache of blocks."""

    def __init__(self, folder: Path, *, num_rows: int, memory_bytes: int) -> None:
        from rocksdict import BlockBasedOptions, Cache, Options, Rdict

        options = Options(raw_mode=True)
        blocks = BlockBasedOptions()
        blocks.set_block_cache(Cache(memory_bytes // 2))
        options.set_block_based_table_factory(blocks)
        options.set_write_buffer_size(memory_bytes // 8)
        options.increase_parallelism(2)
        self._folder, self._options = folder, options
        self._db = Rdict(str(folder / "rocks"), options)
        super().__init__(num_rows)

    def fill(self, records: Iterator[tuple[bytes, bytes]]) -> None:
        """Write sorted files and let the store take them in: nothing is merged."""
        from rocksdict import IngestExternalFileOptions, SstFileWriter

        files = []
        while part := list(islice(records, ROWS_OF_FILE)):
            files.append(str(self._folder / f"{len(files)}.sst"))
            writer = SstFileWriter(self._options)
            writer.open(files[-1])
            for key, content in part:
                writer[key] = content
            writer.finish()
        options = IngestExternalFileOptions()
        options.set_move_files(True)
        self._db.ingest_external_file(files, options)

    def fetch(self, rows: np.ndarray) -> np.ndarray:
        content = b"".join(self._db.get(keys_of(rows)))
        return np.frombuffer(bytearray(content), np.float32).reshape(-1, WIDTH)

    def put(self, rows: np.ndarray, records: np.ndarray) -> None:
        from rocksdict import WriteBatch, WriteOptions

        batch = WriteBatch(raw_mode=True)
        for key, content in records_of(rows, records):
            batch.put(key, content)
        options = WriteOptions()
        options.disable_wal = True
        self._db.write(batch, options)


class LmdbTable(StoreTable):
    """LMDB, without syncs; its cache is the system's."""

    def __init__(self, folder: Path, *, num_rows: int, memory_bytes: int) -> None:
        import lmdb

        self._env = lmdb.open(
            str(folder / "lmdb"), map_size=num_rows * 400, sync=False, writemap=True, map_async=True
        )
        super().__init__(num_rows)

    def fetch(self, rows: np.ndarray) -> np.ndarray:
        with self._env.begin() as transaction:
            content = b"".join(map(transaction.get, keys_of(rows)))
        return np.frombuffer(bytearray(content), np.float32).reshape(-1, WIDTH)

    def fill(self, records: Iterator[tuple[bytes, bytes]]) -> None:
        """Append: keys come in order, so pages are filled and never divided."""
        self._put(records, append=True)

    def put(self, rows: np.ndarray, records: np.ndarray) -> None:
        self._put(records_of(rows, records), append=False)

    def _put(self, records: Iterator[tuple[bytes, bytes]], *, append: bool) -> None:
        with self._env.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(records, append=append)


@dataclass(frozen=True)
class Store:
    """One of the stores."""

    table: Callable[..., ShardedTable]
    package: str | None = None
    """That must be installed."""


STORES = {
    "mmap": Store(MappedTable),
    "rocksdict": Store(RocksTable, "rocksdict"),
    "lmdb": Store(LmdbTable, "lmdb"),
}
