"""Free port of this machine, held for a server to come."""

import socket

__all__ = ["hold_port", "port_of"]


def hold_port() -> socket.socket:
    """Return a socket bound to a port of 127.0.0.1 that does not listen; no process is given the port while the socket
    is open.

    A server with SO_REUSEADDR before the bind, such as vLLM, Redis and Prometheus, can still listen on the port. A port
    merely found free may be in use by the time a server has imported everything.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def port_of(holder: socket.socket) -> int:
    return int(holder.getsockname()[1])
