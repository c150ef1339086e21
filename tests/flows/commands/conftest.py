"""The registered models of `tests/tasks`, for commands that show champions."""

from tests.tasks.conftest import models, registered_models

__all__ = ["models", "registered_models"]
