"""Machines from Amazon EC2, one subject a file; cloud questions are functions that receive the boto3 client."""
