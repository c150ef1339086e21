"""Measures the exchange of rows among two and four replicas, which takes seconds; its program takes 24 of them."""

import sys
from pathlib import Path

from torch.multiprocessing.spawn import start_processes

from heterps_core.profiling.measurement import replica_measurement

replica_measurement.NUM_PROCESSES = (4, 2)
replica_measurement.NUM_ROUNDS = 1
replica_measurement.BATCH_SIZE = 512

if __name__ == "__main__":
    start_processes(replica_measurement._measure_replica, (Path(sys.argv[1]),), 4, start_method="fork")
