"""A git server on 127.0.0.1 that speaks https, as upstreams do: git's own http-backend behind its own certificate."""

import contextlib
import http.server
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Served:
    """A running server."""

    url: str
    """Of the folder of repositories, without a slash at its end."""
    certificate: Path
    asked: list[str] = field(default_factory=list)
    """The path of every request."""
    stall: threading.Event = field(default_factory=threading.Event)
    """While it is set, an answer to a fetch never comes."""
    redirect: str | None = None
    """Where every request is sent on to."""
    down: threading.Event = field(default_factory=threading.Event)


def _handler(root: Path, served: list[Served]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # with the length of each answer: GnuTLS takes no end of a connection for one

        def log_message(self, *args):
            pass

        def do_GET(self):
            self._answer(b"")

        def do_POST(self):
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer(body)

        def _answer(self, body):
            here = served[0]
            here.asked.append(self.path)
            if here.redirect:
                self.send_response(302)
                self.send_header("Location", here.redirect)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if here.stall.is_set():
                here.down.wait(30)
                self.close_connection = True
                return
            path, _, query = self.path.partition("?")
            env = {
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
            }
            done = subprocess.run(["git", "http-backend"], input=body, env=env, capture_output=True, check=False)
            head, _, content = done.stdout.partition(b"\r\n\r\n")
            lines = [line.split(": ", 1) for line in head.decode().splitlines()]
            status = next((int(v.split()[0]) for k, v in lines if k == "Status"), 200)
            self.send_response(status)
            for key, value in lines:
                if key != "Status":
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


@contextlib.contextmanager
def git_server(root: Path, private: Path) -> Iterator[Served]:
    """Serve the repositories below `root`; `private` takes the key and the certificate."""
    private.mkdir(parents=True, exist_ok=True)
    certificate = private / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", private / "key.pem", "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    served: list[Served] = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(root, served))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, private / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    served.append(Served(url=f"https://127.0.0.1:{server.server_address[1]}", certificate=certificate))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served[0]
    finally:
        served[0].down.set()
        server.shutdown()
        server.server_close()
        thread.join()
