"""The program of a rented machine or a local process: `python -m heterps_core.training.node`."""

import sys

from heterps_core.training.node.training_node import main

if __name__ == "__main__":
    # Not where a worker is made, which imports the module that its node was started with.
    sys.exit(main())
