"""What the tests of the container share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inference.tiny_model import write_adapter, write_manifest, write_model


@pytest.fixture(scope="session")
def model_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What /opt/ml holds on a hosting instance: an exported model with an adapter in it."""
    base = tmp_path_factory.mktemp("opt-ml")
    write_model(base / "model")
    write_adapter(base / "model/adapters/tuned")
    write_manifest(base / "model")
    return base
