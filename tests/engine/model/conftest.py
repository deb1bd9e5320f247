from __future__ import annotations

from collections.abc import Iterator

import pytest
from model_reference import threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from a second thread, and on a busy machine wait for it."""
    with threads(1):
        yield
