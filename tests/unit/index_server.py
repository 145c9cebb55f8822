"""A package index on the loopback interface: the Simple API as HTML or JSON, the JSON API, and files with ranges."""

import contextlib
import hashlib
import http.server
import io
import json
import threading
import urllib.parse
import zipfile


def wheel(name, version, tag, requires=(), python=None, members=None):
    """Return (filename, bytes) of a wheel whose METADATA states `requires` and `python`."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Python: {python}"] if python else []
    lines += [f"Requires-Dist: {each}" for each in requires]
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        # what comes first is what a range request need not read
        archive.writestr("payload.bin", b"\0" * 300_000)
        for path, text in (members or {}).items():
            archive.writestr(path, text)
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")
    return f"{stem}-{tag}.whl", body.getvalue()


class Index:
    """What the index holds: distribution -> version -> ((filename, bytes) ..., day, yanked)."""

    def __init__(self, *, html=False, sidecars=True, ranges=True):
        self.html, self.sidecars, self.ranges = html, sidecars, ranges
        self.held = {}
        self.variants = {}
        """Indexes next to it, by label: /whl/LABEL/ holds what `add(…, at=LABEL)` was given."""
        self.bytes_sent = 0
        self.asked = []
        """The paths that were asked for, in order."""
        self.login = None
        """What whoever asks must send as Authorization."""
        self.moved = None
        """A path whose content is found without it."""

    def add(self, name, version, *files, day="2026-10-01", yanked=False, at=None):
        held = self.held if at is None else self.variants.setdefault(at, {})
        held.setdefault(name, {})[version] = (files, day, yanked)

    def files(self):
        return {
            filename: body
            for held in (self.held, *self.variants.values())
            for each in held.values()
            for files, _, _ in each.values()
            for filename, body in files
        }

    def simple(self, name, held=None):
        held = self.held if held is None else held
        entries = [
            {
                "filename": filename,
                "url": f"/files/{filename}",
                "hashes": {"sha256": hashlib.sha256(body).hexdigest()},
                "upload-time": f"{day}T10:00:00Z",
            }
            for files, day, _ in held[name].values()
            for filename, body in files
        ]
        if not self.html:
            return "application/vnd.pypi.simple.v1+json", json.dumps({"files": entries}).encode()
        links = (f'<a href="{e["url"]}#sha256={e["hashes"]["sha256"]}">{e["filename"]}</a>' for e in entries)
        return "text/html", "\n".join(links).encode()

    def api(self, name):
        releases = {
            version: [{"upload_time": f"{day}T10:00:00", "yanked": yanked, "filename": f} for f, _ in files]
            for version, (files, day, yanked) in self.held[name].items()
        }
        return "application/json", json.dumps({"releases": releases}).encode()

    @contextlib.contextmanager
    def served(self):
        """Serve on a free port of 127.0.0.1; yields the URL of the Simple API."""
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def send(self, kind, body, status=200, more=()):
                self.send_response(status)
                for key, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *more):
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "HEAD":
                    return
                self.wfile.write(body)
                index.bytes_sent += len(body)

            def do_HEAD(self):  # uv asks so for a wheel's size
                self.do_GET()

            def do_GET(self):
                index.asked.append(self.path)
                parts = urllib.parse.unquote(self.path).strip("/").split("/")
                files = index.files()
                if index.login and self.headers.get("Authorization") != index.login:
                    self.send("text/plain", b"who are you?", 401)
                elif index.moved and self.path.startswith(index.moved):
                    self.send("text/plain", b"", 301, [("Location", self.path.removeprefix(index.moved))])
                elif parts[0] == "simple" and parts[1] in index.held:
                    self.send(*index.simple(parts[1]))
                elif parts[0] == "whl" and parts[2] in index.variants.get(parts[1], {}):
                    self.send(*index.simple(parts[2], index.variants[parts[1]]))
                elif parts[0] == "pypi" and parts[1] in index.held:
                    self.send(*index.api(parts[1]))
                elif parts[0] == "files" and parts[1] in files:
                    body = files[parts[1]]
                    asked = self.headers.get("Range")
                    if asked and index.ranges:
                        start, _, end = asked.removeprefix("bytes=").partition("-")
                        part = body[int(start) : int(end) + 1]
                        span = f"bytes {start}-{int(start) + len(part) - 1}/{len(body)}"
                        self.send("application/octet-stream", part, 206, [("Content-Range", span)])
                    else:
                        self.send("application/octet-stream", body)
                elif parts[0] == "files" and parts[1].endswith(".metadata") and index.sidecars:
                    with zipfile.ZipFile(io.BytesIO(files[parts[1].removesuffix(".metadata")])) as archive:
                        name = next(n for n in archive.namelist() if n.endswith("METADATA"))
                        self.send("text/plain", archive.read(name))
                else:
                    self.send("text/plain", b"not here", 404)

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
