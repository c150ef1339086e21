"""The trained model and the one that training began with, judged on the held-out rows where the workers are.

Each worker of the last stage predicts its rows, and all of them judge the labels and logits of all. The model that
training began with takes the place of the trained one in the same layers, so no more memory is needed: the trained
one stands in the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from heterps_core.data.batch import ClickBatch
from heterps_core.judging.held_out import HeldOutJudgement, HeldOutScores, judge_held_out
from heterps_core.training.job import StartModel
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.replica_batches import BatchFeed
from heterps_core.training.start_model import load_start_weights
from heterps_core.transport.json_messages import gather_bytes


def judge_trained(loop: TrainingLoop, start: StartModel | None) -> dict[str, HeldOutJudgement]:
    """Judge the model of a loop by each label; by the first beside the model that its training began with.

    Every worker takes part. Afterwards the layers hold the weights of that model.

    Returns:
        Judgements by the columns of the labels, on the workers of the last stage; none elsewhere, and where no row is
        held out.

    Raises:
        CheckpointError: The start model cannot be read any more.
    """
    if not loop.dataset.num_eval_rows:
        return {}
    labels = loop.dataset.manifest.schema.labels
    trained, started = _scores(loop, num_labels=len(labels)), None
    if start is not None:
        # Replicas read one another's rows: none may be exchanged before all have predicted, nor read before all are.
        dist.barrier()
        load_start_weights(loop.run, start, loop.model)
        dist.barrier()
        (started,) = _scores(loop, num_labels=1)
    if not loop.runner.is_last:
        return {}

    others = (started, *(None for _ in labels[1:]))
    return {
        name: judge_held_out(scores, other, gather=partial(_gather, group=loop.place.group))
        for name, scores, other in zip(labels, trained, others, strict=True)
    }


def predict_held_out(loop: TrainingLoop) -> Iterator[tuple[ClickBatch, npt.NDArray[np.float32]]]:
    """Yield the held-out rows that this replica of the last stage predicts, some at a time, and their logits.

    These are corrected for rows that are left out of training.
    All workers must go through it at once; those of other stages yield nothing.
    """
    num_batches = -(-loop.dataset.num_eval_rows // loop.config.batch_size)
    with loop.batches.swept(map(loop.batches.held_out_batch, range(num_batches)), writes=False) as source:
        for _, microbatches in BatchFeed(lambda _: source.next_batch(), range(num_batches)):
            logits = loop.runner.predict(microbatches)
            source.finish_step()
            if loop.runner.is_last:
                logits += loop.dataset.manifest.schema.logit_shift
                parts = [microbatch.batch for microbatch in microbatches]
                firsts = accumulate((part.num_rows for part in parts), initial=0)
                for part, first in zip(parts, firsts, strict=False):
                    yield part, logits[first : first + part.num_rows].numpy()
    source.close()


def _gather(array: npt.NDArray[Any], *, group: dist.ProcessGroup | None) -> npt.NDArray[Any]:
    """Return the arrays [n] of a group's members one after the other."""
    if group is None:
        return array
    found = gather_bytes(torch.from_numpy(array.view(np.uint8)), group)
    return np.concatenate([part.numpy().view(array.dtype) for part in found])


def _scores(loop: TrainingLoop, *, num_labels: int) -> list[HeldOutScores]:
    """Return the model's scores of each of the first labels."""
    scores = [HeldOutScores(loop.dataset.num_eval_rows) for _ in range(num_labels)]
    for batch, logits in predict_held_out(loop):
        weights = None if batch.weights is None else batch.weights.cpu().numpy()
        labels = np.atleast_2d(batch.labels.cpu().numpy().T)
        for of_label, some_labels, some_logits in zip(scores, labels, np.atleast_2d(logits.T), strict=False):
            of_label.add(some_labels, some_logits, weights)
    return scores
