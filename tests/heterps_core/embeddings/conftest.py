"""Both ways in which lists of rows are worked on."""

from __future__ import annotations

import pytest

from heterps_core.embeddings import row_kernels


@pytest.fixture(params=["compiled", "numpy"])
def compiled_or_numpy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(row_kernels, "row_kernels", lambda: None)
    elif row_kernels.row_kernels() is None:
        pytest.skip("no C++ compiler here")
