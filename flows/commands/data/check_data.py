"""Read the first rows of a day by its schema and say what is unusual: columns with one value, a column that alone
tells the label, rows in the order of no column of times; beside the day before also the share of clicks, missing
values, values that are new, and columns that are distributed otherwise. A folder of days has its latest day
checked beside the day before.

examples:
  heterps check-data clicks/
  heterps check-data today.parquet --before yesterday.parquet --schema heterps.toml
  heterps check-data clicks/ --schema heterps.toml && heterps train --data clicks/

exit status: 0 where nothing is unusual; 2 where something is, or the data or an argument cannot be used.
"""

from __future__ import annotations

import argparse

from heterps_core.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("data", metavar="FILE|FOLDER", help="the rows, or a folder of days, here or in S3")
    parser.add_argument("--before", metavar="FILE|FOLDER", help="rows to hold them against")
    parser.add_argument(
        "--schema", metavar="FILE", help="schema of both, TOML or JSON (default: the Criteo format)"
    )


def run(options: argparse.Namespace) -> None:
    """Check the rows and print what was seen.

    Raises:
        DataError: Something is unusual, or a file cannot be read.
    """
    from pathlib import Path

    from heterps_core.data.history.event_join import check_history
    from heterps_core.data.proposal.day_check import check_day
    from heterps_core.data.reading.days import partitions_of
    from heterps_core.data.reading.readers import list_source_files
    from heterps_core.data.reading.source_files import files_of_day
    from heterps_core.data.reading.time_order import check_time_order
    from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema

    schema = CRITEO_SCHEMA if options.schema is None else DataSchema.load(Path(options.schema))
    of_days = partitions_of(options.data)
    days = sorted(of_days)
    files = files_of_day(of_days[days[-1]]) if days else list_source_files(options.data)
    before = list_source_files(options.before) if options.before else ()
    if len(days) > 1 and not before:
        before = files_of_day(of_days[days[-2]])
    check_history([files[0], *before[:1]], schema)
    check_time_order(files[:1], schema)
    check = check_day(files, schema, before=before)
    beside = "" if check.click_share_before is None else f", {check.click_share_before:.2%} of those before"
    print(f"{check.num_rows:,} rows of {files[0]}: {check.click_share:.2%} are clicks{beside}\n")
    print("\n".join(check.table().lines(indent="")))
    if check.findings:
        beside = " beside the rows before" if before else ""
        raise DataError(files[0], f"has what is unusual{beside}: {'; '.join(check.findings)}")
