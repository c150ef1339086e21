import pytest

from heterps_core.errors import ConfigurationError
from infra.providers import get_provider
from infra.run_store import RUN_STORE_VARIABLE
from infra.workspace import Workspace
from tests.heterps_core.training.storage.test_store_location import KEY, SECRET, WITH_CREDENTIALS


@pytest.mark.parametrize("location", WITH_CREDENTIALS)
def test_a_run_store_with_credentials_is_refused_before_any_machine_is_told(location, monkeypatch, tmp_path):
    monkeypatch.setenv(RUN_STORE_VARIABLE, location)

    with pytest.raises(ConfigurationError, match="must hold no credentials") as refused:
        get_provider("aws").run_location(Workspace(root=tmp_path), "r1")

    assert not [part for part in (KEY, SECRET, "hush") if part in str(refused.value)]
