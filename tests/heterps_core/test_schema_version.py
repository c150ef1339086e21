import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.schema_version import check_schema_version


def test_a_document_of_the_known_version_passes():
    check_schema_version({"schema_version": 2}, 2, what="a profile", way_out="measure it anew")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"schema_version": 1}, "^a profile must have schema_version 2, got 1; measure it anew$"),
        ({}, "^a profile must have schema_version 2, got None; measure it anew$"),
    ],
)
def test_another_version_is_told_with_the_way_out(document, message):
    with pytest.raises(ConfigurationError, match=message):
        check_schema_version(document, 2, what="a profile", way_out="measure it anew")
