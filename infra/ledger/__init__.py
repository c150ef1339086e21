"""The write-ahead ledger of launches."""
