"""Questions about the run store: whether Arrow reads and writes it, and settings of its bucket that cost or break."""

from __future__ import annotations

from typing import Any

from heterps_core.errors import ConfigurationError
from infra.checks import CheckState
from infra.providers.aws.account import PROBE, Account, Question
from infra.providers.aws.errors import is_refused
from infra.workspace import location_in_store, region_of_run_store


def _bucket_and_prefix() -> tuple[str, str]:
    bucket, _, rest = location_in_store("").removeprefix("s3://").partition("/")
    return bucket, rest.partition("?")[0].rstrip("/")


def _region(account: Account) -> str:
    bucket, wanted = _bucket_and_prefix()[0], region_of_run_store() or "us-east-1"
    answer = _setting(account, "head_bucket", "404")
    if not answer:
        way_out = f"aws s3 mb s3://{bucket} --region {wanted}, or name another in HETERPS_RUN_STORE"
        raise ConfigurationError(f"the run store's bucket must exist, and there is no {bucket}; {way_out}")
    # A store that only speaks as S3 does may have no regions.
    if (found := answer.get("BucketRegion", wanted)) != wanted:
        rule = f"the run store must be where machines are rented, {wanted}, and {bucket} is in {found}"
        raise ConfigurationError(f"{rule}; write ?region={found} at the end of HETERPS_RUN_STORE")
    return f"{bucket} in {found}"


def _encryption(account: Account) -> str:
    """Look for a key of one's own, which the roles of nodes have no right to."""
    missing = "ServerSideEncryptionConfigurationNotFoundError"
    found = _setting(account, "get_bucket_encryption", missing).get("ServerSideEncryptionConfiguration", {})
    defaults = [rule.get("ApplyServerSideEncryptionByDefault", {}) for rule in found.get("Rules", ())]
    key = next((each["KMSMasterKeyID"] for each in defaults if "KMSMasterKeyID" in each), "alias/aws/s3")
    if "alias/aws/s3" in key or account.machines.instance_profile is not None:
        return key
    ready = "name a profile with rights to the key in HETERPS_AWS_INSTANCE_PROFILE"
    way_out = f"use S3's own (aws s3api put-bucket-encryption), or {ready}"
    raise ConfigurationError(f"the bucket encrypts with {key}, which roles of nodes may not use; {way_out}")


def _setting(account: Account, operation: str, missing: str) -> Any:
    """Ask for a setting of the bucket; empty where it has none."""
    found: dict[str, Any] = {}
    ask = getattr(account.client_of("s3"), operation)
    is_refused(lambda: found.update(ask(Bucket=_bucket_and_prefix()[0])), missing)
    return found


def _rules(account: Account) -> str:
    """Look for rules that delete runs, and for old versions that are paid for unseen."""
    found = _setting(account, "get_bucket_lifecycle_configuration", "NoSuchLifecycleConfiguration")
    rules = [rule for rule in found.get("Rules", ()) if rule["Status"] == "Enabled"]
    prefix = _bucket_and_prefix()[1]
    for rule in rules:
        # Two conditions stand in And; rules of before 2016 have no filter.
        of_filter = rule.get("Filter", rule)
        days = rule.get("Expiration", {}).get("Days")
        of_rule = of_filter.get("And", of_filter).get("Prefix", "")
        if days and (prefix.startswith(of_rule) or of_rule.startswith(prefix)):
            way_out = "keep it off the prefix of HETERPS_RUN_STORE: heterps tidy deletes there"
            raise ConfigurationError(f"a lifecycle rule deletes runs that are {days} days old; {way_out}")
    is_versioned = _setting(account, "get_bucket_versioning", "").get("Status") == "Enabled"
    if is_versioned and not any("NoncurrentVersionExpiration" in rule for rule in rules):
        way_out = "aws s3api put-bucket-lifecycle-configuration with NoncurrentVersionExpiration of a day"
        raise ConfigurationError(f"the bucket keeps old versions of checkpoints, which cost; {way_out}")
    return "none deletes runs"


def _put_and_get(account: Account) -> str:
    """Write, read and delete as nodes and flows do."""
    from heterps_core.training.storage.run_directory import RunDirectory

    location = location_in_store("")
    run = RunDirectory(location)
    way_out = "check the bucket and its policy against infra/iam/controller.json"
    try:
        run.write_bytes(PROBE, b"heterps")
        run.read_bytes(PROBE)
        run.delete_file(PROBE)
    except OSError as problem:
        raise ConfigurationError(f"{location} must be written and read: {problem}; {way_out}") from problem
    return location


STORE_QUESTION = Question(what="run store", ask=_put_and_get, is_right=True)

BUCKET_QUESTIONS = (
    Question(what="bucket", ask=_region),
    Question(what="bucket's encryption", ask=_encryption),
    Question(what="bucket's rules", ask=_rules, worst=CheckState.NOTE),
)
