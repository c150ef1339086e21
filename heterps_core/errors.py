"""The exceptions that HeterPS raises on purpose, as one tree.

HeterpsError
|-- ConfigurationError            a parameter, file or name that the user gave cannot be used
|   |-- UnknownNameError          a name that is in no registry; the message lists known ones
|   |-- MalformedDocumentError     a problem, or another JSON document, breaks its contract; carries the field
|   `-- LedgerError               the ledger of machines cannot be read or written
|-- DataError                     training data that cannot be read; carries file and line
|   `-- OtherColumnsError         rows lack a column that a model needs, or hold something else in it
|-- InfeasiblePlanError           no plan meets the constraints; carries the constraint and the shortfall
|-- BudgetExceededError           a plan or run would cost more than a cap allows
|-- ProvisioningError             no machines are available, or an offer does not exist
|   `-- LiveFleetError            another run of the workspace has machines alive
|-- TrainingError                 a worker failed; carries rank, stage and last step where known
|   `-- RunStoppedError           a training was stopped as a person asked
`-- CheckpointError               a checkpoint could not be written or read

Every message says the rule that was broken, the values that broke it, and the fix. The command
line prints the message alone, without a traceback, and exits with `exit_status`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NUM_NEAREST = 3


class HeterpsError(Exception):
    """Base of all errors that a user can cause and fix."""

    exit_status = 1


class ConfigurationError(HeterpsError):
    """A parameter, file or name that the user gave cannot be used."""

    exit_status = 2


class UnknownNameError(ConfigurationError):
    """A name that stands in no registry.

    Args:
        way_out: A sentence for the end.
        command: Shows the known names, where these are too many for one line: the nearest ones are named then.
    """

    def __init__(
        self, family: str, name: str, known: Iterable[str], *, way_out: str = "", command: str = ""
    ) -> None:
        known_names = sorted(known)
        near = difflib.get_close_matches(name, known_names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        listed = f"known are: {', '.join(known_names)}." if known_names else "there is none yet."
        if command:
            nearest = difflib.get_close_matches(name, known_names, n=_NUM_NEAREST, cutoff=0.0)
            listed = f"near are: {', '.join(nearest)}; {command} shows all {len(known_names)}."
        super().__init__(f"{name!r} is not a known {family}; {listed}{hint}{way_out and f' {way_out}'}")
        self.family = family
        self.name = name
        self.known = known_names


class MalformedDocumentError(ConfigurationError):
    """A JSON document, for instance a planning problem, that breaks its contract."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class LedgerError(ConfigurationError):
    """The ledger of machines cannot be read or written: damaged, held by another process, or its disk is full."""


class DataError(HeterpsError):
    """Training data that cannot be read."""

    exit_status = 2

    def __init__(self, path: object, problem: str, *, line: int | None = None) -> None:
        place = f"{path}, line {line}" if line is not None else f"{path}"
        super().__init__(f"{place}: {problem}")
        self.path = str(path)
        self.problem = problem
        self.line = line


class OtherColumnsError(DataError):
    """Rows lack a column that a model needs, or hold something in it that the model cannot read."""


class InfeasiblePlanError(HeterpsError):
    """No plan meets all constraints."""

    exit_status = 3

    def __init__(self, constraint: str, detail: str) -> None:
        super().__init__(f"no plan meets the {constraint}: {detail}")
        self.constraint = constraint


class BudgetExceededError(HeterpsError):
    """A plan or run would cost more than a cap allows; nothing was launched."""

    exit_status = 4


class ProvisioningError(HeterpsError):
    """No machines are available, or no offer carries what the plan asks for."""

    exit_status = 5


class LiveFleetError(ProvisioningError):
    """Another run of the workspace has machines alive; nothing was launched."""


class TrainingError(HeterpsError):
    """A training worker failed."""

    exit_status = 6


class RunStoppedError(TrainingError):
    """A training was stopped as a person asked; nothing failed."""


class CheckpointError(TrainingError):
    """A checkpoint could not be written or read; earlier complete ones stay as they are."""
