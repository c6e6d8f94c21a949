"""`python -m local_aws …` is `grpohub local …`."""

from local_aws.cli import app

if __name__ == "__main__":
    app()
