"""`python -m inference_container serve`, as SageMaker starts the image."""

from __future__ import annotations

import os
import sys

from inference_container.supervisor import serve

if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["serve"]):
        sys.exit(f"usage: python -m inference_container [serve], not {sys.argv[1:]}")
    sys.exit(serve(os.environ))
