"""What all tests share: options, and the real model where it is installed."""

from __future__ import annotations

import os

import pytest

from engine.errors import ModelError
from engine.model.library import ModelFiles, resolve

# As the core process has it (engine/core/client.py); libgomp reads it when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", metavar="DEVICE",
                     help="where end-to-end tests run the model, as `trunkline serve --device` has it [default: cpu]")


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    try:
        return resolve("smollm2", download=False)
    except ModelError as error:
        pytest.skip(f"needs the model smollm2 (`trunkline pull smollm2`): {error}")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))
