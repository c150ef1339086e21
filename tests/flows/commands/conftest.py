"""The registered models of `tests/tasks`, for commands that show champions, and a workspace for each test."""

import pytest

from infra.workspace import Workspace
from tests.tasks.conftest import models, registered_models

__all__ = ["models", "registered_models"]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    return Workspace.locate().create()
