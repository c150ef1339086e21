"""The outside world of machines and prices: providers, leases, the ledger, the bill."""

from heterps_core import bucket_files
from infra.lent_credentials import lend_credentials

bucket_files.before_first_use.append(lend_credentials)
