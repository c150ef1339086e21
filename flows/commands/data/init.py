"""Look at the first rows of a table, and write heterps.toml: its schema, which says what column is the label, which
are numbers and which are categories, and beside it the parameters of heterps train. Printed is what was seen of
each column, the rows that its table would get for as many rows of data as were looked at, and what to check. Edit
the file, and train with it.

examples:
  heterps init clicks.parquet
  heterps init clicks/ --label is_click --output clicks.toml
  heterps init people.csv.gz --columns age,town,label
  heterps init s3://bucket/clicks
  heterps train --parameters heterps.toml

exit status: 0 when the file is written; 2 where an argument or the data cannot be used.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from heterps_core.errors import ConfigurationError
from heterps_core.json_file import write_json
from heterps_core.toml_file import PARAMETERS_TABLE, SCHEMA_TABLE, SUFFIX

if TYPE_CHECKING:
    from heterps_core.data.schema import DataSchema


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
        "--separator",
        type=_separator,
        metavar="CHARACTER",
        help=r"between the fields of a text, such as ~ or \x01 (default: the first line shows it)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("heterps.toml"),
        metavar="FILE.toml",
        help="where to write it (default: %(default)s); a name with .json gets the schema alone, as JSON",
    )


def _separator(text: str) -> str:
    """Read one ASCII character, or the escape of one."""
    character = text.encode().decode("unicode_escape")
    if len(character) != 1 or not character.isascii() or character in ' "\r\n':
        raise argparse.ArgumentTypeError(f"must be one ASCII character such as ~ or \\x01, got {text!r}")
    return character


def run(options: argparse.Namespace) -> None:
    """Propose a schema, write it and print what was seen."""
    from heterps_core.data.proposal.schema_proposal import propose_schema
    from heterps_core.data.reading.days import partitions_of
    from heterps_core.data.reading.readers import holds_rows, list_source_files
    from heterps_core.data.reading.source_files import files_of_day

    if options.output.exists():
        raise ConfigurationError(
            f"the file to write must not be there yet, but {options.output} is; name another by --output"
        )
    # One day is listed, also in a bucket with years of days.
    days = partitions_of(options.data)
    of_latest = files_of_day(days[max(days)]) if days else ()
    files = of_latest or list_source_files(options.data)
    file = next(filter(holds_rows, files), files[0])
    proposed = propose_schema(
        file,
        source=options.data,
        label=options.label,
        column_names=[name.strip() for name in options.columns.split(",") if name.strip()],
        separator=options.separator,
    )
    if options.output.suffix == SUFFIX:
        parameters = ["--parameters", str(options.output)]
        _write_toml(options.output, proposed.schema, data=options.data)
    else:
        parameters = ["--data", options.data, "--schema-file", str(options.output)]
        write_json(options.output, proposed.schema.to_json())
    positive = " or ".join(map(repr, proposed.schema.label_positive))
    lines = [
        f"{proposed.num_rows:,} rows of {file}; {proposed.schema.label_column} is {positive}, a click, in "
        f"{proposed.click_share:.2%} of them",
        "",
        *proposed.table().lines(indent=""),
    ]
    train = shlex.join(["heterps", "train", *parameters])
    lines += ["", f"wrote {options.output}: check what stands under check, then", f"  {train}"]
    print("\n".join(lines))


def _write_toml(path: Path, schema: DataSchema, *, data: str) -> None:
    """Write a schema, each column in a line of its own, below the parameters of a training on its rows.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    import tomlkit

    document = tomlkit.document()
    parameters = tomlkit.table()
    parameters.comment("of heterps train; heterps train --help names all of them")
    parameters["data"] = data
    document[PARAMETERS_TABLE] = parameters
    described = tomlkit.table()
    described.comment("of these rows; a column in no list is not used")
    for name, value in schema.to_json().items():
        # TOML has no null, and an empty list says no more than none.
        if value is None or value in ([], {}):
            continue
        if isinstance(value, list) and len(value) > 2 and isinstance(value[0], str):
            lines = tomlkit.array().multiline(True)
            lines.extend(value)
            described[name] = lines
        else:
            described[name] = value
    document[SCHEMA_TABLE] = described
    try:
        path.write_text(tomlkit.dumps(document), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
