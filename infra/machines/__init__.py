"""Fleets over their life: launch with failover, leases, sweeper."""
