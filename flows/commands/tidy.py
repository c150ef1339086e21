"""Delete files of runs that ended more than --keep-days ago, and older versions of the model that are no longer
needed.

Runs: the folder in the workspace, and of rented machines what is in the run store that HETERPS_RUN_STORE names. A
run that is under way by the record of runs, the ledger or the lock of the fleet keeps all its files, and so does a
folder of which neither record nor ledger knows. A run that failed can be resumed until it is tidied.
Versions: registry entry and files both, but never one that has an alias (champion, challenger, your own), that a run
under way began with, that plain `heterps rollback` leads to, that was champion or was rolled back within --keep-days,
the last champion before that (a day that is trained again goes on from it), or the newest of a model.
Sorted events of histories: those that no night and no prediction has used for --keep-days.
What `heterps runs`, `cost`, `explain` and the pages of the nights show stays, and the ledger is never touched.

examples:
  heterps tidy --dry-run
  heterps tidy --keep-days 90
  heterps tidy --json | jq '.kinds[] | [.kind, .removed_bytes]'
  30 12 * * * HETERPS_HOME=/var/lib/heterps /srv/heterps/.venv/bin/heterps tidy     # in a crontab

exit status: 0, also where there was nothing to do; 1 where something could not be deleted or looked at, the rest is
done; 2 where the record of runs does not answer, and nothing was deleted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from flows.commands import whole_number
from heterps_core.errors import HeterpsError
from infra.workspace import Workspace

if TYPE_CHECKING:
    from tasks.running.tidying import Tidied


_DEFAULT_KEEP_DAYS = 30
_MOST_KEEP_DAYS = 36_500

SHOWN = 3
"""Names that a line tells; more are counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--keep-days",
        type=whole_number(_MOST_KEEP_DAYS),
        default=_DEFAULT_KEEP_DAYS,
        metavar="N",
        help="keep what is younger (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="delete nothing; print what would be")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Tidy the workspace."""
    from tasks.records.old_versions import tidy_copies, tidy_versions
    from tasks.running.tidying import tidy_events, tidy_runs

    workspace = Workspace.locate()
    before = datetime.now(UTC) - timedelta(days=options.keep_days)
    is_trial = options.dry_run
    runs = tidy_runs(workspace, ended_before=before, is_trial=is_trial)
    versions = tidy_versions(workspace, registered_before=before, is_trial=is_trial)
    copies = tidy_copies(workspace, versions=versions.kept, is_trial=is_trial)
    events = tidy_events(workspace, used_before=before, is_trial=is_trial)
    done = [runs, versions, *(tidied for tidied in (copies, events) if tidied.removed)]
    if options.json:
        document = {
            "keep_days": options.keep_days,
            "is_dry_run": is_trial,
            "kinds": [_as_json(tidied) for tidied in done],
        }
        print(json.dumps(document, indent=2), flush=True)
    else:
        print("\n".join(line for tidied in done for line in _lines(tidied, is_trial=is_trial)), flush=True)
    problems = [problem for tidied in done for problem in tidied.problems]
    if problems:
        raise HeterpsError("; ".join(problems))


def _lines(tidied: Tidied, *, is_trial: bool) -> Iterator[str]:
    yield (
        f"{tidied.kind}: {'would remove' if is_trial else 'removed'} {_named(list(tidied.removed))}, "
        f"{_num_bytes(tidied) / 1e6:,.1f} MB"
    )
    by_why: dict[str, list[str]] = {}
    for name, why in tidied.kept.items():
        by_why.setdefault(why, []).append(name)
    for why, kept_names in by_why.items():
        yield f"  kept {_named(kept_names)}: {why}"


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if 0 < len(names) <= SHOWN else str(len(names))


def _as_json(tidied: Tidied) -> dict[str, Any]:
    return {
        "kind": tidied.kind,
        "removed": [{"name": name, "bytes": num_bytes} for name, num_bytes in tidied.removed.items()],
        "removed_count": len(tidied.removed),
        "removed_bytes": _num_bytes(tidied),
        "kept": [{"name": name, "why": why} for name, why in tidied.kept.items()],
        "problems": list(tidied.problems),
    }


def _num_bytes(tidied: Tidied) -> int:
    return sum(tidied.removed.values())
