"""The suite runs once for every implementation, and each must give the reference's bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdhandoff.errors import LocalError
from pdhandoff.native import Native, load
from support import caches


@pytest.fixture(params=["reference", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    name: str = request.param
    if name == "reference":
        yield load(name)
        return
    try:
        found = load(name)
    except LocalError as error:
        pytest.skip(error.reason)
    with caches.reachable(by_devices=name == "cuda"):
        yield found
