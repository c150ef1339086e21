"""Every example in a docstring gives what it says."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.test_import_direction import FILES

MODULES = [module for module, path in FILES.items() if ">>>" in path.read_text()]


@pytest.mark.parametrize("module", MODULES)
def test_examples_hold(module):
    results = doctest.testmod(importlib.import_module(module))

    assert results.attempted > 0
    assert results.failed == 0
