"""A port that is held: nobody is given it, and a server can listen there."""

import socket

from manthan.benchmarks.ports import hold_port, port_of


def listening_at(port: int) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    return server


def test_a_server_listens_at_a_held_port_and_nobody_else_is_given_it() -> None:
    with hold_port() as held, listening_at(port_of(held)) as server:
        for _ in range(2000):  # of some 28,000 there are
            with socket.create_connection(server.getsockname()) as client, server.accept()[0] as accepted:
                assert client.getsockname()[1] != port_of(held)
                accepted.recv(0)
