"""What a sweep did and what it could not do, machine by machine; the exit status of the sweep hangs on it."""

from __future__ import annotations

from dataclasses import dataclass

from heterps_core.errors import ProvisioningError
from infra.ledger.ledger_entry import EndReason


@dataclass(frozen=True, kw_only=True, slots=True)
class SweptMachine:
    """A machine that the sweep ended, or found gone, or could not end."""

    run_id: str
    node_id: str
    provider_instance_id: str
    reason: EndReason
    usd: float
    """That its run is charged for it in all; 0 where neither it nor the ledger tells a price."""

    problem: str | None = None
    """Why it is still there; None where it is gone."""

    unbooked: str | None = None
    """Why the ledger does not say that it is gone; the next sweep writes it down. None where it does."""

    def __str__(self) -> str:
        verb = "ended" if self.problem is None else "could not end"
        text = f"{verb} {self.provider_instance_id} of run {self.run_id}: {self.reason}, {self.usd:.6f} USD in all"
        if self.problem is not None:
            return f"{text}; left to the next sweep: {self.problem}"
        return text if self.unbooked is None else f"{text}; not written down: {self.unbooked}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What a sweep over several providers did."""

    machines: tuple[SweptMachine, ...]
    problems: tuple[str, ...]
    """Of providers that did not answer, and of a ledger that could not be used."""

    places: tuple[str, ...] = ()
    """Providers and regions that were looked at."""

    notes: tuple[str, ...] = ()
    """What else was done: a damaged ledger set aside."""

    def check_clean(self) -> None:
        """Check that every provider was swept, and that all ended that should, and was written down.

        Raises:
            ProvisioningError: Not so; names the machines that are left and the providers that did not answer.
        """
        machines = (str(m) for m in self.machines if m.problem is not None or m.unbooked is not None)
        if left := [*machines, *self.problems]:
            raise ProvisioningError("; ".join(left))
