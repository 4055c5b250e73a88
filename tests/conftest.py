"""Options and fixtures of all tests: tiny checkpoints of every family, made by transformers."""

from __future__ import annotations

import os
from pathlib import Path

import emulated
import families
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda", "emulated"),
        help="where to compute; emulated: the CUDA backend without a GPU (tests/emulator)",
    )
    parser.addoption("--smollm2", help="an FP32 folder of SmolLM2-135M for tests/test_smollm2.py")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "emulated":
        os.environ.update(emulated.environment())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes; runs with --slow"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that trainers of this run compute on."""
    name = str(request.config.getoption("--device"))
    return "cuda" if name == "emulated" else name


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> families.Checkpoints:
    """`checkpoints(case)`: the folder of a tiny checkpoint of families.CASES, made once."""
    return families.Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def tiny_llama(checkpoints: families.Checkpoints) -> Path:
    return checkpoints("llama3")


@pytest.fixture(scope="session")
def tiny_llama_tied(checkpoints: families.Checkpoints) -> Path:
    return checkpoints("llama-tied")
