"""The outside world of machines and prices: providers, leases, the ledger, the bill."""
