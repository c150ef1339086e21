"""What a rented machine or a local process is started with: `python -m heterps_core.training.node`."""

import sys

from heterps_core.training.node.training_node import main

sys.exit(main())
