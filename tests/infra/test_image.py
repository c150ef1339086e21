"""The recipe of the machine image: a script that bash reads, with the versions of the lock file."""

import re
import subprocess

from tests.paths import PROJECT

SCRIPT = PROJECT / "infra" / "image" / "install.sh"


def test_the_recipe_installs_the_versions_of_the_lock_file():
    locked = dict(re.findall(r"^([\w-]+)==(\S+)$", (PROJECT / "requirements.lock").read_text(), re.MULTILINE))
    installed = dict(re.findall(r"(\w+)==(\S+)", SCRIPT.read_text()))

    assert installed == {name: locked[name] for name in ("torch", "numpy", "pyarrow")}


def test_the_recipe_is_read_by_bash_and_fits_user_data():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    assert SCRIPT.stat().st_size < 16_384
