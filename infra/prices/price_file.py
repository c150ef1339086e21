"""What every reader of prices gives: offers, each with the time and the source of its price.

Two kinds: the bundled snapshot (`price_catalogue.py`), and what `refresh-prices` wrote (`refreshed_prices.py`).
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import InstanceOffer


class PriceFile(Protocol):
    """A file of prices."""

    @property
    def path(self) -> Path:
        """Where it is."""

    def offers(self) -> Iterator[InstanceOffer]:
        """Yield its offers, in the file's order.

        Raises:
            ConfigurationError: The file cannot be read, or a row is not as it should be.
        """


def csv_rows(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield line number and columns of each row of a CSV file with a header, gzipped or not.

    Raises:
        ConfigurationError: The file is missing, damaged or no text.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"the price file {path} cannot be read: {problem}") from problem
    reader = csv.DictReader(io.StringIO(text))
    for row in reader:
        yield reader.line_num, row
