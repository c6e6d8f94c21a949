"""The real entrypoint with toy ranks: `python -m tests.reliability.toy_container`."""

import sys

from training_container.entrypoint import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], rank_module="tests.reliability.toy_rank"))
