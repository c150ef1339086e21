"""Clients of AWS with boto3's own search for credentials, region and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from botocore.exceptions import BotoCoreError

from heterps_core.errors import ProvisioningError
from infra.providers.aws.errors import WRONG_SETTINGS, explained

if TYPE_CHECKING:
    from botocore.config import Config


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
                f"AWS could not set up its client: {problem}; {WRONG_SETTINGS}"
            ) from problem
