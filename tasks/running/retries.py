"""Which tasks are tried again, and how: those that only read, or whose second run leaves what the first would have.

Not a launch, a training, a search or a registration: a second one costs money or time, or writes a second record.
Writes to MLflow need none, as they wait in the outbox. Calls of AWS are tried again by boto3 itself; a task that
makes them is tried once more behind that, when the trouble of some seconds may be over.
"""

from __future__ import annotations

from typing import Any

REPEATABLE: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": [2, 10],
    # Where several fail together, they do not come back together.
    "retry_jitter_factor": 0.5,
}
"""Arguments for `@task`."""
