"""An account as the doctor asks it: clients, settings, and answers that several questions need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from heterps_core.hardware import ARCHITECTURES
from infra.checks import Check, CheckState, tried
from infra.providers.aws.errors import explained
from infra.providers.aws.launch import MachineSettings
from infra.providers.aws.queries import Network, find_images, find_network

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import ImageTypeDef

PROBE = "heterps-doctor"
"""The run id of what the doctor makes and deletes."""

_DENIED = ("AccessDenied", "UnauthorizedOperation", "AccessDeniedException", "403")


@dataclass(kw_only=True)
class Account:
    """One region of an account."""

    client_of: Callable[[str], Any]
    """Returns boto3's client of a service, the same one each time."""

    machines: MachineSettings
    ec2: Any = field(init=False)
    region: str = field(init=False)

    def __post_init__(self) -> None:
        self.ec2 = self.client_of("ec2")
        self.region = self.ec2.meta.region_name

    @cached_property
    def network(self) -> Network:
        """The network of a launch; raises as `find_network`."""
        return find_network(self.ec2, self.machines.subnet_ids)

    @cached_property
    def images(self) -> dict[str, ImageTypeDef]:
        """The images of a launch by architecture, that of x86 first."""
        found = find_images(self.ec2, self.machines.image_ids)
        return {name: found[name] for name in ARCHITECTURES if name in found}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked of an account."""

    what: str
    ask: Callable[[Account], object]
    """Returns what was found; raises a `HeterpsError` that ends with the way out."""

    worst: CheckState = CheckState.MISSING
    """NOTE where a night succeeds all the same, and costs more."""

    is_right: bool = False
    """A night needs the right to ask; else the doctor alone does."""

    def check(self, account: Account) -> Check:
        """Ask, and return the answer as a check."""
        found = tried(self.what, explained(f"answer the check {self.what!r}")(lambda: self.ask(account)))
        is_denied = not self.is_right and any(f": {code}: " in found.found for code in _DENIED)
        is_note = found.state is not CheckState.OK and (is_denied or self.worst is CheckState.NOTE)
        return replace(found, state=CheckState.NOTE) if is_note else found
