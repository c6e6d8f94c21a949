"""`python -m training_container`: what the image's ENTRYPOINT runs."""

import sys

from training_container.entrypoint import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
