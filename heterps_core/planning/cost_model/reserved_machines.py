"""Machines that are reserved or paid for already: a plan takes them first, at no price, and buys the rest.

A stage with k units on r of n reserved machines of u units each is charged for max(0, k - r u) bought ones. More
machines never raise that, so one stage alone takes all that it can use; stages share them where that saves most.

Shape legend: X = counts asked for, S = stages of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints


def allotted(prices: Sequence[Floats]) -> Ints:
    """Return how many of n machines each stage has at most so that their sum of prices is least, shape (S, X).

    Args:
        prices: Of each stage by the machines that it has; shape (n + 1, X), nowhere rising along the first axis.

    Example:
        >>> allotted([np.array([[5.0], [1.0], [0.0]]), np.array([[3.0], [1.0], [1.0]])]).ravel().tolist()
        [1, 1]
    """
    total, taken = prices[0], []
    for added in prices[1:]:
        sums = np.full((len(added), *added.shape), np.inf)
        for machines in range(len(added)):
            sums[machines, : machines + 1] = total[machines::-1] + added[: machines + 1]
        taken.append(sums.argmin(axis=1))
        total = sums.min(axis=1)
    left = np.full(total.shape[1], len(total) - 1)
    shares = []
    for of_stage in reversed(taken):
        shares.append(of_stage[left, np.arange(left.size)])
        left = left - shares[-1]
    return np.array([left, *reversed(shares)])


class ReservedMachines:
    """The reserved machines of a problem's device types.

    Args:
        names: Type index -> name; types with one name share its machines.
        prices: Type index -> prices of 0..max_units units by the machines that they have; (n + 1, max_units + 1).
    """

    def __init__(self, names: Mapping[int, str], prices: Mapping[int, Floats]) -> None:
        self.names, self.prices = names, prices

    def shares(self, types: Ints, num_replicas: Floats) -> Ints:
        """Return the machines that each stage of a plan has at most; types (S,), replicas and result (X, S)."""
        shares = np.zeros(num_replicas.shape, dtype=np.int64)
        names = [self.names.get(each, "") for each in types.tolist()]
        for name in {*names} - {""}:
            members = [index for index, each in enumerate(names) if each == name]
            prices = [self.prices[types[each]][:, num_replicas[:, each].astype(np.int64)] for each in members]
            shares[:, members] = allotted(prices).T
        return shares

    def added(self, types: Ints, num_replicas: Floats) -> Floats:
        """Return what plans pay as their stages share machines, above the sum of stages that each have all; (X,)."""
        added = np.zeros(len(num_replicas))
        if not self.names:
            return added
        shares = self.shares(types, num_replicas)
        for index, device_type in enumerate(types.tolist()):
            if (prices := self.prices.get(device_type)) is not None:
                units = num_replicas[:, index].astype(np.int64)
                added += prices[shares[:, index], units] - prices[-1, units]
        return added


NO_RESERVED = ReservedMachines({}, {})
