"""What a user runs: each flow reads like a table of contents of the steps in `tasks`.

Prefect copies the lines of the project's loggers into the log of the flow run (PREFECT_LOGGING_EXTRA_LOGGERS), but it
leaves their level at that of the root, which is WARNING. Every process of a flow comes by here.

Prefect logs whatever a flow or task raises with its traceback. An error of ours is one line that says the rule
and the way out, so its traceback is left out there; that of a defect stays.
"""

import logging
import os
import warnings

from heterps_core.core_use import ONE_CORE, THREADS_VARIABLE
from heterps_core.errors import HeterpsError
from infra.loopback_guard import keep_loopback_from_proxies

# Prefect decides on telemetry while it is imported, before a flow is connected to its server.
os.environ.setdefault("DO_NOT_TRACK", "1")
# Who sets another number keeps it.
os.environ.setdefault(THREADS_VARIABLE, ONE_CORE)
# It also makes its folder in the home of a user, which it does not need: its own is in the workspace.
warnings.filterwarnings("ignore", message="Failed to create the Prefect home directory")

# Children inherit it: servers, flow runs and nodes.
keep_loopback_from_proxies()

PROJECT_LOGGERS = ("heterps_core", "infra", "tasks")

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""

for _name in PROJECT_LOGGERS:
    logging.getLogger(_name).setLevel(logging.INFO)


def _one_line_for_our_errors(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HeterpsError):
        record.exc_info, record.args, record.msg = None, None, f"{type(error).__name__}: {error}"
    return True


for _name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_name).addFilter(_one_line_for_our_errors)
