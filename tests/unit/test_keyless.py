"""Signatures by identity, made and judged by sigstore's own library against an instance on the loopback interface."""

import json
import subprocess
import sys

import pytest
from sigstore_instance import CI, GITHUB, IDENTITY, Instance

from envbuild.catalog.store import policy_of, signing_policy
from envbuild.errors import DataError, HostError, LockError, UsageError
from envbuild.registry.keyless import identities_of, keyless_signer
from envbuild.registry.keys import make_key_pair, read_private_key
from envbuild.registry.signers import Signature
from envbuild.settings import load_settings

PAYLOAD = b"the payload"


@pytest.fixture
def instance():
    with Instance() as running:
        yield running


@pytest.fixture
def site(instance, tmp_path, monkeypatch):
    """Return what makes settings that trust the instance's authority and its CI; this process is one of its jobs."""
    for name, value in instance.ci.items():
        monkeypatch.setenv(name, value)
    instance.trust(tmp_path / "client.json")
    instance.trust(tmp_path / "root.json")

    def settings(*identities: str, **values: str):
        own = {
            "HOME": str(tmp_path),
            "ENVBUILD_TRUSTED_IDENTITIES": " ".join(identities or (CI,)),
            "ENVBUILD_SIGSTORE_TRUST": str(tmp_path / "client.json"),
            "ENVBUILD_SIGNING_IDENTITY": "ci",
        }
        return load_settings(environ=own | values, root=tmp_path)

    return settings


def accepts(settings, signature) -> bool:
    (verifier,) = identities_of(settings)
    return verifier.accepts(signature)


def changed(signature: Signature, *path, value) -> Signature:
    """Return a signature whose bundle has another value at a place."""
    bundle = json.loads(signature.bundle)
    place = bundle
    for step in path[:-1]:
        place = place[step]
    assert place[path[-1]] != value
    place[path[-1]] = value
    return Signature(payload=signature.payload, signature=signature.signature, bundle=json.dumps(bundle))


def test_a_job_signs_and_others_judge_it_by_the_trusted_root_alone(site, instance, tmp_path):
    signer = keyless_signer(site())
    made = [signer.signed(PAYLOAD + bytes([number])) for number in range(5)]
    assert instance.entries == 5
    instance.server.__exit__(None, None, None)
    offline = site(ENVBUILD_SIGSTORE_TRUST=str(tmp_path / "root.json"))
    assert all(accepts(offline, signature) for signature in made)
    instance.server.__enter__()
    assert (signer.name, signer.verifier.builder) == ("ci", IDENTITY)
    assert len(made[-1].bundle) < 16384  # what an annotation may have


@pytest.mark.parametrize(
    "identity",
    [
        f"ci,{GITHUB},{IDENTITY}2",
        f"ci,{GITHUB},{IDENTITY.removesuffix('main')}other",
        f"ci,{GITHUB},{IDENTITY.replace('acme', 'acne')}",
        f"ci,{GITHUB},someone@acme.example",
        f"ci,https://accounts.google.com,{IDENTITY}",
        f"ci,{GITHUB}.acme.example,{IDENTITY}",
    ],
)
def test_another_identity_or_issuer_does_not_count(site, identity):
    made = keyless_signer(site()).signed(PAYLOAD)
    assert accepts(site(), made)
    assert not accepts(site(identity), made)


def test_another_authority_does_not_count(site, tmp_path):
    """Its certificate says what it likes; its log's entry is as good."""
    made = keyless_signer(site()).signed(PAYLOAD)
    with Instance() as other:
        root = other.trust(tmp_path / "other.json")
    assert not accepts(site(ENVBUILD_SIGSTORE_TRUST=str(root)), made)


@pytest.mark.parametrize("part", ["certificateAuthorities", "ctlogs", "tlogs"])
def test_each_part_of_the_trusted_root_counts(site, tmp_path, part):
    made = keyless_signer(site()).signed(PAYLOAD)
    with Instance() as other:
        foreign = json.loads(other.trust(tmp_path / "other.json").read_text())
    root = json.loads((tmp_path / "root.json").read_text())
    (tmp_path / "mixed.json").write_text(json.dumps(root | {part: foreign[part]}))
    assert not accepts(site(ENVBUILD_SIGSTORE_TRUST=str(tmp_path / "mixed.json")), made)


def test_another_payload_does_not_count(site):
    made = keyless_signer(site()).signed(PAYLOAD)
    assert not accepts(site(), Signature(payload=PAYLOAD + b" ", signature=made.signature, bundle=made.bundle))


def test_an_altered_bundle_does_not_count(site):
    signer = keyless_signer(site())
    made, other = signer.signed(PAYLOAD), json.loads(signer.signed(b"other").bundle)
    entry = ("verificationMaterial", "tlogEntries", 0)
    of_other = other["verificationMaterial"]
    theirs = of_other["tlogEntries"][0]
    altered = [
        changed(made, "verificationMaterial", "certificate", value=of_other["certificate"]),
        changed(made, "messageSignature", value=other["messageSignature"]),
        changed(made, "verificationMaterial", "tlogEntries", value=[theirs]),
        changed(made, "verificationMaterial", "tlogEntries", value=[]),
        changed(made, *entry, "canonicalizedBody", value=theirs["canonicalizedBody"]),
        changed(made, *entry, "integratedTime", value="1"),
        changed(made, *entry, "integratedTime", value="4102444800"),
        changed(made, *entry, "inclusionPromise", value=theirs["inclusionPromise"]),
        changed(made, *entry, "inclusionProof", "rootHash", value=theirs["inclusionProof"]["rootHash"]),
        changed(made, *entry, "inclusionProof", "checkpoint", value=theirs["inclusionProof"]["checkpoint"]),
        changed(made, "mediaType", value="application/json"),
    ]
    assert [accepts(site(), each) for each in altered] == [False] * len(altered)
    assert accepts(site(), made)


@pytest.mark.parametrize(
    "bundle",
    [
        "",
        "{}",
        "[]",
        "null",
        "x",
        "{" * 100,
        "[" * 10_000,
        '{"mediaType": 1}',
        '{"verificationMaterial": {}}',
        "\ud800",
    ],
)
def test_what_is_no_bundle_does_not_count(site, bundle):
    assert not accepts(site(), Signature(payload=PAYLOAD, signature=b"x", bundle=bundle))


def test_a_job_of_another_workflow_does_not_start_to_sign(site, instance):
    for claims, words in (
        ({"workflow": "acme/envbuild/.github/workflows/verify.yml@refs/heads/other"}, "this job is"),
        ({"issuer": "https://gitlab.example"}, "is of https://gitlab.example"),
        ({"exp": 1}, "cannot be read"),
    ):
        instance.claims = claims
        with pytest.raises(UsageError, match=words) as error:
            keyless_signer(site())
        assert error.value.exit_code == 2
    assert instance.entries == 0


def test_a_certificate_of_another_identity_than_the_settings_name_is_not_used(site, instance):
    """Fulcio decides what is in it, and not the token's text that was read before."""
    signer = keyless_signer(site())
    instance.claims = {"workflow": "acme/envbuild/.github/workflows/other.yml@refs/heads/main"}
    with pytest.raises(LockError, match="is not of the identity ci"):
        signer.signed(PAYLOAD)


def test_without_a_token_nothing_is_signed(site, monkeypatch):
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN")
    with pytest.raises(UsageError, match="gave no identity token") as error:
        keyless_signer(site())
    assert "id-token: write" in error.value.hint
    monkeypatch.delenv("GITHUB_ACTIONS")
    with pytest.raises(UsageError, match="there is no identity token here"):
        keyless_signer(site())


def test_services_that_do_not_answer_are_exit_8(site, instance):
    signer = keyless_signer(site())
    instance.log = None  # the log has a fault
    with pytest.raises(HostError, match="sigstore gave no signature") as error:
        signer.signed(PAYLOAD)
    assert error.value.exit_code == 8


def test_who_signs_must_be_trusted(site, tmp_path):
    with pytest.raises(DataError, match="trusted_identities has no other"):
        keyless_signer(site(ENVBUILD_SIGNING_IDENTITY="other"))
    with pytest.raises(DataError, match="names no services that sign"):
        keyless_signer(site(ENVBUILD_SIGSTORE_TRUST=str(tmp_path / "root.json")))
    assert keyless_signer(load_settings(environ={"HOME": str(tmp_path)}, root=tmp_path)) is None


@pytest.mark.parametrize("body", ["", "{}", "[]", "[" * 10_000, '{"mediaType": "application/x"}', "\0"])
def test_a_file_that_is_no_trusted_root_is_named(site, tmp_path, body):
    (tmp_path / "bad.json").write_text(body)
    with pytest.raises(DataError, match="no trusted root of sigstore") as error:
        accepts(
            site(ENVBUILD_SIGSTORE_TRUST=str(tmp_path / "bad.json")), Signature(payload=b"", signature=b"", bundle="{}")
        )
    assert error.value.where.endswith("bad.json")


def test_without_the_library_the_message_names_the_extra(site, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HostError) as error:
        policy_of(site())
    assert "envbuild[keyless]" in error.value.hint


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("ci", "NAME,ISSUER,IDENTITY"),
        ("ci,https://issuer.example", "NAME,ISSUER,IDENTITY"),
        ("ci,https://issuer.example,", "NAME,ISSUER,IDENTITY"),
        ("../ci,https://issuer.example,x@acme.example", "name"),
        ("ci,issuer.example,x@acme.example", "https://"),
        ('ci,https://issuer.example,"x@acme.example', "quote"),
        ("ci,https://,x@acme.example", "issuer must name a host"),
        ("ci,https:///path,x@acme.example", "issuer must name a host"),
        ("ci,https://:443,x@acme.example", "issuer must name a host"),
        ("ci,https://user@,x@acme.example", "issuer must name a host"),
        ("ci,https://issuer.example?a=b,x@acme.example", "issuer must name a host"),
        ("ci,https://issuer.example,https://", "an address with a host"),
        ("ci,https://issuer.example,https:///acme", "an address with a host"),
        ("ci,https://issuer.example,://acme", "an address with a host"),
        ("ci,https://issuer.example,x", "an address with a host"),
        ("ci,https://issuer.example,x@", "an address with a host"),
        ("ci,https://issuer.example,@acme.example", "an address with a host"),
    ],
)
def test_what_is_no_identity_is_refused(site, value, words):
    with pytest.raises(DataError, match=words):
        site(value)


@pytest.mark.parametrize(
    "value",
    [
        CI,
        "ci,https://issuer.example:8443/realms/acme,someone@acme.example",
        "ci,https://[::1]:8443,spiffe://acme.example/workload",
        "ci,https://issuer.example/,someone!acme.example",
    ],
)
def test_an_identity_as_the_authority_writes_it_is_taken(site, value):
    assert site(value).trusted_identities == (value,)


def test_one_identity_of_two_issuers_is_refused(site):
    """Both would be one builder in provenance, which does not state the issuer."""
    with pytest.raises(DataError, match="of two issuers"):
        policy_of(site(CI, f"ci2,https://issuer.example,{IDENTITY}"))


def test_keys_and_identities_count_together_and_each_once(site, tmp_path):
    pair = make_key_pair(tmp_path, "release", None)
    key = read_private_key(pair[0], lambda: None)
    both = site(ENVBUILD_TRUSTED_KEYS=str(pair[1]), ENVBUILD_TRUSTED_SIGNATURES="2")
    signer = keyless_signer(both)
    assert [each.name for each in signing_policy(both, [key, signer]).verifiers] == ["release", "ci"]
    for own in ([key], [signer], [key, key], [signer, signer]):
        with pytest.raises(UsageError, match="2 signatures are needed, and 1 key"):
            signing_policy(both, own)
    with pytest.raises(DataError, match="two of those trusted have one name"):
        policy_of(site(CI, f"ci,{GITHUB},other@acme.example"))
    with pytest.raises(DataError, match="one identity is trusted under two names"):
        policy_of(site(CI, CI.replace("ci,", "ci2,")))
    three = site(ENVBUILD_TRUSTED_SIGNATURES="2")
    with pytest.raises(DataError, match="2 signatures are needed"):
        policy_of(three)


def test_sigstores_own_command_judges_it_alike(site, instance, tmp_path):
    """docs/howto/publish.md names it for those who check with other tools."""
    made = keyless_signer(site()).signed(PAYLOAD)
    (tmp_path / "payload").write_bytes(PAYLOAD)
    (tmp_path / "bundle.json").write_text(made.bundle)
    instance.trust(tmp_path / "client.json")

    def judged(identity: str) -> int:
        words = ["--trust-config", "client.json", "verify", "identity", "--bundle", "bundle.json", "--offline"]
        words += ["--cert-identity", identity, "--cert-oidc-issuer", GITHUB, "payload"]
        command = [sys.executable, "-m", "sigstore", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode

    assert judged(IDENTITY) == 0
    assert judged(IDENTITY + "2") != 0
