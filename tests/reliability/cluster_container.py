"""The real entrypoint of one host among several, with a test's ranks and limits."""

import json
import os
import sys

from training_container.cluster.limits import ClusterLimits
from training_container.entrypoint import main

if __name__ == "__main__":
    limits = ClusterLimits(**json.loads(os.environ.pop("TEST_LIMITS")))
    sys.exit(main(sys.argv[1:], rank_module=os.environ.pop("TEST_MODULE"), limits=limits))
