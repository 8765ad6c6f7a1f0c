from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_api import FakeApi


@pytest.fixture(scope="session")
def api() -> Iterator[FakeApi]:
    api = FakeApi()
    api.start()
    yield api
    api.stop()
