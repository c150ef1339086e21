"""The library: graphs, profiles, plans and training. No orchestration, no cloud SDK, no tracking."""

__version__ = "0.1.0"
