import hashlib
import subprocess
import sys
import zipfile

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.training.storage.run_directory import RunDirectory
from infra.bootstrap.node_start import _build_node_wheel, publish_node_wheel


def test_the_same_code_makes_the_same_wheel():
    first, second = _build_node_wheel(), _build_node_wheel()

    assert first == second
    assert first.sha256 == hashlib.sha256(first.content).hexdigest()


def test_pip_takes_it_for_a_wheel_and_finds_every_file_as_recorded(tmp_path):
    wheel = publish_node_wheel(RunDirectory(str(tmp_path)), "ctrdnn")

    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(tmp_path / wheel.key)], check=True)

    names = set(zipfile.ZipFile(tmp_path / wheel.key).namelist())
    assert {
        "heterps_core/training/node/training_node.py",
        "heterps_core/embeddings/row_kernels.cpp",
        "heterps_core/embeddings/row_lists.cpp",
    } <= names
    assert all((tmp_path / "site" / name).exists() for name in names if not name.endswith("/RECORD"))


def test_a_model_of_ones_own_goes_along(tmp_path, monkeypatch):
    package = tmp_path / "our_models"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("WIDTH = 4\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    wheel = publish_node_wheel(RunDirectory(str(tmp_path / "run")), "our_models.deep:build")

    names = zipfile.ZipFile(tmp_path / "run" / wheel.key).namelist()
    assert {"our_models/__init__.py", "our_models/deep.py"} <= set(names)


def test_a_model_that_cannot_be_found_here_is_refused_before_anything_is_launched():
    with pytest.raises(ConfigurationError, match="package 'no_such_models' of the model must be one"):
        _build_node_wheel("no_such_models.deep:build")
