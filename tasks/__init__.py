"""Steps of the flows, one subject a file: unpack, call the core or infra, return."""
