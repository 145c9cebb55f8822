"""A remote builder for tests: an engine's own BuildKit, reached as buildx reaches a BuildKit that runs elsewhere.

An engine hands a connection to its BuildKit once a client asks for `/grpc` (that is how buildx's `docker` driver gets
there). This asks for each connection that it takes, so that `docker buildx create --driver remote` works with it.
"""

import contextlib
import socket
import threading

_ASKING = b"POST /grpc HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _join(client: socket.socket, engine: str) -> None:
    with client, socket.socket(socket.AF_UNIX) as builder:
        builder.connect(engine)
        builder.sendall(_ASKING)
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            byte = builder.recv(1)
            if not byte:
                return
            answer += byte
        there = threading.Thread(target=_copy, args=(client, builder), daemon=True)
        there.start()
        _copy(builder, client)
        there.join(10)


def serve(engine: str) -> tuple[socket.socket, str]:
    """Serve the BuildKit of the engine at a unix socket on a loopback port; return the listening socket and its address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = listening.accept()
                threading.Thread(target=_join, args=(client, engine), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listening, f"tcp://127.0.0.1:{listening.getsockname()[1]}"
