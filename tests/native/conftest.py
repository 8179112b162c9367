"""The suite runs once for every implementation, and each must give the reference's bytes."""

from __future__ import annotations

import pytest

from pdhandoff.native import Native, load


@pytest.fixture(params=["reference"])
def native(request: pytest.FixtureRequest) -> Native:
    return load(request.param)
