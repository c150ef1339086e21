"""An MLflow client whose writes never fail because the store does not answer.

Every write goes to the store where it answers. Where it does not, the write and all that follow wait in the outbox,
with the time at which they were made; a run that is created late is found by its tag if that is tried again.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.records.record_outbox import Outbox, Write, first_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, Run

OUTBOX_TAG = "heterps.outbox_id"
_PENDING_RUN = "outbox-"

_FAULTS = frozenset(
    {
        "BAD_REQUEST",
        "ENDPOINT_NOT_FOUND",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "MALFORMED_REQUEST",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_DOES_NOT_EXIST",
    }
)
"""MLflow's codes for a request that is wrong, and stays wrong."""

logger = logging.getLogger(__name__)


class BufferedMlflowClient:
    """An `MlflowClient` that writes later what cannot be written now; reads fail where the store does not answer."""

    def __init__(self, connect: Callable[[], MlflowClient], outbox: Outbox) -> None:
        self._connect = connect
        self._outbox = outbox
        self._connected: MlflowClient | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client(), name)

    def create_run(
        self, experiment_id: str, *, run_name: str | None = None, tags: Mapping[str, str] | None = None
    ) -> Run:
        """Create a run now, or later under an id that stands for it until then."""
        stand_in = f"{_PENDING_RUN}{uuid.uuid4().hex}"
        arguments = {
            "experiment_id": experiment_id,
            "run_name": run_name,
            "tags": dict(tags or {}),
            "start_time": int(time.time() * 1_000),
        }
        created = self._write("create_run", stand_in, **arguments)
        return _run_that_waits(stand_in, arguments) if created is None else created

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
        """Write figures and parameters."""
        figures = [[metric.key, metric.value, metric.timestamp, metric.step] for metric in metrics]
        self._write(
            "log_batch", run_id, metrics=figures, params=[[param.key, param.value] for param in params]
        )

    def set_tag(self, run_id: str, key: str, value: Any) -> None:
        """Write one tag."""
        self._write("set_tag", run_id, key=key, value=str(value))

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Write tags of a run."""
        for name, value in tags.items():
            self.set_tag(run_id, name, value)

    def set_experiment_tag(self, experiment_id: str, key: str, value: Any) -> None:
        """Write one tag of an experiment."""
        self._write("set_experiment_tag", experiment_id, key=key, value=str(value))

    def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
        """Give a run another status or name."""
        self._write("update_run", run_id, status=status, name=name)

    def set_terminated(self, run_id: str, status: str = "FINISHED") -> None:
        """End a run; its end is now, whenever that is delivered."""
        self._write("set_terminated", run_id, status=status, end_time=int(time.time() * 1_000))

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        """Keep a text with a run."""
        self._write("log_text", run_id, text=text, artifact_file=artifact_file)

    def log_dict(self, run_id: str, dictionary: Mapping[str, Any], artifact_file: str) -> None:
        """Keep a JSON document with a run."""
        self.log_text(run_id, json.dumps(dictionary, indent=2, default=str), artifact_file)

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        """Keep a copy of a file with a run."""
        self._write("log_artifact", run_id, local_path, artifact_path=artifact_path)

    def deliver(self) -> int:
        """Try to deliver what waits; return how many writes were done."""
        return 0 if self._outbox.is_empty else self._outbox.deliver(self._perform, is_passing=is_passing)

    def _write(self, call: str, run_id: str, path: str | None = None, /, **arguments: Any) -> Any:
        """Do a write, or keep it and return None."""
        write = Write(call=call, run_id=run_id, path=path, arguments=arguments)
        if not self._outbox.is_empty and self._outbox.is_due:
            self.deliver()
        if self._outbox.is_empty:
            try:
                return self._perform(write)
            except Exception as problem:
                if write.call != "create_run" and is_deleted(problem):
                    logger.warning(
                        "MLflow records nothing more of what was deleted there (%s)", first_line(problem)
                    )
                    return None
                if not is_passing(problem):
                    raise
                logger.warning(
                    "MLflow does not answer (%s); what is recorded waits in %s and is delivered later",
                    first_line(problem),
                    self._outbox.folder,
                )
                self._outbox.note_failure()
        self._outbox.keep(write)
        return None

    def _perform(self, write: Write) -> Any:
        client = self._client()
        if write.call == "create_run":
            return self._create(client, write)
        run_id = self._outbox.created_runs().get(write.run_id, write.run_id)
        arguments = dict(write.arguments)
        if write.call == "log_batch":
            from mlflow.entities import Metric, Param

            arguments["metrics"] = [Metric(*values) for values in arguments["metrics"]]
            arguments["params"] = [Param(*values) for values in arguments["params"]]
        paths = () if write.path is None else (write.path,)
        return getattr(client, write.call)(run_id, *paths, **arguments)

    def _create(self, client: MlflowClient, write: Write) -> Run:
        """Create a run, or find the one that an interrupted delivery has created."""
        arguments = dict(write.arguments)
        created = self._outbox.created_runs()
        arguments["tags"] = {name: created.get(value, value) for name, value in arguments["tags"].items()}
        if self._outbox.is_empty:
            return client.create_run(**arguments)
        found = client.search_runs(
            [arguments["experiment_id"]], filter_string=f"tags.`{OUTBOX_TAG}` = '{write.run_id}'"
        )
        arguments["tags"][OUTBOX_TAG] = write.run_id
        run = found[0] if found else client.create_run(**arguments)
        self._outbox.note_created(write.run_id, run.info.run_id)
        return run

    def _client(self) -> MlflowClient:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected


def is_passing(problem: Exception) -> bool:
    """Tell whether an error says that the store does not answer now, rather than that a request is wrong."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import OperationalError

    if isinstance(problem, MlflowException):
        return problem.error_code not in _FAULTS
    # What requests raises is an OSError; a file of ours that is not there is no matter of the store.
    return isinstance(problem, OSError | OperationalError) and not isinstance(problem, FileNotFoundError)


def is_deleted(problem: Exception) -> bool:
    """Tell whether an error says that what is asked for was deleted, as a person may do while it is written to."""
    from mlflow.exceptions import MlflowException

    if not isinstance(problem, MlflowException):
        return False
    return problem.error_code == "RESOURCE_DOES_NOT_EXIST" or "must be in the 'active' state" in str(problem)


def _run_that_waits(stand_in: str, arguments: Mapping[str, Any]) -> Run:
    from mlflow.entities import Run, RunData, RunInfo, RunTag

    info = RunInfo(
        run_id=stand_in,
        experiment_id=arguments["experiment_id"],
        user_id="",
        status="RUNNING",
        start_time=arguments["start_time"],
        end_time=None,
        lifecycle_stage="active",
        run_name=arguments["run_name"],
    )
    return Run(info, RunData(tags=[RunTag(name, value) for name, value in arguments["tags"].items()]))
