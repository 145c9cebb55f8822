import json
import os
import re
from pathlib import Path

import pytest

from envbuild.errors import DataError, HostError
from envbuild.paths import data_dir
from envbuild.settings import LIST_KEYS, Settings, config_path, load_settings, redact

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


class Machine:
    """A separate home, /etc and environment."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.root = folder / "root"
        self.home.mkdir()
        (self.root / "etc").mkdir(parents=True)
        self.env = {"HOME": str(self.home), "TMPDIR": str(folder)}

    def write(self, path: str, text: str) -> Path:
        file = (self.root / path[1:]) if path.startswith("/") else self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def config(self, text: str) -> Path:
        return self.write(".config/envbuild/config.toml", text)

    def load(self, **env: str) -> Settings:
        return load_settings(environ=self.env | env, root=self.root)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("sys.prefix", str(tmp_path / "no-venv"))
    return Machine(tmp_path)


def test_a_bare_machine_has_the_defaults(machine: Machine) -> None:
    settings = machine.load()
    assert settings.index_url == "https://pypi.org/simple"
    assert settings.torch_index == "https://download.pytorch.org/whl"
    assert settings.debian_mirror == "http://deb.debian.org/debian"
    assert settings.cache_dir == machine.home / ".cache" / "envbuild"
    assert settings.registry is settings.jobs is settings.ca_bundle is None
    assert {settings.origin(key) for key in Settings.model_fields} == {"default"}
    assert settings.notices == ()


def test_environment_beats_file_beats_machine_beats_default(machine: Machine) -> None:
    pip = machine.write(".config/pip/pip.conf", "[global]\nindex-url = https://pip.example/simple/\n")
    assert machine.load().index_url == "https://pip.example/simple"
    assert machine.load().origin("index_url") == str(pip)

    env = {"PIP_INDEX_URL": "https://pip-env.example/simple"}
    assert machine.load(**env).origin("index_url") == "PIP_INDEX_URL"
    env["UV_DEFAULT_INDEX"] = "acme=https://uv.example/simple"
    assert machine.load(**env).index_url == "https://uv.example/simple"

    config = machine.config('index_url = "https://file.example/simple"\njobs = 3\n')
    settings = machine.load(**env)
    assert (settings.index_url, settings.origin("index_url")) == ("https://file.example/simple", str(config))

    settings = machine.load(**env, ENVBUILD_INDEX_URL="https://own.example/simple", ENVBUILD_JOBS="5")
    assert (settings.index_url, settings.origin("index_url")) == ("https://own.example/simple", "ENVBUILD_INDEX_URL")
    assert settings.jobs == 5


def test_config_path_follows_the_variable_then_xdg_then_the_home() -> None:
    assert config_path({"HOME": "/h"}) == Path("/h/.config/envbuild/config.toml")
    assert config_path({"HOME": "/h", "XDG_CONFIG_HOME": "/x"}) == Path("/x/envbuild/config.toml")
    assert config_path({"HOME": "/h", "XDG_CONFIG_HOME": "relative"}) == Path("/h/.config/envbuild/config.toml")
    assert config_path({"HOME": "/h", "ENVBUILD_CONFIG": "/e.toml"}) == Path("/e.toml")


def test_a_named_file_that_is_absent_is_an_error_and_the_usual_one_is_not(machine: Machine) -> None:
    machine.load()
    with pytest.raises(DataError, match="that ENVBUILD_CONFIG names does not exist") as caught:
        machine.load(ENVBUILD_CONFIG="/nowhere/config.toml")
    assert caught.value.where == "/nowhere/config.toml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('index_ur = "https://x"', "'index_ur' is not a setting"),
        ('index_url = "pypi.org"', "index_url: it must be a URL"),
        ('index_url = "https://"', "index_url: it must be a URL"),
        ('index_url = "https:///simple"', "index_url: it must be a URL"),
        ('index_url = "https://me@/simple"', "index_url: it must be a URL"),
        ('index_url = "https://:8080"', "index_url: it must be a URL"),
        ('index_url = "file://"', "index_url: it must be a URL"),
        ('http_proxy = ""', "http_proxy: it names no host"),
        ('http_proxy = "http://:3128"', "http_proxy: it names no host"),
        ('http_proxy = "http://me:x@"', "http_proxy: it names no host"),
        ('builder = "--help"', "builder: it must be a builder's name"),
        ('builder = ""', "builder: it must be a builder's name"),
        ('trusted_identities = ["ci,https://,a@acme.example"]', "trusted_identities: the issuer must name a host"),
        ("jobs = 0", "jobs: Input should be greater than or equal to 1"),
        ('jobs = "many"', "jobs: Input should be a valid integer"),
        ('sources = "gone"', "sources: there is no folder"),
        ('ca_bundle = "gone.pem"', "ca_bundle: there is no file"),
        ('find_links = ["gone"]', "find_links: there is no folder"),
        ('registry = "https://ghcr.io/acme"', "registry: it must be a host and an optional path"),
        ('registry = "ghcr.io/acme:tag"', "registry: it must be a host and an optional path"),
        ('registry = "ghcr.io/acme\\n"', "registry: it must be a host and an optional path"),
        ("index_url =", "cannot be read"),
    ],
)
def test_a_bad_file_is_named_with_its_key(machine: Machine, text: str, says: str) -> None:
    config = machine.config(text)
    with pytest.raises(DataError) as caught:
        machine.load()
    assert says in caught.value.what
    assert caught.value.where == str(config)
    assert caught.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "http://mirror.example:8080/a@b",
        "https://me:pa/ss@mirror.example/x",
        "https://[::1]:8443/simple",
        "https://my_mirror/simple",
        "file:///srv/wheels",
    ],
)
def test_an_address_of_a_host_or_a_folder_is_taken(machine: Machine, url: str) -> None:
    assert machine.load(ENVBUILD_INDEX_URL=url).index_url == url


def test_a_misspelt_key_gets_its_neighbour(machine: Machine) -> None:
    machine.config('debian_miror = "http://x"')
    with pytest.raises(DataError) as caught:
        machine.load()
    assert "did you mean debian_mirror?" in (caught.value.hint or "")
    machine.config("")
    settings = machine.load(ENVBUILD_DEBIAN_MIROR="http://x")
    assert "ENVBUILD_DEBIAN_MIROR is not a setting: did you mean debian_mirror?" in settings.notices[0]


def test_the_shell_renderings_own_variables_are_no_mistake(machine: Machine) -> None:
    usage = data_dir("dockerfiles").joinpath("shell.j2").read_text().partition("set -eu")[0]
    names = set(re.findall(r"ENVBUILD_[A-Z_]+", usage))
    assert {"ENVBUILD_PREFIX", "ENVBUILD_UV"} <= names
    own = {name: "1" for name in names if name.removeprefix("ENVBUILD_").lower() not in Settings.model_fields}
    assert not machine.load(**own).notices


def test_a_bad_variable_is_named(machine: Machine) -> None:
    with pytest.raises(DataError) as caught:
        machine.load(ENVBUILD_MEMORY_GIB="lots")
    assert caught.value.where == "ENVBUILD_MEMORY_GIB"


def test_paths_of_the_file_start_at_its_folder_and_at_the_home(machine: Machine) -> None:
    (machine.home / ".config/envbuild/src").mkdir(parents=True)
    (machine.home / "debs").mkdir()
    machine.config(
        'sources = "src"\ndebs = "~/debs"\nfind_links = ["src", "https://wheels.example/x.html", '
        f'"file://{machine.home}/debs"]\ncache_dir = "c"\n'
    )
    settings = machine.load()
    assert settings.sources == machine.home / ".config/envbuild/src"
    assert settings.debs == machine.home / "debs"
    assert settings.find_links == (str(settings.sources), "https://wheels.example/x.html", str(settings.debs))
    assert settings.cache_dir == machine.home / ".config/envbuild/c"


def test_pip_files_are_read_in_pips_order(machine: Machine) -> None:
    machine.write(
        "/etc/pip.conf",
        "[global]\nindex-url = https://etc.example\nextra-index-url =\n  https://a.example\n  https://b.example\n",
    )
    settings = machine.load()
    assert settings.index_url == "https://etc.example"
    assert settings.extra_index_urls == ("https://a.example", "https://b.example")
    machine.write(
        ".pip/pip.conf",
        "[global]\nindex_url = https://global.example\n[install]\nindex-url = https://install.example\n",
    )
    assert machine.load().index_url == "https://install.example"
    named = machine.write("named.conf", "[global]\nindex-url = https://named.example\n")
    assert machine.load(PIP_CONFIG_FILE=str(named)).index_url == "https://named.example"
    assert machine.load(PIP_CONFIG_FILE=os.devnull).index_url == "https://pypi.org/simple"


def test_a_value_of_the_machine_that_cannot_be_is_passed_over_with_a_notice(machine: Machine) -> None:
    bundle = machine.write("ca.pem", "")
    settings = machine.load(SSL_CERT_FILE="/gone.pem", PIP_CERT=str(bundle), PIP_FIND_LINKS="/gone-wheels")
    assert (settings.ca_bundle, settings.origin("ca_bundle")) == (bundle, "PIP_CERT")
    assert settings.find_links == ()
    assert "ca_bundle: passing over the value of SSL_CERT_FILE: there is no file /gone.pem" in settings.notices
    assert any("find_links" in notice and "/gone-wheels" in notice for notice in settings.notices)


def test_proxies_come_from_the_usual_variables(machine: Machine) -> None:
    settings = machine.load(
        https_proxy="proxy.example:3128", HTTP_PROXY="http://p.example", no_proxy="localhost,.example"
    )
    assert settings.https_proxy == "http://proxy.example:3128"
    assert settings.http_proxy == "http://p.example"
    assert settings.no_proxy == "localhost,.example"
    assert settings.origin("https_proxy") == "https_proxy"


DEB822 = """\
# a comment
Types: deb deb-src
URIs: http://mirror.example/debian/
Suites: bookworm
  bookworm-updates
Components: main

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main
"""


def test_apt_mirrors_in_both_formats(machine: Machine) -> None:
    machine.write("/etc/os-release", "ID=debian\nVERSION_CODENAME=bookworm\n")
    sources = machine.write("/etc/apt/sources.list.d/debian.sources", DEB822)
    settings = machine.load()
    assert settings.debian_mirror == "http://mirror.example/debian"
    assert settings.debian_security_mirror == "http://security.example/debian-security"
    assert settings.origin("debian_mirror") == str(sources)
    assert settings.origin("ubuntu_mirror") == "default"

    sources.write_text("Enabled: no\n" + DEB822)
    assert machine.load().debian_mirror == "http://deb.debian.org/debian"

    machine.write(
        "/etc/apt/sources.list",
        "deb cdrom:[x]/ bookworm main\n#deb http://no.example bookworm main\ndeb [arch=amd64 signed-by=/k] http://line.example/debian bookworm main\n",
    )
    assert machine.load().debian_mirror == "http://line.example/debian"


def test_the_mirror_of_another_release_is_not_taken(machine: Machine) -> None:
    machine.write("/etc/os-release", "ID=debian\nVERSION_CODENAME=trixie\n")
    machine.write("/etc/apt/sources.list.d/debian.sources", DEB822)
    assert machine.load().origin("debian_mirror") == "default"


def test_mirror_lists_of_cloud_images_and_ubuntu(machine: Machine) -> None:
    machine.write("/etc/os-release", 'ID="ubuntu"\nVERSION_CODENAME=noble\n')
    machine.write("/etc/apt/mirrors/all.list", "https://first.example/ubuntu\nhttps://second.example/ubuntu\n")
    machine.write(
        "/etc/apt/sources.list.d/ubuntu.sources",
        "Types: deb\nURIs: mirror+file:/etc/apt/mirrors/all.list\nSuites: noble\n",
    )
    settings = machine.load()
    assert settings.ubuntu_mirror == "https://first.example/ubuntu"
    assert settings.origin("debian_mirror") == "default"


SECRET = "s3cr3t-t0ken"


def test_credentials_are_kept_for_use_and_never_shown(machine: Machine) -> None:
    machine.config(
        f'index_url = "https://me:{SECRET}@index.example/simple"\nengine_host = "ssh://me:{SECRET}@builder"\n'
    )
    settings = machine.load(
        https_proxy=f"me:{SECRET}@proxy.example:3128", ENVBUILD_FIND_LINKS=f"https://{SECRET}@wheels.example/"
    )
    assert SECRET in settings.index_url
    assert settings.redacted()["index_url"] == "https://***@index.example/simple"
    assert settings.redacted()["find_links"] == ["https://***@wheels.example/"]
    assert SECRET not in json.dumps(settings.redacted()) + repr(settings) + str(settings)


@pytest.mark.parametrize("key", ["index_url", "registry", "jobs", "sources", "nonsense"])
def test_errors_show_no_credentials(machine: Machine, key: str) -> None:
    machine.config(f'{key} = "ftp://me:{SECRET}@index.example"\n')
    with pytest.raises(DataError) as caught:
        machine.load()
    assert SECRET not in str(caught.value)


def test_redact_cleans_free_text_and_keeps_account_names() -> None:
    assert (
        redact("GET https://u:p@a.example/x and http://tok@b/y.") == "GET https://***@a.example/x and http://***@b/y."
    )
    assert redact("ssh://me@host and mail me@host") == "ssh://me@host and mail me@host"


def test_a_read_only_home_moves_the_cache_and_says_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    access = os.access
    # The suite may run as root, for whom no mode bit forbids writing.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != machine.home and access(path, mode))
    settings = machine.load()
    assert settings.cache_dir == tmp_path / f"envbuild-{os.getuid()}"
    assert f"{machine.home}/.cache/envbuild cannot be written" in settings.notices[0]
    assert "ENVBUILD_CACHE_DIR" in settings.notices[0]
    with pytest.raises(HostError) as caught:
        machine.load(ENVBUILD_CACHE_DIR=str(machine.home / "mine"))
    assert caught.value.where == "cache_dir from ENVBUILD_CACHE_DIR"


def test_a_user_without_an_account_has_settings_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    del machine.env["HOME"]
    settings = machine.load()
    assert settings.cache_dir == Path(machine.env["TMPDIR"]) / "envbuild-987654"
    assert "no home" in settings.notices[0]


def test_loading_writes_nothing(machine: Machine) -> None:
    before = sorted(machine.home.rglob("*"))
    machine.load()
    assert sorted(machine.home.rglob("*")) == before


def _reference() -> str:
    rows = ["| key | value | default | what |", "|---|---|---|---|"]
    for key, field in Settings.model_fields.items():
        kind = (
            "list of text"
            if key in LIST_KEYS
            else "whole number"
            if key == "jobs"
            else "number"
            if key == "memory_gib"
            else "path"
            if key in {"ca_bundle", "sources", "debs", "cache_dir"}
            else "text"
        )
        default = "`$XDG_CACHE_HOME/envbuild`" if key == "cache_dir" else f"`{field.default}`" if field.default else "-"
        rows.append(f"| `{key}` | {kind} | {default} | {field.description} |")
    return "\n".join(rows)


def test_the_page_lists_every_setting_as_the_model_has_it() -> None:
    assert _reference() in DOCS.read_text(), f"docs/reference/settings.md should hold this table:\n{_reference()}"


def test_the_example_of_the_page_loads(machine: Machine) -> None:
    page = DOCS.read_text()
    example = page.split("```toml\n")[1].split("```")[0]
    for name in ("sources", "debs", "wheels"):
        (machine.home / name).mkdir()
    machine.write("company-ca.pem", "")
    (machine.home / ".config" / "envbuild").mkdir(parents=True)
    (machine.home / ".config" / "envbuild" / "release.pub").touch()
    machine.config(example)
    settings = machine.load()
    assert settings.registry == "ghcr.io/acme/envbuild"
    assert settings.index_url.startswith("https://")


URL_KEYS = (
    "index_url",
    "extra_index_urls",
    "torch_index",
    "find_links",
    "debian_mirror",
    "debian_security_mirror",
    "ubuntu_mirror",
    "http_proxy",
    "https_proxy",
)
ODD = ['"', "'", "\\", "\n", "\r", "\t", " ", "`", "\x1b", "\0", "\u2028", "\u202e"]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("key", URL_KEYS)
def test_an_address_that_could_end_where_it_is_written_is_refused(machine: Machine, key: str, odd: str) -> None:
    value = f"http://me:secret@mirror.example/a{odd}b"
    text = json.dumps([value] if key in LIST_KEYS else value)
    machine.config(f"{key} = {text}\n")
    with pytest.raises(DataError) as caught:
        machine.load()
    assert key in caught.value.what
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("odd", ['"', "\\", "\n", "'"])
def test_a_list_of_hosts_holds_no_quote_and_no_line_feed(machine: Machine, odd: str) -> None:
    assert machine.load(ENVBUILD_NO_PROXY="localhost, .acme.example").no_proxy == "localhost, .acme.example"
    machine.config(f"no_proxy = {json.dumps('a' + odd + 'b')}\n")
    with pytest.raises(DataError, match="no_proxy"):
        machine.load()


def test_an_odd_value_of_the_machine_is_passed_over_and_reported(machine: Machine) -> None:
    settings = machine.load(http_proxy='http://me:secret@p:1" ; x "')
    assert settings.http_proxy is None
    assert "passing over the value of http_proxy" in settings.notices[0]
    assert "secret" not in settings.notices[0]


def fallback(machine: Machine) -> Path:
    """Load with a home that does not exist, so that the cache goes to $TMPDIR."""
    return machine.load(HOME="/dev/null/none", XDG_CACHE_HOME="").cache_dir


def test_a_fallback_cache_is_made_for_this_user_alone(machine: Machine, tmp_path: Path) -> None:
    place = tmp_path / f"envbuild-{os.getuid()}"
    assert fallback(machine) == place
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o755)  # of a version that made it so
    assert fallback(machine) == place
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["link", "link to nothing", "file", "group writes", "all write"])
def test_a_fallback_cache_that_another_may_have_made_is_not_used(machine: Machine, tmp_path: Path, how: str) -> None:
    place, elsewhere = tmp_path / f"envbuild-{os.getuid()}", tmp_path / "elsewhere"
    if how.startswith("link"):
        place.symlink_to(elsewhere)
        if how == "link":
            elsewhere.mkdir(mode=0o700)
    elif how == "file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o770 if how == "group writes" else 0o777)
    chosen = fallback(machine)
    assert chosen != place
    assert chosen.parent == tmp_path
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert not chosen.is_symlink()


def test_a_cache_that_the_user_chose_may_be_a_link(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "large")
    assert machine.load(ENVBUILD_CACHE_DIR=str(tmp_path / "link")).cache_dir == tmp_path / "link"
