"""Where machines come from: the one place where providers are listed."""

from __future__ import annotations

from collections.abc import Callable

from heterps_core.errors import UnknownNameError
from infra.providers.aws_ec2 import AwsEc2Provider
from infra.providers.base import (
    Bootstrap,
    LiveInstance,
    Provider,
    ProviderSettings,
)
from infra.providers.local import LocalProvider

PROVIDERS: dict[str, Callable[[ProviderSettings], Provider]] = {
    "aws": AwsEc2Provider.from_settings,
    "local": LocalProvider.from_settings,
}

__all__ = ["PROVIDERS", "Bootstrap", "LiveInstance", "Provider", "ProviderSettings", "get_provider"]


def get_provider(name: str, settings: ProviderSettings) -> Provider:
    """Make a provider by name.

    Raises:
        UnknownNameError: No provider has this name.
    """
    if name not in PROVIDERS:
        raise UnknownNameError("provider", name, PROVIDERS)
    return PROVIDERS[name](settings)
