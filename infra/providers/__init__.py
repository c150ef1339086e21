"""Where machines come from: the one place where providers are listed."""

from __future__ import annotations

import os

from heterps_core.errors import UnknownNameError
from infra.providers.aws.node_role import BOUNDARY_VARIABLE
from infra.providers.aws.provider import AwsEc2Provider
from infra.providers.base import (
    DEFAULT_WORKSPACE,
    Bootstrap,
    Provider,
    ProviderSettings,
)
from infra.providers.local import LocalProvider
from infra.workspace import Workspace

PROVIDERS: dict[str, type[AwsEc2Provider] | type[LocalProvider]] = {
    "aws": AwsEc2Provider,
    "local": LocalProvider,
}

__all__ = ["PROVIDERS", "Bootstrap", "Provider", "ProviderSettings", "get_provider", "provider_for"]


def get_provider(name: str, settings: ProviderSettings) -> Provider:
    """Make a provider by name.

    Raises:
        UnknownNameError: No provider has this name.
    """
    if name not in PROVIDERS:
        raise UnknownNameError("provider", name, PROVIDERS)
    return PROVIDERS[name].from_settings(settings)


def provider_for(name: str, workspace: Workspace, *, region: str) -> Provider:
    """Make a provider by name, set up for a workspace and by the variables HETERPS_AWS_*, where they are not empty.

    Raises:
        UnknownNameError: No provider has this name.
    """
    settings = ProviderSettings(
        state_directory=workspace.leases_directory,
        region=region,
        image_id=os.environ.get("HETERPS_AWS_IMAGE") or None,
        subnet_id=os.environ.get("HETERPS_AWS_SUBNET") or None,
        node_boundary=os.environ.get(BOUNDARY_VARIABLE) or None,
        key_name=os.environ.get("HETERPS_AWS_KEY") or None,
        workspace=os.environ.get("HETERPS_AWS_WORKSPACE") or DEFAULT_WORKSPACE,
    )
    return get_provider(name, settings)
