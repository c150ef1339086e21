"""Errors of AWS and boto3, each with a way out, also while a client is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from heterps_core.errors import ProvisioningError
from infra.providers.aws.passing import is_passing
from infra.providers.aws.tags import end_text
from infra.providers.base import EndedAtStartError, InsufficientCapacityError, QuotaExceededError

if TYPE_CHECKING:
    from botocore.config import Config

GONE_CODES = ("InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed")

_ANOTHER_POOL = "ask for another instance type or zone, or try again later"
_ALLOW_IT = "allow this call in the IAM policy of the credentials in use, as in infra/iam"
_NOT_SOLD_THERE = "take another zone or instance type: this one is not sold there"

CAPACITY_WAYS_OUT = {
    "InsufficientInstanceCapacity": _ANOTHER_POOL,
    "InsufficientHostCapacity": _ANOTHER_POOL,
    "InsufficientCapacity": _ANOTHER_POOL,
    "UnfulfillableCapacity": _ANOTHER_POOL,
    "InsufficientFreeAddressesInSubnet": "take a subnet with more free addresses",
    "SpotMaxPriceTooLow": "take on-demand, or another instance type",
    "Unsupported": _NOT_SOLD_THERE,
    # A fleet's answer has this code for each pool whose type its zone does not sell.
    "InvalidFleetConfiguration": _NOT_SOLD_THERE,
}
"""Codes that say nothing against another zone or instance type."""

_QUOTA_WAYS_OUT = {
    "VcpuLimitExceeded": "ask for a higher vCPU quota in Service Quotas, or plan with fewer units",
    "InstanceLimitExceeded": "ask for a higher quota in Service Quotas, or plan with fewer units",
    "MaxSpotInstanceCountExceeded": "ask for a higher spot quota in Service Quotas, or take on-demand",
}
"""Codes of a region's quotas: no other zone helps, but the other market or fewer vCPUs do."""

WAYS_OUT = {
    **CAPACITY_WAYS_OUT,
    **_QUOTA_WAYS_OUT,
    "UnauthorizedOperation": _ALLOW_IT,
    "AccessDenied": _ALLOW_IT,
    "AccessDeniedException": _ALLOW_IT,
    "403": _ALLOW_IT,
    "AuthFailure": "renew the credentials (aws sts get-caller-identity must work), set this machine's clock, and "
    "check that the region is enabled for the account",
    "SignatureDoesNotMatch": "set this machine's clock (timedatectl), and check the secret key",
    "ExpiredToken": "renew the credentials, for instance with aws sso login",
    "RequestExpired": "set this machine's clock (timedatectl), and renew the credentials",
    "InvalidClientTokenId": "renew the credentials, for instance with aws sso login",
    "OptInRequired": "enable this region for the account, or take another one",
    "InvalidAMIID.NotFound": "give the id of an image in this region",
    "InvalidSubnetID.NotFound": "give the id of a subnet in this region",
    "NoSuchEntity": "check the ARN in HETERPS_AWS_NODE_BOUNDARY: aws iam get-policy --policy-arn must know it, or "
    "the name in HETERPS_AWS_INSTANCE_PROFILE: aws iam get-instance-profile --instance-profile-name must know it",
    "LimitExceeded": "delete roles that no one needs, or ask for a higher quota of IAM in Service Quotas",
    "IdempotentParameterMismatch": "use a new run id: this one stands for another launch",
}

_WRONG_SETTINGS = (
    "correct ~/.aws/config, ~/.aws/credentials or the variable AWS_* that says so (env | grep AWS_)"
)

_NO_NETWORK = "check the network and try again, what was started is ended"

_WAYS_OUT_BY_KIND = {
    "ProfileNotFound": "set AWS_PROFILE to a profile that there is (aws configure list-profiles), or unset it",
    "NoCredentialsError": "credentials are needed: run aws configure or aws sso login, set AWS_PROFILE, or use the "
    "provider local",
    "PartialCredentialsError": "credentials are needed, key and secret together: set the one that is missing, or run "
    "aws configure",
    "CredentialRetrieval Login MetadataRetrieval NoAuthToken RefreshWithMFAUnsupported SSO TokenRetrieval": "run aws "
    "sso login or aws login, or renew the credentials in another way",
    "ProxyConnection InvalidProxiesConfig": "check HTTPS_PROXY and NO_PROXY",
    "SSL": "check this machine's clock and certificates, and AWS_CA_BUNDLE with a proxy that has its own",
    "BaseEndpointResolver EndpointConnection EndpointProvider InvalidRegion NoRegion ServiceNotInRegion "
    "UnknownEndpoint UnknownRegion": "check the region's name, AWS_ENDPOINT_URL and the network",
    "ConfigNotFound ConfigParse EndpointVariant InfiniteLoopConfig InvalidChecksumConfig InvalidConfig "
    "InvalidDefaultsMode InvalidEndpointConfiguration InvalidIMDSEndpoint InvalidIMDSEndpointMode "
    "InvalidMaxRetryAttempts InvalidRetryConfiguration InvalidRetryMode InvalidS3AddressingStyle "
    "InvalidS3UsEast1RegionalEndpointConfig InvalidSTSRegionalEndpointsConfig UnknownCredential "
    "UnknownTokenProvider": _WRONG_SETTINGS,
    "MissingDependencyException": "install the package that it names into the environment of heterps",
    "HTTPClient Connection IncompleteRead FlexibleChecksum Checksum": _NO_NETWORK,
    "ResponseParser": "something other than AWS answered: check AWS_ENDPOINT_URL, HTTPS_PROXY and the network",
    "Waiter": "try again, what was started is ended",
    "BotoCore": "boto3 refused it before it asked AWS: check HETERPS_AWS_* (env | grep HETERPS_AWS_) and that boto3 "
    "is of the version in requirements.lock, and report it otherwise",
}
"""What a user can do about an error that boto3 raises itself, by classes of `botocore.exceptions` without their
"Error"; the first that fits decides."""

_PASSES = "AWS was asked again for two minutes, as this refusal passes by itself; try again in a minute"

_VOLUME_LIMIT = "Client.VolumeLimitExceeded"

START_WAYS_OUT = {
    _VOLUME_LIMIT: "ask for more gp3 storage in Service Quotas (L-7A658B76), or keep fewer rows on disk",
    "Client.InternalError": "let the credentials use the KMS key that encrypts volumes by default (aws ec2 "
    "get-ebs-default-kms-key-id): kms:CreateGrant, kms:Decrypt, kms:GenerateDataKeyWithoutPlaintext",
    "Client.InvalidSnapshot.NotFound": "make the machine image again: its snapshot is gone",
}
"""By the code of a StateReason, Amazon EC2 user guide, "Instance terminates immediately"."""

_UNKNOWN_START = "look the reason up in the EC2 user guide, Instance terminates immediately"

_ORGANISATION = "service control policy"
_BY_ORGANISATION = (
    "the organisation refuses it to every user of the account: ask its administrator, take another region or "
    "instance type, or set the tags that it demands in HETERPS_AWS_TAGS"
)

_MAX_CAUSE = 600

_UNKNOWN = "look the code up in the EC2 API reference, Error codes"

_SAYS_NOTHING_OF_OTHERS = {"Unsupported", "InvalidFleetConfiguration"}
"""Codes that do not count beside a quota: the quota refused the pools that are sold there."""


class PassingRefusalError(ProvisioningError):
    """AWS refused a request for a reason of the table in `passing`."""


def refusal(
    action: str, codes_and_messages: Mapping[str, Sequence[str]], *, operation: str = ""
) -> ProvisioningError:
    """Return the error for an answer of AWS, with a fix for each code.

    A fleet's answer has an error for each pool that was looked at. One that no other pool changes (a missing right)
    decides. Else, where one passes by itself, the request is worth repeating; where one pool lacked capacity, the
    request was good and another zone may have it; where quotas alone stood in the way, no zone has.
    """
    codes = set(codes_and_messages)
    passing = {
        code
        for code, messages in codes_and_messages.items()
        if any(is_passing(operation, code, message) for message in messages)
    }
    ways_out = {
        code: _BY_ORGANISATION if _ORGANISATION in str(messages) else WAYS_OUT.get(code, _UNKNOWN)
        for code, messages in codes_and_messages.items()
    } | dict.fromkeys(passing, _PASSES)
    answers = "; ".join(
        f"{code}: {', '.join(dict.fromkeys(messages))}; {ways_out[code]}"
        for code, messages in codes_and_messages.items()
    )
    text = f"AWS refused to {action}: {answers}"
    is_about_pools = bool(codes & set(CAPACITY_WAYS_OUT) - _SAYS_NOTHING_OF_OTHERS)
    # A code that is not known does not outweigh a pool that only lacked capacity.
    others = codes - {*CAPACITY_WAYS_OUT, *_QUOTA_WAYS_OUT} - passing
    if passing and not others & set(WAYS_OUT):
        return PassingRefusalError(text)
    if others & set(WAYS_OUT) or (others and not is_about_pools):
        return ProvisioningError(text)
    is_about_quotas = bool(codes & set(_QUOTA_WAYS_OUT)) and not is_about_pools
    return QuotaExceededError(text) if is_about_quotas else InsufficientCapacityError(text)


def is_refused(call: Callable[[], object], *codes: str) -> bool:
    """Call AWS and tell whether it answered with one of these codes; other errors are raised."""
    try:
        call()
    except ClientError as problem:
        if problem.response["Error"]["Code"] not in codes:
            raise
        return True
    return False


@contextmanager
def explained(action: str) -> Iterator[None]:
    """Turn boto3's errors into ours, with a way out."""
    try:
        yield
    except ClientError as problem:
        error = problem.response["Error"]
        answer = {error["Code"]: [error.get("Message", "")]}
        raise refusal(action, answer, operation=problem.operation_name) from problem
    except (BotoCoreError, ResponseParserError) as problem:
        # A page of a proxy is no cause that one reads.
        cause = shorten(str(problem), _MAX_CAUSE, placeholder=" ...").removesuffix(".")
        raise ProvisioningError(f"AWS could not {action}: {cause}; {_way_out_of(problem)}") from problem


def start_failure(instances: Iterable[Mapping[str, Any]]) -> ProvisioningError | None:
    """Return the error for machines that ended while they started, by EC2's StateReason; None if none has a reason.

    A reason of the server's passes, or another pool has the machines; a reason of the client's stays, but for the
    quota of volumes, of which another plan asks less.
    """
    ends = {instance["InstanceId"]: instance for instance in instances if end_text(instance)}
    if not ends:
        return None
    codes = {instance.get("StateReason", {}).get("Code", "") for instance in ends.values()}
    ways_out = {
        code: START_WAYS_OUT.get(code, _UNKNOWN_START) for code in codes if not code.startswith("Server.")
    }
    text = (
        "; ".join(
            f"{instance_id} ended while it started: {end_text(end)}" for instance_id, end in ends.items()
        )
        + "; "
        + "; ".join(dict.fromkeys(ways_out.values()) or [_ANOTHER_POOL])
    )
    if not ways_out:
        return EndedAtStartError(text)
    return (InsufficientCapacityError if codes == {_VOLUME_LIMIT} else ProvisioningError)(text)


def _way_out_of(problem: Exception) -> str:
    kinds = {
        name for kind in type(problem).__mro__ for name in (kind.__name__, kind.__name__[: -len("Error")])
    }
    fitting = (way_out for names, way_out in _WAYS_OUT_BY_KIND.items() if kinds & set(names.split()))
    return next(fitting, _UNKNOWN)


def aws_client(service: str, *, region: str, config: Config) -> Any:
    """Return a client of a service.

    Raises:
        ProvisioningError: boto3 cannot use what it finds; says what a user can do.
    """
    import boto3  # an eighth of a second, for those who ask AWS

    client: Any = boto3.client
    with explained("set up its client"):
        try:
            return client(service, region_name=region, config=config)
        except BotoCoreError:
            raise
        except ValueError as problem:
            # An address that is none, in AWS_ENDPOINT_URL or a profile.
            raise ProvisioningError(
                f"AWS could not set up its client: {problem}; {_WRONG_SETTINGS}"
            ) from problem
