"""From units to instances: replicas, offers, failover."""
