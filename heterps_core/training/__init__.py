"""The trainer: job, worker, loop, checkpoints, and how the flow follows it."""
