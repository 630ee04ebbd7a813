"""Reserve a free port of this machine for a server that starts later."""

import socket

__all__ = ["hold_port", "port_of"]


def hold_port() -> socket.socket:
    """Return a socket that is bound to a free port of 127.0.0.1 and does not listen.

    While the socket is open, the system gives the port to no process that asks for any free port. A server that sets
    SO_REUSEADDR before it binds, such as vLLM, Redis and Prometheus, can still listen on the port. An unreserved port
    could be taken by another process before the server has imported everything and binds.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def port_of(holder: socket.socket) -> int:
    return int(holder.getsockname()[1])
