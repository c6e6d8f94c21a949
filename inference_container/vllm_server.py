"""`vllm serve` on a port that the waiting room still listens on.

vLLM binds its port before it loads the model, and without SO_REUSEPORT: beside a listener it would
end at once with "address already in use". It takes no socket from outside either. So the option is
set here for that one port, before vLLM's own command line takes over.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

__all__ = ["PORT_VARIABLE", "share_port"]

PORT_VARIABLE = "GRPOHUB_SHARED_PORT"


def share_port(port: int) -> None:
    """From now on this process binds `port` beside others of the same user that share it."""
    bind = socket.socket.bind

    def bind_shared(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[1] == port:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bind(self, address)

    socket.socket.bind = bind_shared  # type: ignore[method-assign]


if __name__ == "__main__":
    share_port(int(os.environ[PORT_VARIABLE]))
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
