"""A host on the loopback interface that misbehaves as a test asks: it resets, stalls, truncates, redirects, never ends."""

import contextlib
import http.server
import socket
import ssl
import struct
import threading


class Fault:
    """What a handler does on one request; the methods answer over the raw socket."""

    def __init__(self, handler):
        self.handler = handler
        self.headers = handler.headers
        self.path = handler.path
        self.method = handler.command

    def body(self):
        """Return what the request sends."""
        return self.handler.rfile.read(int(self.headers.get("Content-Length", 0)))

    def send(self, body=b"", status=200, reason="OK", **headers):
        fields = {"Content-Length": str(len(body))} | {k.replace("_", "-"): v for k, v in headers.items()}
        head = f"HTTP/1.1 {status} {reason}\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fields.items() if v is not None)
        self.raw(head.encode("latin-1") + b"Connection: close\r\n\r\n" + body)

    def raw(self, data):
        self.handler.wfile.write(data)
        self.handler.wfile.flush()

    def reset(self):
        """End the connection as a crashed host does."""
        self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.handler.connection.close()

    def wait(self, seconds=30):
        self.handler.server.ended.wait(seconds)

    @property
    def ended(self):
        return self.handler.server.ended.is_set()


class FaultServer:
    """Serve `answer(fault, number)`; `number` counts the requests for that path from 1. `seen` holds (path, headers)."""

    def __init__(self, answer, *, certificate=None, host="127.0.0.1"):
        self.answer = answer
        self.certificate = certificate
        self.host = host
        self.seen = []
        self.lock = threading.Lock()

    def __enter__(self):
        ours = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self.close_connection = True
                with ours.lock:
                    ours.seen.append((self.path, dict(self.headers)))
                    number = sum(path == self.path for path, _ in ours.seen)
                with contextlib.suppress(OSError):
                    ours.answer(Fault(self), number)

            do_HEAD = do_GET  # noqa: N815 - as http.server has it
            do_CONNECT = do_GET  # noqa: N815
            do_POST = do_GET  # noqa: N815
            do_PUT = do_GET  # noqa: N815

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *args):
                pass

        self.server = Server((self.host, 0), Handler)
        self.server.ended = threading.Event()
        if self.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        scheme = "https" if self.certificate else "http"
        self.url = f"{scheme}://{self.host}:{self.server.server_port}"
        return self

    def __exit__(self, *_):
        self.server.ended.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def count(self, path):
        return sum(seen == path for seen, _ in self.seen)
