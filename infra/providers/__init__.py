"""Where machines come from: the one place where providers are listed."""

from __future__ import annotations

from heterps_core.errors import UnknownNameError
from infra.providers.aws.provider import AwsEc2Provider
from infra.providers.base import Provider
from infra.providers.here import HereProvider
from infra.providers.local import LocalProvider
from infra.providers.ray.provider import RayProvider
from infra.providers.slurm.provider import SlurmProvider
from infra.workspace import Workspace

PROVIDERS: dict[str, type[Provider]] = {
    "aws": AwsEc2Provider,
    "here": HereProvider,
    "local": LocalProvider,
    "ray": RayProvider,
    "slurm": SlurmProvider,
}

__all__ = ["PROVIDERS", "Provider", "get_provider", "provider_of"]


def get_provider(name: str) -> type[Provider]:
    """Return a provider by name.

    Raises:
        UnknownNameError: No provider has this name.
    """
    if name not in PROVIDERS:
        raise UnknownNameError("provider", name, PROVIDERS)
    return PROVIDERS[name]


def provider_of(workspace: Workspace, name: str, *, region: str | None = None) -> Provider:
    """Make a provider by name for the machines of a workspace, in its own region where none is given.

    Raises:
        UnknownNameError: No provider has this name.
        ProvisioningError: It cannot be set up.
    """
    provider = get_provider(name)
    return provider.for_workspace(workspace, region=region or provider.region)
