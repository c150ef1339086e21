"""Quotas of vCPUs: what counts against which, and what an account's quotas leave of plans.

EC2 counts vCPUs of running instances, by market and by group of families, in a whole region (Amazon EC2 user guide,
"Amazon EC2 service quotas"): what is exhausted in one zone is exhausted in all. Machines of others count, too.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.exceptions import ClientError

from heterps_core.device_types import get_device_type
from heterps_core.errors import ProvisioningError
from heterps_core.hardware import InstanceOffer, Market
from heterps_core.plans.provisioning_plan import ProvisioningPlan
from infra.providers.aws.errors import explained
from infra.providers.aws.queries import vcpus_in_use
from infra.providers.base import QuotaExceededError, UnitLimits

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

logger = logging.getLogger(__name__)


class Quota(NamedTuple):
    """A quota of Service Quotas."""

    name: str
    code: str
    least_vcpus: int
    """Of the smallest machine that plans buy."""

    def request(self, region: str, vcpus: int) -> str:
        """Return the command that asks AWS for so many vCPUs."""
        asked = f"request-service-quota-increase --service-code ec2 --quota-code {self.code}"
        return f"aws service-quotas {asked} --region {region} --desired-value {vcpus}"


def _both(group: str, on_demand: str, spot: str, least: int) -> dict[Market, Quota]:
    return {
        Market.ON_DEMAND: Quota(f"Running On-Demand {group} instances", on_demand, least),
        Market.SPOT: Quota(f"All {group} Spot Instance Requests", spot, least),
    }


STANDARD = _both("Standard (A, C, D, H, I, M, R, T, Z)", "L-1216C47A", "L-34B43A08", 2)
GRAPHICS = _both("G and VT", "L-DB2E81BA", "L-3819A6DF", 4)
_P_SPOT = Quota("All P4, P3 and P2 Spot Instance Requests", "L-7212CCBC", 96)
PARALLEL = {**_both("P", "L-417A185B", "", 16), Market.SPOT: _P_SPOT}
P5_SPOT = Quota("All P5 Spot Instance Requests", "L-C4BD4855", 16)
_GROUPS = {
    **dict.fromkeys(("a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"), STANDARD),
    **dict.fromkeys(("g", "gr", "vt"), GRAPHICS),
    "p": PARALLEL,
    "x": _both("X", "L-7295265B", "L-E3A00192", 4),
}
"""By the letters before a family's generation; inf, trn, hpc and others have quotas of their own."""


def quota_of(offer: InstanceOffer) -> Quota:
    """Return the quota that an offer's vCPUs count against."""
    return _quota_of(offer.instance_type.family, offer.market) or STANDARD[offer.market]


def _quota_of(family: str, market: Market) -> Quota | None:
    if market is Market.SPOT and family.startswith("p5"):
        return P5_SPOT
    letters = re.match(r"[a-z]*", family)
    group = _GROUPS.get(letters[0] if letters else "")
    return None if group is None else group[market]


def quotas_of(offers: Iterable[InstanceOffer]) -> tuple[str, ...]:
    """Return the names of the quotas of several offers, each once, in their order."""
    return tuple(dict.fromkeys(quota_of(offer).name for offer in offers))


def asks_less(plan: ProvisioningPlan, of: ProvisioningPlan, quotas: Iterable[str]) -> bool:
    """Tell whether a plan asks fewer vCPUs than another, or none, of each of some quotas."""
    ours, theirs = ({quota.name: vcpus for quota, vcpus in _vcpus(each).items()} for each in (plan, of))
    return all(ours.get(name, 0) == 0 or ours[name] < theirs.get(name, 0) for name in quotas)


def _vcpus(plan: ProvisioningPlan) -> Counter[Quota]:
    counted: Counter[Quota] = Counter()
    for group in plan.groups:
        if not group.offer.is_reserved:
            counted[quota_of(group.offer)] += group.count * group.offer.instance_type.vcpus
    return counted


class Quotas:
    """The quotas of an account in a region, each asked for once, and what running machines leave of them now.

    `make_client` returns boto3's client of Service Quotas, which few commands need. Where that is out of reach, as
    from a network without a way to it, all are unknown, and none is asked for again.
    """

    def __init__(self, make_client: Callable[[], Any], ec2: EC2Client) -> None:
        self._client = cache(make_client)
        self._ec2 = ec2
        self._vcpus_of: Callable[[Quota], float | None] = cache(self._ask)

    def _ask(self, quota: Quota) -> float | None:
        try:
            with explained("tell the account's quotas"):
                answer = self._client().get_service_quota(ServiceCode="ec2", QuotaCode=quota.code)
                return float(answer["Quota"]["Value"])
        except ProvisioningError as problem:
            if not isinstance(problem.__cause__, ClientError):
                self._vcpus_of = lambda _: None
                logger.warning("quotas of vCPUs are unknown; EC2 refuses a launch beyond them: %s", problem)
        return None

    def _left(self, quotas: Iterable[Quota]) -> dict[Quota, int]:
        """Return the vCPUs left of quotas, without those that AWS does not tell: EC2 refuses what is beyond them."""
        allowed = {quota: self._vcpus_of(quota) for quota in dict.fromkeys(quotas)}
        left = {quota: int(vcpus) for quota, vcpus in allowed.items() if vcpus is not None}
        try:
            with explained("tell the machines that run"):
                used = vcpus_in_use(self._ec2) if left else Counter()
        except ProvisioningError as problem:
            logger.warning("machines that run are not counted in quotas: %s", problem)
            return left
        for (family, market), vcpus in used.items():
            if (quota := _quota_of(family, market)) in left:
                left[quota] = max(left[quota] - vcpus, 0)
        return left

    def check(self, plan: ProvisioningPlan) -> None:
        """Check that a plan keeps within what is left of them.

        Raises:
            QuotaExceededError: It does not; names the first quota, and the command that asks for more.
        """
        asked = _vcpus(plan)
        for quota, left in self._left(asked).items():
            if asked[quota] > left:
                types = {group.device_type for group in plan.groups if quota_of(group.offer) == quota}
                allowed = self._vcpus_of(quota) or 0.0
                more = quota.request(self._ec2.meta.region_name, int(allowed) + asked[quota] - left)
                raise QuotaExceededError(
                    f"the plan must keep within the {left} of {allowed:g} vCPUs that running machines leave of the "
                    f"quota {quota.name}, and asks for {asked[quota]}; {more}, or plan with "
                    f"--device-types {' or '.join(sorted(types))} alone, or --markets on-demand spot",
                    quotas=(quota.name,),
                )

    def unit_limits(self, device_types: Iterable[str], offers: Iterable[InstanceOffer]) -> UnitLimits:
        """Return the most units of device types; see `Provider.unit_limits`."""
        sold: dict[str, dict[InstanceOffer, int]] = {}
        for name in device_types:
            hardware = get_device_type(name)
            units = {each: hardware.equal_units_of(each.instance_type) for each in offers}
            of_type = {each: n for each, n in units.items() if n and each.market is hardware.market}
            if of_type and not any(each.is_reserved for each in of_type):
                sold[name] = of_type
        left = self._left(quota_of(offer) for of_type in sold.values() for offer in of_type)
        limits: dict[str, int] = {}
        sharing: dict[str, set[str]] = defaultdict(set)
        for name, of_type in sold.items():
            if all(quota_of(offer) in left for offer in of_type):
                limits[name] = max(
                    left[quota_of(offer)] // offer.instance_type.vcpus * units
                    for offer, units in of_type.items()
                )
            for offer in of_type:
                sharing[quota_of(offer).name].add(name)
        text = "; ".join(f"{each.name} {vcpus} of {self._vcpus_of(each):g}" for each, vcpus in left.items())
        return UnitLimits(limits, sharing, text)
