"""What a worker says of another that died or does not answer."""

from __future__ import annotations

from heterps_core.errors import TrainingError
from heterps_core.transport.rank_layout import RankLayout

SILENCE_LIMIT_S = 20.0
"""Longest silence of a worker towards those who wait for a message of it, where no one says otherwise."""


class LostWorkerError(TrainingError):
    """A neighbour died or does not answer."""

    def __init__(self, *, rank: int, stage: int, replica: int, limit_s: float, has_ended: bool) -> None:
        observed = (
            "its connection broke, so its process has ended"
            if has_ended
            else "it is silent; its process or machine stands still, or the network between is down"
        )
        super().__init__(
            f"worker {rank} (stage {stage}, replica {replica}) must answer within {limit_s:.0f} s, but {observed}"
        )
        self.lost = (rank, stage, replica)

    @classmethod
    def at(cls, layout: RankLayout, rank: int, *, limit_s: float, has_ended: bool) -> LostWorkerError:
        """Return the error for a neighbour by its rank."""
        stage, replica = layout.position(rank)
        return cls(rank=rank, stage=stage, replica=replica, limit_s=limit_s, has_ended=has_ended)


def lost_worker(
    layout: RankLayout, rank: int, error: RuntimeError, *, silence_limit_s: float
) -> LostWorkerError:
    """Return what to say where a message of another worker did not come; `error` is gloo's."""
    return LostWorkerError.at(layout, rank, limit_s=silence_limit_s, has_ended="imed out" not in str(error))


def is_loss_of_another(error: BaseException) -> bool:
    """Tell whether an error, or one of those behind it, is gloo's: another worker died or was silent for too long."""
    seen: BaseException | None = error
    while seen is not None:
        if "gloo/transport" in str(seen) or "Connection closed by peer" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
