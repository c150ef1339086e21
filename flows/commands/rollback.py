"""Make the champion before the one of now champion again.

Its files are checked first, against the hash that they were registered with. A load of models:/ctr@champion gets
it from then on, and the next night goes on from it. Given again, it goes one champion further back; --to leads to any
version that was champion, also forward again, and --to none to where there is no champion: the next model is judged
as the first then. The version that was rolled back is not promoted again by itself.

examples:
  heterps rollback
  heterps rollback --to 12
  heterps rollback --to none
  heterps rollback --json

exit status: 0; 2 where there is no champion before this one, or VERSION was never champion; 6 where the files of the
version to go back to were changed or damaged, and nothing was done.
"""

from __future__ import annotations

import argparse
import json

from infra.workspace import Workspace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--to", metavar="VERSION", help="that was champion, or none (default: the one before)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Roll back."""
    from tasks.records.champion import roll_back

    done = roll_back(Workspace.locate(), to=options.to)
    if options.json:
        document = {
            "from_version": done.from_version,
            "to_version": done.to and done.to.version,
            "run_id": done.to and done.to.run_id,
        }
        print(json.dumps(document, indent=2))
    elif done.to is None:
        print(f"there is no champion now; it was version {done.from_version}")
    else:
        day = f" on {done.to.day}" if done.to.day else ""
        print(
            f"champion is version {done.to.version} again, trained by run {done.to.run_id}{day}; "
            f"it was version {done.from_version}"
        )
