"""This very machine as a home: its cores and cards train what was planned for them."""

from __future__ import annotations

from typing import ClassVar, Self

import psutil

from heterps_core.machine import card_names, num_cores
from infra.inventory import HERE, MachineKind
from infra.providers.local import LocalProvider
from infra.workspace import Workspace

_WEEK_S = 7 * 24 * 3600
_NETWORK_GBIT_PER_S = 1000.0
"""Bandwidth of the memory that stages share: no bound, as its copies take the cores' time."""


class HereProvider(LocalProvider):
    """Runs each node on the cores or cards that it is planned for."""

    name: ClassVar[str] = HERE
    is_dry_run: ClassVar[bool] = False
    has_inventory: ClassVar[bool] = True
    machines_text: ClassVar[str] = "this machine"
    lifetime_s: ClassVar[int] = _WEEK_S

    @classmethod
    def for_workspace(cls, workspace: Workspace, *, region: str) -> Self:
        """Make the provider of its own leases; see `Provider.for_workspace`."""
        return cls(workspace.leases_directory.with_name("leases_here"))

    @classmethod
    def found_machines(cls, workspace: Workspace) -> tuple[MachineKind, ...]:
        """Return this machine; see `Provider.found_machines`."""
        cards = card_names()
        folder = next(path for path in (workspace.root, *workspace.root.parents) if path.exists())
        return (
            MachineKind(
                kind=HERE,
                home=HERE,
                count=1,
                cores=num_cores(),
                memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
                cards=len(cards),
                card=cards[0] if cards else "",
                disk_gb=round(psutil.disk_usage(str(folder)).free / 1e9),
                network_gbit_per_s=_NETWORK_GBIT_PER_S,
                price_usd_per_hour=0.0,
            ),
        )
