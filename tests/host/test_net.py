"""Downloads and requests against hosts that misbehave."""

import base64
import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import gzip
import hashlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_server import FaultServer

from envbuild.errors import DataError, HostError, LockError
from envbuild.net import http
from envbuild.net.download import FILE, download
from envbuild.net.exchange import PAGE
from envbuild.net.fetch import fetch
from envbuild.settings import load_settings

BODY = random.Random(15).randbytes(1 << 20)  # the same in every process
SHA = hashlib.sha256(BODY).hexdigest()
SECRET = "hunter2-secret"
QUICK = dataclasses.replace(FILE, pause_s=0.01, stall_s=0.5, connect_s=2, total_s=20)


def settings_of(folder, **environ):
    return load_settings(environ={"HOME": str(folder), **environ}, root=folder)


@pytest.fixture
def settings(tmp_path):
    return settings_of(tmp_path)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A file with a key and a certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificate")
    both = folder / "both.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    both.write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    return both


def left(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def good(fault, number):
    fault.send(BODY)


# --- a name leads nowhere -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["%2e%2e%2f%2e%2e%2fescaped", "..", "x/%2e%2e", "%2fescaped", "a%00b", "", "-x", ".hidden", "a%0ab", "a%5c..b"],
)
def test_a_file_name_that_is_none_is_refused_before_anything_is_asked(settings, tmp_path, path):
    with FaultServer(good) as host:
        with pytest.raises(LockError, match="cannot be downloaded"):
            download(settings, f"{host.url}/d/{path}", SHA, tmp_path / "cache/files")
        assert host.seen == []
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("sha256", ["../../x", "", SHA.upper(), SHA + "\n", SHA[:-1]])
def test_a_hash_that_is_none_is_refused(settings, tmp_path, sha256):
    with FaultServer(good) as host, pytest.raises(LockError, match="cannot be downloaded"):
        download(settings, f"{host.url}/x.whl", sha256, tmp_path / "files")
    assert left(tmp_path) == []


def test_usual_names_are_kept(settings, tmp_path):
    with FaultServer(good) as host:
        for name in ("a-1!2.0%2Bcu126-py3-none-any.whl", "b~1.tar.gz", "c_d.zip"):
            path, found = download(settings, f"{host.url}/{name}", SHA, tmp_path / "files")
            assert (path.read_bytes(), found) == (BODY, SHA)
            assert path == tmp_path / "files" / SHA / name.replace("%2B", "+")


def test_a_link_in_the_cache_is_not_followed(settings, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.whl").write_bytes(b"mine")
    files = tmp_path / "files"
    with FaultServer(good) as host:
        files.mkdir()
        (files / SHA).symlink_to(outside)
        path, _ = download(settings, f"{host.url}/x.whl", SHA, files)
        assert path.read_bytes() == BODY
        path.unlink()
        path.symlink_to(outside / "x.whl")
        path, _ = download(settings, f"{host.url}/x.whl", SHA, files)
        assert (path.read_bytes(), path.is_symlink()) == (BODY, False)
    assert (outside / "x.whl").read_bytes() == b"mine"


# --- many at once ---------------------------------------------------------------------------------------------------------


def slowly(fault, number):
    fault.raw(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode())
    for at in range(0, len(BODY), 1 << 17):
        fault.raw(BODY[at : at + (1 << 17)])
        time.sleep(0.01)


def _in_a_process(folder, url, sha256):
    path, found = download(settings_of(folder), url, sha256, folder / "files")
    return found == SHA and path.read_bytes() == BODY


@pytest.mark.parametrize("sha256", [SHA, None], ids=["by its hash", "whatever comes"])
def test_36_threads_get_the_right_file(settings, tmp_path, sha256):
    with FaultServer(slowly) as host, concurrent.futures.ThreadPoolExecutor(36) as pool:
        calls = [pool.submit(_in_a_process, tmp_path, f"{host.url}/x.whl", sha256) for _ in range(36)]
        assert [call.result() for call in calls] == [True] * 36
    assert left(tmp_path / "files") == [f"{SHA}/x.whl"]


def test_36_processes_get_the_right_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    with FaultServer(slowly) as host, concurrent.futures.ProcessPoolExecutor(6, mp_context=context) as pool:
        calls = [pool.submit(_in_a_process, tmp_path, f"{host.url}/x.whl", SHA) for _ in range(36)]
        assert [call.result() for call in calls] == [True] * 36
    assert left(tmp_path / "files") == [f"{SHA}/x.whl"]


def test_two_contents_under_one_name_do_not_meet(settings, tmp_path):
    contents = {f"/{n}/x.whl": os.urandom(1 << 18) for n in range(12)}

    def each(fault, number):
        fault.send(contents[fault.path])

    def get(host, path):
        kept, found = download(settings, host.url + path, None, tmp_path / "files")
        return kept.read_bytes() == contents[path] and found == hashlib.sha256(contents[path]).hexdigest()

    with FaultServer(each) as host, concurrent.futures.ThreadPoolExecutor(36) as pool:
        calls = [pool.submit(get, host, path) for path in [*contents] * 3]
        assert [call.result() for call in calls] == [True] * 36


# --- what passes is tried again, within bounds ----------------------------------------------------------------------------


def truncated(fault):
    fault.raw(f"HTTP/1.1 200 OK\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:1000])


def truncated_chunks(fault):
    fault.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n")


def stalled(fault):
    truncated(fault)
    fault.wait()


FAULTS = {
    "reset": lambda fault: fault.reset(),
    "reset within": lambda fault: (truncated(fault), fault.reset()),
    "truncated": truncated,
    "truncated chunks": truncated_chunks,
    "stall": stalled,
    "stalled head": lambda fault: (fault.raw(b"HTTP/1.1 200 OK\r\nContent-"), fault.wait()),
    "no HTTP": lambda fault: fault.raw(b"\0\0\0\0 what?\r\n\r\n"),
    "503": lambda fault: fault.send(b"later", 503, "Busy"),
    "429": lambda fault: fault.send(b"later", 429, "Slow down", Retry_After="0"),
    "429 with a day": lambda fault: fault.send(b"", 429, "Slow", Retry_After="Mon, 23 Nov 1998 00:00:00 GMT"),
    "429 with nonsense": lambda fault: fault.send(b"", 429, "Slow", Retry_After="9" * 5000),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes(settings, tmp_path, fault):
    def answer(now, number):
        FAULTS[fault](now) if number <= 2 else now.send(BODY)

    bounds = dataclasses.replace(QUICK, longest_pause_s=0.5)
    with FaultServer(answer) as host:
        path, _ = download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files", bounds=bounds)
        assert path.read_bytes() == BODY
        assert host.count("/x.whl") == 3
    assert left(tmp_path / "files") == [f"{SHA}/x.whl"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_is_one_message_and_nothing_is_left(settings, tmp_path, fault):
    bounds = dataclasses.replace(QUICK, attempts=3, longest_pause_s=0.1)
    with FaultServer(lambda now, number: FAULTS[fault](now)) as host:
        with pytest.raises((HostError, LockError), match=r"127\.0\.0\.1") as caught:
            download(settings, f"{host.url}/x.whl?token={SECRET}", SHA, tmp_path / "files", bounds=bounds)
        assert host.count(f"/x.whl?token={SECRET}") == 3
    assert SECRET not in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()
    assert left(tmp_path / "files") == []


def test_the_pause_grows_and_what_a_host_asks_for_is_bounded(settings, monkeypatch):
    pauses = []
    monkeypatch.setattr(http.time, "sleep", pauses.append)

    def busy(fault, number):
        fault.send(b"", 503, "Busy", **({"Retry_After": "86400"} if number == 3 else {}))

    with FaultServer(busy) as host, pytest.raises(HostError, match="503"):
        fetch(settings, f"{host.url}/x/")
    assert len(pauses) == PAGE.attempts - 1
    assert 0.5 <= pauses[0] < 1 <= pauses[1] < 2
    assert pauses[2] == PAGE.longest_pause_s
    assert 4 <= pauses[3] <= 5


def test_what_does_not_pass_is_asked_once(settings, tmp_path):
    with FaultServer(lambda fault, number: fault.send(b"", 404, "Not Found")) as host:
        with pytest.raises(LockError, match="404 Not Found"):
            download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files")
        assert len(host.seen) == 1
    started = time.monotonic()
    with pytest.raises(HostError, match="Connection refused"):
        download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files")
    assert time.monotonic() - started < 2


def trickle(head):
    def answer(fault, number):
        fault.raw(head)
        while not fault.ended:
            fault.raw(b"0")
            time.sleep(0.05)

    return answer


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 ",
    ],
)
def test_a_trickle_ends(settings, tmp_path, head):
    bounds = dataclasses.replace(QUICK, total_s=1.5, attempts=2)
    started = time.monotonic()
    with FaultServer(trickle(head)) as host, pytest.raises(HostError, match=r"within 1.5 s|nothing came"):
        download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files", bounds=bounds)
    assert time.monotonic() - started < 6
    assert left(tmp_path / "files") == []


def endless(fault, number):
    fault.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
    while not fault.ended:
        fault.raw(b"\0" * 65536)


def test_a_body_without_end_is_cut_off(settings, tmp_path):
    small = dataclasses.replace(QUICK, size=1 << 20)
    with FaultServer(endless) as host:
        with pytest.raises(LockError, match="more than 1 MiB"):
            download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files", bounds=small)
        with pytest.raises(LockError, match="more than 1 MiB"):
            fetch(settings, f"{host.url}/simple/", bounds=small)
        assert len(host.seen) == 2
    assert left(tmp_path / "files") == []


def test_a_body_announced_as_too_large_is_not_read(settings, tmp_path):
    def huge(fault, number):
        fault.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n")
        fault.wait()

    with FaultServer(huge) as host, pytest.raises(LockError, match="sends 99999999999999 bytes"):
        download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files")


def test_a_bomb_is_not_unpacked(settings):
    bomb = gzip.compress(b"\0" * (32 << 20))
    with FaultServer(lambda fault, number: fault.send(bomb, Content_Encoding="gzip")) as host:
        body, _ = fetch(settings, f"{host.url}/x/")
    assert body == bomb
    assert host.seen[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" * 200_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\nabcde",
        b"HTTP/1.1 999999999999 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffffff\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
        b"",
    ],
)
def test_a_head_that_is_none_is_one_message(settings, head):
    bounds = dataclasses.replace(PAGE, pause_s=0.01, stall_s=0.5, total_s=10, attempts=2)
    with FaultServer(lambda fault, number: fault.raw(head)) as host, pytest.raises((HostError, LockError)) as caught:
        fetch(settings, f"{host.url}/x/", bounds=bounds)
    assert str(caught.value).replace("\n", "").isprintable()


# --- what is kept ---------------------------------------------------------------------------------------------------------


def test_a_kept_file_is_used_and_a_damaged_one_replaced(settings, tmp_path):
    with FaultServer(good) as host:
        path, _ = download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files")
        download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files")
        assert len(host.seen) == 1
        path.write_bytes(BODY[:-1] + b"?")
        assert download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files")[0].read_bytes() == BODY
        assert len(host.seen) == 2
        path.unlink()
        path.mkdir()
        assert download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files")[0].read_bytes() == BODY


def test_a_file_of_another_hash_is_not_kept(settings, tmp_path):
    with FaultServer(good) as host, pytest.raises(LockError, match="is not the file that the lock names"):
        download(settings, f"{host.url}/x.whl", "0" * 64, tmp_path / "files")
    assert left(tmp_path / "files") == []


_LIMITED = """
import resource, sys
from pathlib import Path
from envbuild.net.download import download
from envbuild.settings import load_settings
from envbuild.errors import HostError
folder = Path(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    download(load_settings(environ={"HOME": str(folder)}, root=folder), sys.argv[1], None, folder / "files")
except HostError as error:
    print(error)
"""


def test_a_disk_that_takes_no_more_is_one_message_and_leaves_nothing(tmp_path):
    with FaultServer(good) as host:
        done = subprocess.run(
            [sys.executable, "-c", _LIMITED, f"{host.url}/x.whl", tmp_path], capture_output=True, text=True, check=True
        )
    assert "x.whl cannot be written: File too large" in done.stdout, done
    assert left(tmp_path / "files") == []


def test_a_full_disk_says_so(settings, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("envbuild.net.download.path_below", full)
    with FaultServer(good) as host, pytest.raises(HostError, match="the disk is full"):
        download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files")
    assert left(tmp_path / "files") == []


def test_a_folder_that_cannot_be_made_is_one_message(settings, tmp_path):
    (tmp_path / "taken").write_text("")
    with FaultServer(good) as host, pytest.raises(HostError, match="cannot be written"):
        download(settings, f"{host.url}/x.whl", SHA, tmp_path / "taken/files")


_WAITING = """
import sys
from pathlib import Path
from envbuild.net.download import download
from envbuild.settings import load_settings
folder = Path(sys.argv[2])
download(load_settings(environ={"HOME": str(folder)}, root=folder), sys.argv[1], None, folder / "files")
"""


@contextlib.contextmanager
def waiting(host, folder):
    """Yield a process that is in the middle of a download."""
    command = [sys.executable, "-c", _WAITING, f"{host.url}/x.whl", folder]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(400):
            if any((folder / "files").glob("*.part")) and next((folder / "files").glob("*.part")).stat().st_size:
                break
            time.sleep(0.02)
        else:
            pytest.fail("no part appeared")
        yield process
    finally:
        process.kill()
        process.wait()


def hold(fault, number):
    stalled(fault) if fault.path == "/x.whl" else fault.send(BODY)


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path):
    with FaultServer(hold) as host, waiting(host, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        process.wait(10)
    assert left(tmp_path / "files") == []


def test_what_a_killed_run_left_goes_and_a_living_run_s_part_stays(settings, tmp_path):
    files = tmp_path / "files"
    with FaultServer(hold) as host, waiting(host, tmp_path) as living:
        (mine,) = files.glob("*.part")
        killed = files / "0123.part"
        killed.write_bytes(b"x")
        old = files / SHA / "x.whl.part"  # as earlier versions named it
        old.parent.mkdir()
        old.write_bytes(b"x")
        young = files / "4567.part"
        young.write_bytes(b"x")
        for part in (mine, killed, old):
            os.utime(part, (1, 1))
        download(settings, f"{host.url}/y.whl", SHA, files)
        assert living.poll() is None
        assert left(files) == sorted([mine.name, young.name, f"{SHA}/y.whl"])
    os.utime(mine, (1, 1))  # killed meanwhile
    with FaultServer(hold) as host:
        download(settings, f"{host.url}/z.whl", SHA, files)
    assert not mine.exists()


def test_a_part_that_is_a_link_is_not_followed(settings, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    (tmp_path / "mine").write_text("mine")
    (files / "a.part").symlink_to(tmp_path / "mine")
    os.mkfifo(files / "b.part")
    with FaultServer(good) as host:
        download(settings, f"{host.url}/x.whl", SHA, files)
    assert (tmp_path / "mine").read_text() == "mine"


# --- file:/// ------------------------------------------------------------------------------------------------------------


def test_a_file_of_this_machine(settings, tmp_path):
    (tmp_path / "x.whl").write_bytes(BODY)
    path, _ = download(settings, f"file://{tmp_path}/x.whl", SHA, tmp_path / "files")
    assert path.read_bytes() == BODY
    os.mkfifo(tmp_path / "fifo.whl")
    for name in ("fifo.whl", "none.whl", "files"):
        with pytest.raises(HostError, match="cannot be read"):
            download(settings, f"file://{tmp_path}/{name}", SHA, tmp_path / "files")


# --- logins and redirects -------------------------------------------------------------------------------------------------


def redirecting(target, status=302):
    def answer(fault, number):
        if fault.path.startswith("/old"):
            fault.send(b"", status, "Moved", Location=target)
        else:
            fault.send(BODY)

    return answer


def with_login(url):
    return url.replace("://", f"://me:{SECRET}@")


BASIC = "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()


def authorizations(host):
    return [headers.get("Authorization") for _, headers in host.seen]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_port_or_host_gets_no_login(tmp_path, status):
    with FaultServer(good) as other, FaultServer(redirecting(f"{other.url}/x.whl", status)) as host:
        settings = settings_of(tmp_path, ENVBUILD_INDEX_URL=with_login(host.url))
        download(settings, f"{host.url}/old/x.whl", SHA, tmp_path / "files")
        fetch(settings, f"{host.url}/old/x.whl")
        assert authorizations(host) == [BASIC] * 2
        assert authorizations(other) == [None] * 2


def test_a_redirect_that_carries_a_login_does_not_have_it_sent(settings):
    with FaultServer(good) as other, FaultServer(redirecting(f"{with_login(other.url)}/x.whl")) as host:
        fetch(settings, f"{host.url}/old/x.whl")
        assert authorizations(other) == [None]


def test_a_redirect_within_the_host_keeps_the_login(tmp_path):
    with FaultServer(redirecting("/new/x.whl")) as host:
        settings = settings_of(tmp_path, ENVBUILD_INDEX_URL=with_login(host.url))
        download(settings, f"{host.url}/old/x.whl", SHA, tmp_path / "files")
        assert authorizations(host) == [BASIC] * 2


def test_from_https_to_http_of_the_same_host(tmp_path, certificate):
    with FaultServer(good) as plain, FaultServer(redirecting(f"{plain.url}/x.whl"), certificate=certificate) as secure:
        trust = {"ENVBUILD_CA_BUNDLE": str(certificate)}
        settings = settings_of(tmp_path, ENVBUILD_INDEX_URL=with_login(secure.url), **trust)
        # the file's hash is known, so nobody on the way can change it
        path, _ = download(settings, f"{secure.url}/old/x.whl", SHA, tmp_path / "files")
        assert path.read_bytes() == BODY
        assert authorizations(plain) == [None]
        assert authorizations(secure) == [BASIC]
        for ask in (fetch, lambda s, url: download(s, url, None, tmp_path / "other")):
            with pytest.raises(LockError, match="redirects from https to http"):
                ask(settings, f"{secure.url}/old/x.whl")
        assert len(plain.seen) == 1


def test_a_certificate_that_is_not_trusted_is_asked_once(settings, certificate):
    with FaultServer(good, certificate=certificate) as secure, pytest.raises(HostError, match="is not trusted"):
        fetch(settings, f"{secure.url}/x.whl")


def test_a_ca_bundle_that_is_none_is_one_message(tmp_path, certificate):
    (tmp_path / "ca.pem").write_text("nonsense")
    settings = settings_of(tmp_path, ENVBUILD_CA_BUNDLE=str(tmp_path / "ca.pem"))
    with FaultServer(good, certificate=certificate) as secure, pytest.raises(HostError, match="the CA bundle"):
        fetch(settings, f"{secure.url}/x.whl")


@pytest.mark.parametrize(
    "target",
    [
        "/old/again",
        "ftp://127.0.0.1/x",
        "file:///etc/passwd",
        "http://[::1",
        "http://127.0.0.1:99999/x",
        "//",
        "http://",
    ],
)
def test_a_redirect_that_leads_nowhere_is_one_message(settings, target):
    with FaultServer(redirecting(target)) as host, pytest.raises(LockError, match="redirects") as caught:
        fetch(settings, f"{host.url}/old/x.whl")
    assert "root:" not in str(caught.value)


@pytest.mark.parametrize("fault", [*FAULTS, "404", "401", "redirect"])
def test_a_login_is_in_no_message(tmp_path, fault, capfd):
    more = {
        "404": lambda now: now.send(b"", 404, f"no {SECRET.upper()}"),
        "401": lambda now: now.send(b"", 401, "who\x1b[31m are you?"),
        "redirect": lambda now: now.send(b"", 302, "Moved", Location=with_login("ftp://127.0.0.1/")),
    }
    bounds = dataclasses.replace(QUICK, attempts=2, longest_pause_s=0.1)
    with FaultServer(lambda now, number: (FAULTS | more)[fault](now)) as host:
        settings = settings_of(tmp_path, ENVBUILD_INDEX_URL=with_login(host.url))
        for ask in (
            lambda: fetch(settings, f"{with_login(host.url)}/x/", bounds=bounds),
            lambda: fetch(settings, f"{host.url}/x/", bounds=bounds),
            lambda: download(settings, f"{host.url}/x.whl", SHA, tmp_path / "files", bounds=bounds),
            lambda: download(settings, f"{with_login(host.url)}/x.whl", SHA, tmp_path / "files", bounds=bounds),
        ):
            with pytest.raises((HostError, LockError)) as caught:
                ask()
            printed = str(caught.value) + repr(caught.value.as_json())
            assert SECRET not in printed
            assert BASIC.removeprefix("Basic ") not in printed
            assert "\x1b" not in printed
    assert capfd.readouterr() == ("", "")


def test_a_proxy_s_login_is_sent_to_it_and_is_in_no_message(tmp_path):
    def proxy(fault, number):
        if fault.path.startswith("http://"):
            fault.send(BODY)
        else:
            fault.send(b"", 407, "who are you")

    with FaultServer(proxy) as host:
        settings = settings_of(
            tmp_path, ENVBUILD_HTTP_PROXY=with_login(host.url), ENVBUILD_HTTPS_PROXY=with_login(host.url)
        )
        assert fetch(settings, "http://pypi.example.org/x/")[0] == BODY
        assert host.seen[0][0] == "http://pypi.example.org/x/"
        assert {k.lower(): v for k, v in host.seen[0][1].items()}["proxy-authorization"] == BASIC
        with pytest.raises(HostError, match="through the proxy") as caught:
            fetch(settings, "https://pypi.example.org/x/", bounds=dataclasses.replace(PAGE, pause_s=0.01))
        assert re.search("407", str(caught.value)), caught.value
        assert SECRET not in str(caught.value)
    with pytest.raises(HostError, match="through the proxy, Connection refused") as caught:
        fetch(settings, "http://pypi.example.org/x/")
    assert SECRET not in str(caught.value)


def test_a_proxy_of_another_kind_is_one_message(tmp_path):
    with pytest.raises(HostError, match="the address of the proxy cannot be used"):
        fetch(settings_of(tmp_path, ENVBUILD_HTTP_PROXY="socks5://127.0.0.1:1"), "http://pypi.example.org/x/")


def test_a_proxy_whose_port_is_no_number_is_refused_with_the_settings(tmp_path):
    with pytest.raises(DataError, match="http_proxy: it names no host, or a port that is no number"):
        settings_of(tmp_path, ENVBUILD_HTTP_PROXY="http://127.0.0.1:port")


def test_the_environment_s_proxy_is_used_where_the_settings_have_none(tmp_path, monkeypatch):
    settings = settings_of(tmp_path)
    with FaultServer(good) as host:
        monkeypatch.setenv("http_proxy", host.url.removeprefix("http://"))
        monkeypatch.setenv("no_proxy", "direct.invalid")
        assert fetch(settings, "http://pypi.example.org/x/")[0] == BODY
        with pytest.raises(HostError, match=r"direct.invalid cannot be reached"):
            fetch(settings, "http://direct.invalid/x/")


def test_a_lock_on_a_part_is_taken(settings, tmp_path):
    """The part of a running download cannot be locked by another."""
    with FaultServer(hold) as host, waiting(host, tmp_path):
        (part,) = (tmp_path / "files").glob("*.part")
        with part.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_http_is_not_loaded_to_show_help():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, envbuild.lock.index, envbuild.net.download\nprint('urllib3' in sys.modules)"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "False"
