"""A node of a run: its life, failures and memory."""

HEARTBEAT_INTERVAL_S = 2.0
BUCKET_HEARTBEAT_INTERVAL_S = 10.0
"""Each beat is a request that is paid for: 33 nodes that beat every 2 s would cost 0.3 USD an hour."""

# Here, where neither torch nor Arrow is loaded: a launch needs these names.
RUN_DIRECTORY_VARIABLE = "HETERPS_RUN_DIR"
RUN_KEY_VARIABLE = "HETERPS_RUN_KEY"
"""The run's key in hexadecimal digits."""

NODE_ID_VARIABLE = "HETERPS_NODE_ID"
KIND_VARIABLE = "HETERPS_NODE_IS"
"""A machine, or a process of the flow's."""

DRY_RUN_VARIABLE = "HETERPS_DRY_RUN"

NOTICE_S = 120
"""A batch system sends SIGUSR1 so long before it ends a node; EC2 gives notice by its metadata service as early."""

OWN_DISKS_VARIABLE = "HETERPS_OWN_DISKS"
"""Folders on the machine's own disks, with colons between them; set by the bootstrap, empty where it has none."""
