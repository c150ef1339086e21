"""Steps of the flows, one file each: unpack, call the core or infra, return."""

from __future__ import annotations

from typing import Any

REPEATABLE: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": [2, 10],
    # Where several fail together, they do not come back together.
    "retry_jitter_factor": 0.5,
}
"""Arguments for `@task` of those that only read, or whose second run leaves what the first would have: not a launch,
a training, a search or a registration. A record waits in the workspace for MLflow; boto3 tries calls of AWS again."""
