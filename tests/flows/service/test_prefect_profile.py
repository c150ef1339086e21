import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.service.prefect_profile import enable_plugins, profiles_path


def are_plugins_enabled(home: Path) -> str:
    """Return what Prefect itself reads in a folder that has no file of settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from prefect.settings import get_current_settings as s; print(s().plugins.enabled)",
        ],
        env={**clean, "HOME": str(home), "PREFECT_PROFILES_PATH": str(home / "profiles.toml")},
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_prefect_reads_the_profile_that_was_written(tmp_path):
    enable_plugins(tmp_path / "profiles.toml")

    assert are_plugins_enabled(tmp_path) == "True"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            'active = "team"\n\n[profiles.team] # ours\nPREFECT_API_URL = "http://prefect.example/api"\n',
            'active = "team"\n\n[profiles.team] # ours\nPREFECT_API_URL = "http://prefect.example/api"\n'
            'PREFECT_PLUGINS_ENABLED = "true"\n',
        ),
        (
            'active = "a"\n\n[profiles.a]\nPREFECT_PLUGINS_ENABLED = "false"\n',
            'active = "a"\n\n[profiles.a]\nPREFECT_PLUGINS_ENABLED = "false"\n',
        ),
        ("no TOML [", "no TOML ["),
    ],
    ids=["a profile of one's own", "refused by its user", "damaged"],
)
def test_what_a_user_has_written_stays(tmp_path, monkeypatch, written, expected):
    monkeypatch.delenv("PREFECT_PROFILE", raising=False)
    path = tmp_path / "profiles.toml"
    path.write_text(written)

    enable_plugins(path)
    enable_plugins(path)

    assert path.read_text() == expected


def test_keys_in_a_linked_profile_outlive_a_full_disk_and_stay_closed_to_others(tmp_path):
    written = '[profiles.ephemeral]\nPREFECT_API_KEY = "pnu_secret"\n'
    kept = tmp_path / "dotfiles.toml"
    kept.write_text(written)
    kept.chmod(0o600)
    path = tmp_path / "profiles.toml"
    path.symlink_to(kept)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    on_excess = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(written), limits[1]))
    try:
        enable_plugins(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, on_excess)
    assert kept.read_text() == written

    enable_plugins(path)

    assert path.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "pnu_secret" in kept.read_text()
    assert "PREFECT_PLUGINS_ENABLED" in kept.read_text()
    assert {each.name for each in tmp_path.iterdir()} == {"dotfiles.toml", "profiles.toml"}


def test_the_profile_is_looked_for_where_prefect_looks(tmp_path, monkeypatch):
    for name in ("PREFECT_PROFILES_PATH", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    by_default = profiles_path()
    monkeypatch.setenv("PREFECT_HOME", "/there")

    assert (by_default, str(profiles_path())) == (
        tmp_path / ".prefect" / "profiles.toml",
        "/there/profiles.toml",
    )
