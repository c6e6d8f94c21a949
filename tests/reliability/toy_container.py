"""The real entrypoint with toy ranks: `python -m tests.reliability.toy_container`."""

import os
import sys

from tests.reliability.warm import ADDRESS
from training_container.entrypoint import main

if __name__ == "__main__":
    rank = "tests.reliability.warm" if ADDRESS in os.environ else "tests.reliability.toy_rank"
    sys.exit(main(sys.argv[1:], rank_module=rank))
