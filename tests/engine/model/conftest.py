from __future__ import annotations

from collections.abc import Iterator

import pytest
from model_reference import threads

from engine.errors import ModelError
from engine.model.library import ModelFiles, resolve


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    try:
        return resolve("smollm2", download=False)
    except ModelError as error:
        pytest.skip(f"needs smollm2: {error}")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from a second thread, and on a busy machine wait for it."""
    with threads(1):
        yield
