"""Named conversions between units, and nothing else."""

from __future__ import annotations

MS_PER_S = 1_000.0
SECONDS_PER_MINUTE = 60.0
SECONDS_PER_HOUR = 3_600.0
BYTES_PER_MIB = 1_048_576
BYTES_PER_GIB = 1_073_741_824
BYTES_PER_S_PER_MBIT_PER_S = 125_000.0
BYTES_PER_FLOAT32 = 4
SAMPLES_PER_MILLION = 1_000_000.0
