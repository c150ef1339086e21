"""Where the project and its tests lie."""

from pathlib import Path

TESTS = Path(__file__).parent
PROJECT = TESTS.parent
