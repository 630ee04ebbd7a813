"""A free port of this machine that stays free for the server that is to listen there."""

import socket

__all__ = ["hold_port", "port_of"]


def hold_port() -> socket.socket:
    """A socket that is bound to a port of 127.0.0.1 and does not listen; nobody is given the port while it is open.

    A server that sets SO_REUSEADDR before it binds, as vLLM, Redis and Prometheus do, can listen there all the same. A
    port that was merely found free may be another connection's by the time a server has imported what it needs.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def port_of(holder: socket.socket) -> int:
    return int(holder.getsockname()[1])
