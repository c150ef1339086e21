"""How many cores compiled loops of our processes take: one for each thread, the main thread as many as it asks for.

OpenMP gives each thread that runs a loop helpers of its own, by default on all cores. Beside threads that read,
exchange or write, and beside other processes, helpers wait for cores that others have: of a search of parameters on
two busy cores 2 trials ended in 40 s by default, and 28 with one core for each thread. The main thread of a process
asks torch for more where its work has use for them (`torch.set_num_threads`).
"""

from __future__ import annotations

THREADS_VARIABLE, ONE_CORE = "OMP_NUM_THREADS", "1"
"""Read when the library is loaded: to be set before torch is, or in the environment of a process that is started."""
