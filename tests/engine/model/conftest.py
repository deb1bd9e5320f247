from __future__ import annotations

import pytest

from engine.errors import ModelError
from engine.model.library import ModelFiles, resolve


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    try:
        return resolve("smollm2", download=False)
    except ModelError as error:
        pytest.skip(f"needs smollm2: {error}")
