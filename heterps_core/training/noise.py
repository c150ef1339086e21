"""The seed of what layers draw while they train, such as the masks of dropout.

Each step begins with a seed of its own, so that a run that is resumed at a checkpoint draws what it would have drawn
without the break. Within a step a stage runs the forward passes of its micro-batches in order, whatever the pipeline
schedule, and never runs one twice, so the seed fixes all masks of the step. Replicas see different rows and draw
different masks; a plan with another cut or other replicas draws others too.
"""

from __future__ import annotations

import numpy as np


def noise_seed(seed: int, *, step: int, stage: int, replica: int) -> int:
    """Return the seed for the layers of one replica in one step, in 0..2**64 - 1.

    Args:
        seed: Of the run.
        step: From 0.
        stage, replica: Whose layers they are.
    """
    sequence = np.random.SeedSequence([seed, step, stage, replica])
    return int(sequence.generate_state(1, np.uint64)[0])
