"""A node of a run: its life, failures and memory."""

HEARTBEAT_INTERVAL_S = 2.0
BUCKET_HEARTBEAT_INTERVAL_S = 10.0
"""Each beat is a request that is paid for: 33 nodes that beat every 2 s would cost 0.3 USD an hour."""
