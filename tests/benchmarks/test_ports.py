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


def test_held_ports_differ_also_from_those_that_are_merely_found() -> None:
    held = [hold_port() for _ in range(200)]
    ports = {port_of(holder) for holder in held}
    assert len(ports) == 200
    for _ in range(20_000):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            assert probe.getsockname()[1] not in ports
    for holder in held:
        holder.close()
