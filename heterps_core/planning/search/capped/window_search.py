"""Better partitions of a chain within the caps, found by dividing windows of neighbouring stages again and again.

Inside a window all partitions are compared by dynamic programming, with what exceeds a cap charged by weights. A type
that occurs twice in a window is charged for each stage alone, so what is found is priced once more before it is
taken. Weights of types that stay above their caps rise and those of others fall, as in guided local search (Voudouris
and Tsang, Eur. J. Oper. Res. 113, 1999): the search walks along the border of what the caps allow.

Shape legend: L = layers, T = device types, n = layers of a window.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from heterps_core.planning.cost_model.arrays import Floats, Ints
from heterps_core.planning.search.capped.capped_chain import CappedChain

_WINDOW_LAYERS = 5, 10, 16
"""One of them is drawn for a sweep: windows have at least so many layers, and two stages."""

_RAISED, _LOWERED, _NOISE = 1.3, 0.9, 0.1
"""What weights are multiplied with where a sweep ends above the caps and within them."""

_Plan = list[tuple[int, int, int]]
"""First layer, last layer and type of each stage, in order."""


class WindowSearch:
    """Walks over the partitions of one chain."""

    def __init__(self, chain: CappedChain, random: np.random.Generator) -> None:
        self.chain, self.random = chain, random
        shape = (chain.num_layers, chain.num_layers, chain.num_types)
        self.index = chain.firsts, chain.lasts, chain.types
        self.units, self.charged = np.full(shape, np.inf), np.full(shape, np.inf)
        self.units[self.index] = chain.units
        self.positions = np.full(shape, -1)
        self.positions[self.index] = np.arange(chain.rows.size)
        self.caps = chain.caps[: chain.num_types]
        self.weights = np.ones(chain.num_types)
        self._free = np.zeros((chain.num_types, chain.num_types))

    def partitions(self, stages: Ints, scarcity: Floats, num_sweeps: int) -> Iterator[Ints]:
        """Yield partitions within the caps, each cheaper than the one before, as positions in the chain.

        It begins with the stages at some positions, first stage first, which may break caps, and with prices of
        scarce units of shape (R,).
        """
        chain, num_types = self.chain, self.chain.num_types
        index = (places[stages].tolist() for places in self.index)
        plan: _Plan = list(zip(*index, strict=True))
        used, best_price = chain.used(stages), np.inf
        of_all = np.append(np.full(num_types, used[:num_types].sum()), np.maximum(used[num_types:], 1e-3))
        usual = chain.price(stages) / of_all
        weights = np.maximum(scarcity, 0.1 * usual)
        for _ in range(num_sweeps):
            self.weights = weights[:num_types]
            # What further resources cost is added up over stages, whether or not they are scarce.
            self.charged[self.index] = chain.prices + weights[num_types:] @ chain.further
            plan = self._swept(plan)
            stages = np.array([self.positions[stage] for stage in plan])
            is_over = chain.used(stages) > chain.caps
            if not is_over.any() and (price := chain.price(stages)) < best_price:
                best_price = price
                yield stages
            weights = weights * np.where(is_over, _RAISED, _LOWERED)
            weights *= np.exp(self.random.normal(0.0, _NOISE, weights.size))
            weights = np.maximum(weights, 1e-3 * usual)

    def _swept(self, plan: _Plan) -> _Plan:
        """Return the plan after its windows were divided again, from first to last."""
        position, end = 0, 0
        num_layers = int(self.random.choice(_WINDOW_LAYERS))
        while end < len(plan):
            end = position + 1
            while end < len(plan) and (
                end - position < 2 or plan[end - 1][1] - plan[position][0] + 1 < num_layers
            ):
                end += 1
            window = self._divided(plan, position, end)
            if window is not None:
                plan = plan[:position] + window + plan[end:]
                end = position + len(window)
            position += 1
        return plan

    def _divided(self, plan: _Plan, start: int, end: int) -> _Plan | None:
        """Return the best stages for the layers of plan[start:end], None where it has them."""
        chain, window = self.chain, plan[start:end]
        first, size = window[0][0], window[-1][1] - window[0][0] + 1
        before = plan[start - 1][2] if start else -1
        after = plan[end][2] if end < len(plan) else -1
        outside = self._used(plan[:start] + plan[end:])
        units = self.units[first : first + size, first : first + size]
        over_outside = np.maximum(outside - self.caps, 0.0)
        charged = np.maximum(units + (outside - self.caps), 0.0) - over_outside
        charged *= self.weights
        charged += self.charged[first : first + size, first : first + size]
        entered = np.full((size + 1, chain.num_types), np.inf)
        entered[0] = self._change(first)[before] if before >= 0 else 0.0
        begun, come_from = [], []
        for last in range(size):
            totals = entered[: last + 1] + charged[: last + 1, last]
            begun.append(totals.argmin(axis=0))
            ending = totals.min(axis=0)
            if last + 1 < size:
                arriving = ending[:, None] + self._change(first + last + 1)
                come_from.append(arriving.argmin(axis=0))
                entered[last + 1] = arriving.min(axis=0)
        if after >= 0:
            ending = ending + self._change(first + size)[:, after]
        found: _Plan = []
        last, device_type = size - 1, int(ending.argmin())
        if not np.isfinite(ending[device_type]):
            return None
        while True:
            begin = int(begun[last][device_type])
            found.append((first + begin, first + last, device_type))
            if begin == 0:
                break
            last, device_type = begin - 1, int(come_from[begin - 1][device_type])
        found.reverse()
        if found == window:
            return None
        return found if self._charge(found, outside) < self._charge(window, outside) - 1e-12 else None

    def _charge(self, window: _Plan, outside: Floats) -> float:
        """Return what a window is charged with the plan around it."""
        over = np.maximum(outside + self._used(window) - self.caps, 0.0)
        return sum(float(self.charged[stage]) for stage in window) + float(self.weights @ over)

    def _used(self, plan: _Plan) -> Floats:
        used = np.zeros(self.chain.num_types)
        for stage in plan:
            used[stage[2]] += self.units[stage]
        return used

    def _change(self, layer: int) -> Floats:
        """Return the price of a boundary before a layer, shape (T, T)."""
        return self._free if self.chain.change_prices is None else self.chain.change_prices[layer]
