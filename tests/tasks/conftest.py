"""Registered models to try champions with; they are made once, and every test has a registry of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def registered_models(tmp_path_factory):
    # Here and not above: most tests of this folder need neither torch nor MLflow.
    from tests.tasks.registry import register_models

    return register_models(tmp_path_factory.mktemp("registry"))


@pytest.fixture
def models(registered_models, tmp_path):
    """A registry of models of known quality, none of which is champion yet."""
    from tests.tasks.registry import Models

    return Models(registered_models, tmp_path / "home")
