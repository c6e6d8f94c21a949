"""The `grpohub` command line and the Python client behind it.

from client import Hub

hub = Hub()                      # AWS, or the embedded mode when `grpohub local up` runs here
run = hub.submit("run.yaml")
hub.wait(run.run_id)
"""

from client.hub import ApiError, Hub, RunFailedError
from client.settings import ConfigurationError

__all__ = ["ApiError", "ConfigurationError", "Hub", "RunFailedError"]
