"""One logging set-up for every process of the container: stdout, where SageMaker collects lines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

__all__ = ["set_up_logging"]


def set_up_logging(environ: Mapping[str, str] = os.environ) -> None:
    """Level from `LOG_LEVEL` (default INFO); libraries only from WARNING up."""
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    level = environ.get("LOG_LEVEL", "INFO").upper()
    for name in ("grpohub", "training_container"):
        logging.getLogger(name).setLevel(level if level in logging.getLevelNamesMapping() else 20)
