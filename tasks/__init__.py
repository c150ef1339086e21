"""Steps of the flows, one file each: unpack, call the core or infra, return."""
