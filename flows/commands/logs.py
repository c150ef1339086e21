"""Print the log of a run: the lines of its flow and of the workers of each node, by their times, each with where it
was said. Nodes that are rented hand their lines over when their workers end.

examples:
  heterps logs                        # of the run at work, or of the last
  heterps logs -f                     # goes on until the run has ended, or until Ctrl-C
  heterps logs 20261121-0430 | grep WARNING

exit status: 0; 2 where the run is not known, or left no log.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from contextlib import suppress

from flows.commands import RUN_HELP
from heterps_core.errors import ConfigurationError
from heterps_core.training.node.node_life import NODES
from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import Workspace
from tasks.running.run_log import FLOW_LOG

POLL_INTERVAL_S = 0.5
_PLACE_CHARACTERS = len("stage0-node0")
_TIME_CHARACTERS = len("2026-11-21 04:30:00,000")
_STARTS_WITH_TIME = re.compile(r"\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2},\d{3} ")
_NODE_LOGS = ("console.log", "workers.log")
"""Logs of a node's own process, where it runs on this machine, and of its workers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_id", nargs="?", default="latest", metavar="RUN", help=f"{RUN_HELP} (default)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on while the run lasts")


def run(options: argparse.Namespace) -> None:
    """Print the log, to its end so far or to that of the run."""
    from tasks.clusters import local_folder, nodes_folder
    from tasks.records.past_runs import past_trainings
    from tasks.records.run_ids import find_run, known_runs

    workspace = Workspace.locate()
    run_id = find_run(options.run_id, known_runs(workspace))
    here = local_folder(workspace, run_id)
    lines = _NewLines(here, nodes_folder(workspace, run_id))

    def goes_on() -> bool:
        running = past_trainings(workspace, most=1_000, status="RUNNING")
        return any(each.run_id == run_id and not each.end_reason for each in running)

    has_any, lasts = False, options.follow
    with suppress(KeyboardInterrupt):
        while True:
            # Asked first, so that no line before the end is missed.
            lasts = lasts and goes_on()
            for line in lines.read():
                has_any = True
                print(line)
            sys.stdout.flush()
            if not lasts:
                break
            time.sleep(POLL_INTERVAL_S)
        if not has_any:
            raise ConfigurationError(
                f"only a run that came to its data has a log, but {run_id} left none in {here.location}; "
                f"heterps runs says how it ended"
            )


class _NewLines:
    """Reads the new lines of the flow and of all nodes.

    Args:
        here: The run's folder of the workspace.
        nodes: Where its nodes write.
    """

    def __init__(self, here: RunDirectory, nodes: RunDirectory) -> None:
        self._here = here
        self._nodes = nodes
        self._num_read: dict[str, int] = {}

    def read(self) -> list[str]:
        """Return the new whole lines in the order of their times, each after the place where it was written."""
        found = [("flow", line) for line in self._lines(self._here, "", FLOW_LOG)]
        for node in self._nodes.names(NODES):
            found += [
                (node, line)
                for name in _NODE_LOGS
                for line in self._lines(self._nodes, f"{NODES}/{node}", name)
            ]
        timed, last = [], ""
        for place, line in found:
            # The lines of a traceback have no time of their own.
            last = line[:_TIME_CHARACTERS] if _STARTS_WITH_TIME.match(line) else last
            timed.append((last, f"{place:<{_PLACE_CHARACTERS}} {line}"))
        return [text for _, text in sorted(timed, key=lambda each: each[0])]

    def _lines(self, directory: RunDirectory, folder: str, name: str) -> list[str]:
        key = f"{folder}/{name}".lstrip("/")
        first, stop = self._num_read.get(key, 0), directory.file_sizes(folder).get(name, 0)
        if stop <= first:
            return []
        content = b"".join(part for _, part in directory.read_ranges(key, [(first, stop)]))
        whole = content[: content.rfind(b"\n") + 1]
        self._num_read[key] = first + len(whole)
        return whole.decode(errors="replace").splitlines()
