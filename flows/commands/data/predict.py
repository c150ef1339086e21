"""Predict the rows of files: a probability of a click for each, in their order. The files are Parquet, or text laid
out as that of the training; labels may be missing. Rows are read, predicted and written in batches, so files may be
larger than memory.

examples:
  heterps predict today.parquet --output probabilities.parquet
  heterps predict clicks/day=2026-11-08 --output probabilities.csv --keep user_id,item_id
  heterps predict s3://bucket/clicks/day=2026-11-08 --output probabilities.parquet --version 12

exit status: 0 when the output is written; 2 where an argument or a row cannot be used, or there is no champion yet;
6 where the model's files were changed or damaged.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from heterps_core.errors import DataError
from infra.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("data", metavar="FILE|FOLDER", help="the rows, here or in S3")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        required=True,
        metavar="OUT.parquet|OUT.csv",
        help="where to write; a file of this name is replaced",
    )
    parser.add_argument(
        "--keep", default="", metavar="COLUMN,...", help="columns to copy beside the probabilities"
    )
    parser.add_argument(
        "--version", metavar="N", help="of the registered model (default: that of the champion)"
    )


def run(options: argparse.Namespace) -> None:
    """Predict, and print how many rows and how fast."""
    from heterps_core.compute_device import use_all_cores
    from heterps_core.data.reading.readers import list_source_files
    from heterps_core.serving.exported_model import ClickPredictor
    from heterps_core.serving.file_prediction import predict_files
    from tasks.records import model_registry

    workspace = Workspace.locate()
    files = list_source_files(options.data)
    version = model_registry.version_to_serve(workspace, options.version)
    predictor = ClickPredictor(
        model_registry.verified_folder(workspace, version), events_folder=workspace.data_directory
    )
    use_all_cores()
    started_s = time.perf_counter()
    kept = [name.strip() for name in options.keep.split(",") if name.strip()]
    try:
        num_rows = predict_files(predictor, files, options.output, kept=kept)
    except DataError as error:
        model = f"version {version.version} ({version.model})"
        problem = f"{error.problem}; {model} reads it so, and --version names another"
        raise DataError(error.path, problem, line=error.line) from error
    seconds = time.perf_counter() - started_s
    print(
        f"{num_rows:,} rows in {seconds:.1f} s ({num_rows / seconds:,.0f} rows/s) by version {version.version} "
        f"({version.model}): {options.output}"
    )
