"""The profile of a user's own shell, by which a bare `prefect` command in any folder loads this package's plugin."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from heterps_core.json_file import replace_text

_PLUGINS_SETTING = "PREFECT_PLUGINS_ENABLED"

_DEFAULT_PROFILE = "ephemeral"
"""Prefect's own, which it takes where there is no file."""


def profiles_path() -> Path:
    """Return the file where Prefect looks for profiles in this process."""
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    return Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).expanduser()


def enable_plugins(path: Path) -> None:
    """Turn Prefect's plugins on in the active profile, where that does not say otherwise.

    As `prefect config set PREFECT_PLUGINS_ENABLED=true` does, but without loading Prefect. A file that cannot be read
    or written is left alone: the command is then typed with the setting in front, or in the project's folder.
    """
    with suppress(OSError, TOMLKitError, UnicodeDecodeError):
        document = tomlkit.parse(path.read_text()) if path.exists() else tomlkit.document()
        active = os.environ.get("PREFECT_PROFILE") or str(document.setdefault("active", _DEFAULT_PROFILE))
        profiles = document.setdefault("profiles", tomlkit.table(is_super_table=True))
        # What Prefect's own profile of this name has.
        default = {"PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true"} if active == _DEFAULT_PROFILE else {}
        profile = profiles.setdefault(active, default)
        if _PLUGINS_SETTING not in profile:
            profile[_PLUGINS_SETTING] = "true"
            replace_text(path, tomlkit.dumps(document))
