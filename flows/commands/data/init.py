"""`heterps init`: a schema file for a table that was never seen, for a person to check."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from heterps_core.errors import ConfigurationError
from heterps_core.json_file import write_json

HELP = """\
Look at the first rows of a table, and write a schema file: which column is the label, which are numbers and which
are categories. Printed is what was seen of each column, the rows that its table would get for as many rows of data
as were looked at, and what to check. Edit the file, and train with it.

examples:
  heterps init clicks.parquet
  heterps init clicks/ --label is_click --output clicks.schema.json
  heterps init people.csv.gz --columns age,town,label
  heterps init s3://bucket/clicks
  heterps train --data clicks.parquet --schema-file schema.json

exit status: 0 when the file is written; 2 where an argument or the data cannot be used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "data",
        metavar="FILE|FOLDER",
        help="Parquet, or CSV or TSV with a header; of a folder the first file, of days one of the latest",
    )
    parser.add_argument("--label", metavar="COLUMN", help="the label (default: by its name)")
    parser.add_argument(
        "--columns", default="", metavar="NAME,...", help="all columns of a text without a header"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("schema.json"),
        metavar="SCHEMA.json",
        help="where to write it (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> None:
    """Propose a schema, write it and print what was seen."""
    from heterps_core.data.proposal.schema_proposal import propose_schema
    from heterps_core.data.reading.days import files_of_day, partitions_of
    from heterps_core.data.reading.readers import list_source_files

    if options.output.exists():
        raise ConfigurationError(
            f"the schema file must not be there yet, but {options.output} is; name another by --output"
        )
    # Of a bucket with years of days only one is listed.
    days = partitions_of(options.data)
    of_latest = files_of_day(days[max(days)]) if days else ()
    file = (of_latest or list_source_files(options.data))[0]
    proposed = propose_schema(
        file,
        source=options.data,
        label=options.label,
        column_names=[name.strip() for name in options.columns.split(",") if name.strip()],
    )
    write_json(options.output, proposed.schema.to_json())
    positive = " or ".join(map(repr, proposed.schema.label_positive))
    lines = [
        f"{proposed.num_rows:,} rows of {file}; {proposed.schema.label_column} is {positive}, a click, in "
        f"{proposed.click_share:.2%} of them",
        "",
        *proposed.table().lines(indent=""),
    ]
    train = shlex.join(["heterps", "train", "--data", options.data, "--schema-file", str(options.output)])
    lines += ["", f"wrote {options.output}: check what stands under check, then", f"  {train}"]
    print("\n".join(lines))
