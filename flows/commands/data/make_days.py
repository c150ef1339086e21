"""Write synthetic clicks in the Criteo format, a folder day=YYYY-MM-DD for each day, for train-ctr and backfill-ctr.

What makes people click moves slowly from day to day, and new ids appear, so that a model which goes on every night
beats one that was trained once. The true click probability of every row is known; best AUC and log-loss are what
the truth itself reaches, and no model does better but by luck. The same seed goes on where an earlier call ended.

With --listens they are listens to music instead, as Parquet: item, artist, album, and histories of each user, which
FOLDER.schema.toml joins by pointer. Nearly all that can be known of a listen stands in the 32 before it. Users begin
on the first day, so one call writes all days.

examples:
  heterps make-days clicks --first-day 2026-11-01 --num-days 8
  heterps make-days clicks --first-day 2026-11-01 --num-days 31 --rows-per-day 100000
  heterps make-days listens --first-day 2026-11-01 --num-days 8 --listens
  heterps train --data listens --schema-file listens.schema.toml --model hstu
  python -m flows.train_ctr --data clicks --day 2026-11-01
  python -m flows.backfill_ctr --data clicks --first-day 2026-11-02 --last-day 2026-11-07

exit status: 0 when all days are written; 2 where an argument cannot be used or a file not be written.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path

from heterps_core.data.reading.days import parse_day
from heterps_core.text_table import Table

DEFAULT_ROWS_PER_DAY = 50_000
COLUMNS = {"day": "", "rows": ",d", "best AUC": ".4f", "best log-loss": ".4f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it is not there")
    parser.add_argument("--first-day", required=True, metavar="YYYY-MM-DD", help="first day to write")
    parser.add_argument("--num-days", type=int, default=8, metavar="N", help="days to write (default: 8)")
    parser.add_argument(
        "--rows-per-day",
        type=int,
        default=DEFAULT_ROWS_PER_DAY,
        metavar="N",
        help=f"rows of each day (default: {DEFAULT_ROWS_PER_DAY:,})",
    )
    parser.add_argument(
        "--listens", action="store_true", help="listens with histories, for models of sequences"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides all rows (default: 0)")


def run(options: argparse.Namespace) -> None:
    """Write the days and print what each of them can be predicted with at best."""
    from heterps_core.data.synthetic.click_stream import write_click_days
    from heterps_core.data.synthetic.listens import write_listen_days

    first_day = parse_day(options.first_day)
    wanted = {
        "first_day": first_day,
        "num_days": options.num_days,
        "rows_per_day": options.rows_per_day,
        "seed": options.seed,
    }
    if options.listens:
        best_of_days = write_listen_days(options.folder, **wanted)
    else:
        best_of_days = tuple(each.best_reachable() for each in write_click_days(options.folder, **wanted))
    qualities = [(first_day + timedelta(days=number), best) for number, best in enumerate(best_of_days)]
    rows = [(str(day), best.num_rows, best.auc, best.log_loss) for day, best in qualities]
    print("\n".join(Table(columns=COLUMNS, rows=rows).lines(indent="")))
