"""The log of a run's flow, kept beside the run, and where the run stands by it and by its steps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from heterps_core.training.step_metrics import read_progress
from heterps_core.training.storage.run_directory import CLUSTER, JOB, RunDirectory
from heterps_core.training.storage.verified_files import read_unverified_json
from infra.workspace import Workspace
from tasks.running import progress
from tasks.running.progress import JUDGING, LAUNCHING, PHASE_AFTER, RECORDING

FLOW_LOG = "flow.log"
"""In a run's folder of the workspace, whatever its machines are."""

_LINES = "%(asctime)s %(name)s %(levelname)s %(message)s"
"""As the workers of a node write theirs."""

_STEP = re.compile(rf"^\S+ \S+ {re.escape(progress.__name__)} INFO   (\S+)", re.MULTILINE)


@contextmanager
def kept_log(workspace: Workspace, run_id: str, *, loggers: Sequence[str]) -> Iterator[None]:
    """Append the lines of some loggers while the block runs, and the error that ends it, to the run's log.

    Raises:
        OSError: The folder cannot be written.
    """
    folder = workspace.run_folder(run_id)
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / FLOW_LOG)
    handler.setFormatter(logging.Formatter(_LINES))
    for name in loggers:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        handler.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, said, None, None))
        raise
    finally:
        for name in loggers:
            logging.getLogger(name).removeHandler(handler)
        handler.close()


def state_of(workspace: Workspace, run_id: str, directory: RunDirectory) -> dict[str, Any]:
    """Return the state of a run from its log and from the progress that its workers write.

    Args:
        directory: Where the flow's host and its nodes meet.

    Returns:
        `phase`; `step` of `num_steps`, mean `samples_per_s` of this launch and `seconds_left` of the training at this
        speed, each None before its first step.
    """
    path = workspace.run_folder(run_id) / FLOW_LOG
    text = path.read_text(errors="replace") if path.exists() else ""
    steps = [step for step in _STEP.findall(text) if step in PHASE_AFTER]
    phase = PHASE_AFTER[steps[-1]] if steps else "starting"
    # A run that is planned again has steps of the launch before, but no cluster yet.
    has_trained = phase in (JUDGING, RECORDING) or (phase == LAUNCHING and directory.exists(CLUSTER))
    state = {"phase": phase, **dict.fromkeys(("step", "num_steps", "samples_per_s", "seconds_left"))}
    found = read_progress(directory) if has_trained else None
    if found is None:
        return state
    speed = found.num_samples / found.elapsed_s if found.elapsed_s > 0 else None
    state |= {"step": found.step, "num_steps": found.num_steps, "samples_per_s": speed}
    if phase == LAUNCHING:
        state["phase"] = found.phase
        if speed:
            batch_size = read_unverified_json(directory, JOB)["config"]["batch_size"]
            state["seconds_left"] = (found.num_steps - found.step) * batch_size / speed
    return state
