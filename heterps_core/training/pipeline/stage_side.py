"""One replica's side of the cut between its stage and a neighbouring one: whose rows are whose."""

from __future__ import annotations

from dataclasses import dataclass

from heterps_core.embeddings.row_range import RowRange
from heterps_core.training.pipeline.stage_exchange import Route, replica_slice, routes_to_neighbour
from heterps_core.transport.rank_layout import RankLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSide:
    """A replica, and the stage that it sends rows to or receives them from."""

    layout: RankLayout
    """Ranks of all stages."""

    stage: int
    replica: int
    neighbour: int
    """The stage on the other side."""

    def rank_of(self, peer: int) -> int:
        """Return the rank of a replica of the neighbour."""
        return self.layout.ranks[self.neighbour][peer]

    def slice_of(self, num_rows: int) -> RowRange:
        """Return this replica's rows of a micro-batch of `num_rows` rows."""
        return replica_slice(num_rows, len(self.layout.ranks[self.stage]), self.replica)

    def routes(self, num_rows: int) -> tuple[Route, ...]:
        """Return this replica's messages for a micro-batch of `num_rows` rows, in the order of peers."""
        return routes_to_neighbour(
            num_rows,
            num_replicas=len(self.layout.ranks[self.stage]),
            replica=self.replica,
            num_peer_replicas=len(self.layout.ranks[self.neighbour]),
        )
