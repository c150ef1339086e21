"""What a user runs: each flow reads like a table of contents of the steps in `tasks`.

Prefect copies the lines of the project's loggers into the log of the flow run (PREFECT_LOGGING_EXTRA_LOGGERS), but it
leaves their level at that of the root, which is WARNING. Every process of a flow comes by here.
"""

import logging
import os

# Prefect decides on telemetry while it is imported, before a flow is connected to its server.
os.environ.setdefault("DO_NOT_TRACK", "1")

PROJECT_LOGGERS = ("heterps_core", "infra", "tasks")

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""

for _name in PROJECT_LOGGERS:
    logging.getLogger(_name).setLevel(logging.INFO)
