"""Which quota of an account an instance counts against.

EC2 counts vCPUs of running instances, by market and by group of families, in a whole region (AWS, EC2 user guide,
"Amazon EC2 service quotas"). A quota that is exhausted in one zone is exhausted in all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from heterps_core.hardware import InstanceOffer, Market
from heterps_core.plans.provisioning_plan import ProvisioningPlan

_STANDARD = "Standard (A, C, D, H, I, M, R, T, Z)"
_OTHER_GROUPS = {
    "f": "F",
    "g": "G and VT",
    "vt": "G and VT",
    "p": "P",
    "x": "X",
    "inf": "Inf",
    "trn": "Trn",
    "dl": "DL",
    "hpc": "HPC",
    "u": "High Memory",
}
"""Letters before a family's generation -> the group in a quota's name; all others are standard."""


def quota_of(offer: InstanceOffer) -> str:
    """Return the quota, as Service Quotas names it, that an offer's vCPUs count against.

    For instance "Running On-Demand G and VT instances" for a g4dn.xlarge on-demand.
    """
    letters = re.match(r"[a-z]*", offer.instance_type.family)
    group = _OTHER_GROUPS.get(letters[0] if letters else "", _STANDARD)
    if offer.market is Market.SPOT:
        return f"All {group} Spot Instance Requests"
    return f"Running On-Demand {group} instances"


def quotas_of(offers: Iterable[InstanceOffer]) -> tuple[str, ...]:
    """Return the quotas of several offers, each once, in their order."""
    return tuple(dict.fromkeys(quota_of(offer) for offer in offers))


def asks_less(plan: ProvisioningPlan, of: ProvisioningPlan, quotas: Iterable[str]) -> bool:
    """Tell whether a plan asks fewer vCPUs than another, or none, of each of some quotas."""
    ours, theirs = _vcpus(plan), _vcpus(of)
    return all(ours[quota] == 0 or ours[quota] < theirs[quota] for quota in quotas)


def _vcpus(plan: ProvisioningPlan) -> Counter[str]:
    counted: Counter[str] = Counter()
    for group in plan.groups:
        counted[quota_of(group.offer)] += group.count * group.offer.instance_type.vcpus
    return counted
