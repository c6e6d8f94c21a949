"""Write `docs/openapi.json`, the HTTP API as the API itself serves it.

python docs/generate_openapi.py            # write it
python docs/generate_openapi.py --check    # exit 1 when it is not what the API serves
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("POWERTOOLS_SERVICE_NAME", "grpohub")
os.environ.setdefault("POWERTOOLS_METRICS_NAMESPACE", "GrpoHub")

from lambdas.handlers.api import openapi

PAGE = Path(__file__).with_name("openapi.json")


def main() -> None:
    text = openapi()
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit("docs/openapi.json is out of date: run `python docs/generate_openapi.py`")


if __name__ == "__main__":
    main()
