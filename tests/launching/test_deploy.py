"""Certificates, node keys and node-configs, read back by those who must accept them."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.config import parse_config_args
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.supercore.error import ApiErrorCode
from PIL import Image

from fedprune_app.cli import deploying
from fedprune_app.engine.simulated_grid import simulated_client
from fedprune_app.engine.store import client_state_folder
from fedprune_app.engine.superlink import SECRET_VARIABLE, SecretAuthn
from fedprune_app.errors import LaunchError
from fedprune_app.files import replace_file
from fedprune_app.launching import credentials, local, processes
from fedprune_app.launching.credentials import certificates_in, make_certificates, make_node_key, valid_until
from fedprune_app.launching.local import node_config_text
from fedprune_app.preflight.node import node_settings
from tests.refusing import refuses


def test_a_certificate_is_for_its_hosts_and_signed_by_the_authority(tmp_path):
    made = make_certificates(tmp_path / "tls", ["link.example.org", "10.1.2.3"], days=30)
    certificate = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    ca = x509.load_pem_x509_certificate(made.ca.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["link.example.org"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.1.2.3")]
    certificate.verify_directly_issued_by(ca)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 30
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
        made.certificate, made.key
    )  # they belong together


@pytest.mark.parametrize("host", ["localhost", "10.0.0.5", "::1", "*.example.org", "superlink", "a_b.c-d"])
def test_names_and_addresses_are_hosts(tmp_path, host):
    assert make_certificates(tmp_path, [host]).certificate.exists()


def test_openssl_itself_accepts_the_chain(tmp_path):
    made = make_certificates(tmp_path, ["localhost"])
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", made.ca, made.certificate]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip().endswith("OK")


def test_private_keys_are_readable_by_their_owner_alone(tmp_path):
    made = make_certificates(tmp_path / "tls", ["localhost"])
    make_node_key(tmp_path / "node.key")
    for path in (made.key, tmp_path / "node.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(tmp_path.glob("**/ca.key"))


def test_flower_takes_the_node_key_as_its_register_command_does(tmp_path):
    public = make_node_key(tmp_path / "node.key")
    assert try_load_public_key(public).startswith(b"-----BEGIN PUBLIC KEY")
    private = serialization.load_ssh_private_key((tmp_path / "node.key").read_bytes(), password=None)
    assert private.public_key() == serialization.load_ssh_public_key(public.read_bytes())


def test_flowers_codes_mean_what_we_take_them_for():
    flowers = (ApiErrorCode.RUN_ALREADY_FINISHED, ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE)
    assert [f"[code: {code:d}]" for code in flowers] == [processes._IS_OVER, local._KNOWN_KEY]


def test_nothing_is_overwritten(tmp_path):
    make_certificates(tmp_path, ["localhost"])
    make_node_key(tmp_path / "node.key")
    with refuses("--out", tmp_path, which="ca.crt"):
        make_certificates(tmp_path, ["localhost"])
    with refuses("node key", tmp_path / "node.key"):
        make_node_key(tmp_path / "node.key")


def test_a_superlinks_database_is_its_owners_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "wait_until_up", lambda *_: None)
    monkeypatch.setattr(processes, "spawn", lambda *_: None)
    folder = tmp_path / "deployment"
    folder.mkdir()
    local.Deployment(folder, certificates_in(folder), 1, 2).start_superlink()
    assert stat.S_IMODE((folder / "superlink.db").stat().st_mode) == 0o600
    with refuses("database", folder / "superlink.db"):
        credentials.make_database(folder / "superlink.db")


def test_a_user_logs_in_with_the_secret_and_stays_logged_in_elsewhere(tmp_path):
    secret = credentials.make_control_secret(tmp_path / "control.secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    with refuses("secret", secret, which="exists"):
        credentials.make_control_secret(secret)
    home = tmp_path / "home"
    first = yaml.safe_load(credentials.log_in("a.example.org:8000", secret, home).read_text())
    path = credentials.log_in("b.example.org:8000", secret, home)
    both = yaml.safe_load(path.read_text())
    assert first.items() < both.items()
    assert len(both) == 2 * len(first)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("[1, 2")
    with refuses("credentials", path):
        credentials.log_in("a.example.org:8000", secret, home)


@pytest.mark.full
@pytest.mark.parametrize("content", [b"", b" \n", b"fifteen letters", "sechzehn Zeichen: ü".encode()])
def test_a_secret_that_opens_the_control_api_to_strangers_is_refused(tmp_path, monkeypatch, content):
    """An empty one is what a call without any token shows."""
    secret = tmp_path / "control.secret"
    secret.write_bytes(content)
    says = rf"control\.secret' has a secret of {len(content.strip())} bytes, allowed: at least 16 bytes of ASCII$"
    with pytest.raises(ValueError, match=says):
        credentials.log_in("a.example.org:8000", secret, tmp_path / "home")
    assert not (tmp_path / "home").exists()
    monkeypatch.setenv(SECRET_VARIABLE, str(secret))
    with pytest.raises(ValueError, match=says):
        SecretAuthn()
    command = [sys.executable, "-m", "fedprune_app.cli", "deploy", "superlink", "--control-secret", str(secret)]
    told = subprocess.run([*command, "--no-such-option"], capture_output=True, text=True, timeout=1000)
    assert told.returncode == 2
    assert re.search(says, told.stderr.strip())
    assert "flower-superlink" not in told.stderr, "it was not started"


def test_a_call_without_the_secret_is_refused(tmp_path, monkeypatch):
    secret = credentials.make_control_secret(tmp_path / "control.secret")
    monkeypatch.setenv(SECRET_VARIABLE, str(secret))
    account = SecretAuthn()
    assert account.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, secret.read_text())])[0]
    for metadata in ([], [(ACCESS_TOKEN_KEY, "")], [(ACCESS_TOKEN_KEY, "x" * 64)]):
        assert account.validate_tokens_in_metadata(metadata) == (False, None)


@pytest.mark.parametrize(("has_port", "address"), [(True, "127.0.0.1:2"), (False, "127.0.0.1:1")])
def test_nodes_reach_the_port_that_this_release_has_for_them(tmp_path, monkeypatch, has_port, address):
    monkeypatch.setattr(local, "has_fleet_port", lambda: has_port)
    monkeypatch.setattr(processes, "wait_until_up", lambda *_: None)
    started = []
    monkeypatch.setattr(processes, "spawn", lambda command, *_: started.append(command))
    running = local.Deployment(tmp_path, certificates_in(tmp_path), 1, 2)
    running.start_superlink()
    running.start_node("node-0", {})
    superlink, node = started
    assert node[node.index("--superlink") + 1] == address
    assert ("--fleet-api-address" in superlink) == has_port


@contextmanager
def listening(certificates=None):
    """An address at which somebody answers, with TLS if there are certificates."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if certificates:
            context.load_cert_chain(certificates.certificate, certificates.key)

        def answer():
            with suppress(OSError), server.accept()[0] as connection:
                if not certificates:
                    connection.sendall(b"\0\0\x12\4\0\0\0\0\0")  # as HTTP/2 without TLS begins
                    connection.recv(1)
                    return
                with context.wrap_socket(connection, server_side=True) as link:
                    link.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(timeout=100)


def test_a_superlink_of_the_right_authority_passes_the_check_of_a_node(tmp_path):
    made = make_certificates(tmp_path, ["127.0.0.1"])
    with listening(made) as address:
        assert credentials.check_link(address, made.ca) == valid_until(made.certificate)


def test_a_node_that_cannot_connect_is_told_why_at_once(tmp_path):
    right, wrong = (make_certificates(tmp_path / name, ["127.0.0.1"]) for name in ("right", "wrong"))
    other = make_certificates(tmp_path / "other", ["link.example.org"])
    with listening() as address, pytest.raises(LaunchError, match=f"^{address} shows no certificate .*WRONG_VERSION"):
        credentials.check_link(address, right.ca)
    reason = re.escape(f"shows no certificate that {str(wrong.ca)!r} vouches for: ")
    with listening(right) as address, pytest.raises(LaunchError, match=f"^{address} {reason}.*certificate verify"):
        credentials.check_link(address, wrong.ca)
    with listening(other) as address, pytest.raises(LaunchError, match=r"IP address mismatch, certificate is"):
        credentials.check_link(address, other.ca)
    with pytest.raises(LaunchError, match=f"^{address} shows no certificate .*refused"):
        credentials.check_link(address, right.ca)
    with refuses("address of the SuperLink", "link"):
        credentials.check_link("link", right.ca)
    with refuses("certificate", right.key):
        credentials.check_link(address, right.key)


class PowerCut(BaseException):
    """Nothing is done after it."""


@pytest.fixture
def power_cut(monkeypatch):
    """``power_cut(n, make)``: ``make()``, cut short before its file ``n`` is in place."""

    def cut(after: int, make) -> None:
        written = 0

        def replace_until_then(path, *arguments, **more):
            nonlocal written
            if written == after:
                raise PowerCut
            written += 1
            replace_file(path, *arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(credentials, "replace_file", replace_until_then)
            with pytest.raises(PowerCut):
                make()

    return cut


@pytest.mark.parametrize("after", range(3))
def test_certificates_whose_making_was_cut_short_are_made_anew(tmp_path, power_cut, after):
    power_cut(after, lambda: make_certificates(tmp_path, ["localhost"]))
    assert len(list(tmp_path.iterdir())) == after
    assert not certificates_in(tmp_path).ca.exists(), "the mark of a whole set"
    made = make_certificates(tmp_path, ["localhost"])
    ca, certificate = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (made.ca, made.certificate))
    certificate.verify_directly_issued_by(ca)
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(made.certificate, made.key)
    assert stat.S_IMODE(made.key.stat().st_mode) == 0o600


def test_a_certificate_of_tomorrow_or_none_at_all_is_named(tmp_path):
    key = ec.generate_private_key(ec.SECP384R1())
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    tomorrow = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    tomorrow = tomorrow.not_valid_before(now + datetime.timedelta(days=1))
    tomorrow = tomorrow.not_valid_after(now + datetime.timedelta(days=2)).sign(key, hashes.SHA384())
    path = tmp_path / "a.crt"
    path.write_bytes(tomorrow.public_bytes(serialization.Encoding.PEM))
    with refuses("certificate", path, which="is valid from "):
        valid_until(path)
    path.write_text("nothing")
    with refuses("certificate", path):
        valid_until(path)


@pytest.mark.programs
def test_the_containers_set_up_is_made_good_after_a_cut_and_then_left_alone(tmp_path, power_cut):
    """docker/setup.sh, with its volumes in a folder of this machine."""
    for volume in ("superlink", "secrets", "certificates", "node/0", "node/1"):
        (tmp_path / volume).mkdir(parents=True)
    script = (Path(__file__).parents[2] / "docker" / "setup.sh").read_text()
    script = re.sub(r"(?<![\w.$}])/(superlink|secrets|certificates|node)/", rf"{tmp_path}/\1/", script)
    script = re.sub(r"--out /superlink\b", f"--out {tmp_path}/superlink", script)
    power_cut(2, lambda: make_certificates(tmp_path / "superlink", ["localhost"]))
    power_cut(1, lambda: make_node_key(tmp_path / "node" / "0" / "node.key"))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "fedprune"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedprune_app.cli "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}

    def set_up() -> dict[str, bytes]:
        command = ["sh", "-c", script, "setup.sh", "2", "localhost", "127.0.0.1"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
        assert done.returncode == 0, done.stderr
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    found = set_up()
    made = certificates_in(tmp_path / "superlink")
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(made.certificate, made.key)
    assert found["certificates/ca.crt"] == found["superlink/ca.crt"]
    for k in range(2):
        private = serialization.load_ssh_private_key(found[f"node/{k}/node.key"], password=None)
        assert private.public_key() == serialization.load_ssh_public_key(found[f"certificates/nodes/{k}.pub"])
    assert set_up() == found


@pytest.mark.parametrize("hosts", [[], [""]])
def test_a_certificate_for_nobody_is_refused(tmp_path, hosts):
    with refuses("--host", ""):
        make_certificates(tmp_path, hosts)


def test_flower_reads_the_node_config_as_it_was_meant():
    values = {"partition-id": 2, "capacity": 0.5, "data-dir": "/data/my 'own' images\\x", "is-large": True}
    values["state-dir"] = "/data/the node's\\y = 3"
    assert parse_config_args([node_config_text(values)]) == values
    with refuses("data-dir", '"', where="node-config"):
        node_config_text({"data-dir": '"'})


def test_a_node_says_where_its_data_and_state_are_whatever_the_run_says():
    own = {"partition-id": 0, "num-partitions": 2, "data-dir": "/mine", "state-dir": "/kept"}
    config, _ = node_settings({"data-dir": "/theirs", "state-dir": "/elsewhere", "seed": 3}, own)
    assert (config.data_dir, config.state_dir, config.seed) == ("/mine", "/kept", 3)


def test_a_node_of_a_deployment_reads_and_writes_nowhere_that_the_run_names(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    dealt = {"partition-id": 0, "num-partitions": 2}
    run = {"state-dir": "/theirs", "out-dir": "/theirs", "resume-from": "/theirs"}
    config, _ = node_settings(run, dealt)
    assert client_state_folder(config, 1, "0" * 16) == tmp_path / "fedprune-state" / ("0" * 16)
    with refuses("data-dir", "/theirs", condition="on a node"):
        node_settings({"data-dir": "/theirs"}, dealt)
    with simulated_client(shares_disk=True):
        config, _ = node_settings({**run, "data-dir": "/theirs"}, dealt)
    assert (config.data_dir, config.state_dir) == ("/theirs", "/theirs")


def test_the_nodes_of_a_local_deployment_have_the_data_of_the_run(fedprune, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(deploying, "run_once", lambda prepared, *_: started.append(prepared.placement))
    assert "is no folder" in fedprune("deploy", "local", "dataset=image-folder", "data-dir=nowhere", "--nodes", "2")[1]
    for part, number in itertools.product(("train", "test"), range(40)):
        (tmp_path / "images" / part / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        image = Image.new("L", (32, 32), number)
        image.save(tmp_path / "images" / part / "ab"[number % 2] / f"{number}.png")
    images = ("dataset=image-folder", "data-dir=images", "partition=iid")
    fedprune("deploy", "local", *images, "--nodes", "2")
    fedprune("deploy", "local", "--nodes", "1", "--out", "digits")
    with_data, without = (placement.nodes for placement in started)
    assert [node["data-dir"] for node in with_data] == [str(tmp_path / "images")] * 2
    assert "data-dir" not in without[0]


def test_noise_comes_from_the_seed_in_simulations_alone_unless_the_operator_says_so():
    dealt, own = {"partition-id": 0, "num-partitions": 2}, {"data-dir": "/mine"}

    def is_secure(node_config, **run_config) -> bool:
        return node_settings(run_config, node_config)[0].dp.secure_rng

    wish = {"dp.secure-rng": False}
    assert is_secure(dealt)
    assert is_secure(own, **wish)
    assert is_secure(dealt, **wish)  # a node of a deployment: nothing says that it is simulated
    assert not is_secure({**dealt, "secure-rng": False})
    assert not is_secure({**own, "secure-rng": False}, **{"dp.secure-rng": True})
    with simulated_client(shares_disk=True):
        assert not is_secure(dealt, **wish)
        assert is_secure(dealt, **{"dp.secure-rng": True})
        assert is_secure(own, **wish)
    assert is_secure(dealt, **wish)


@pytest.mark.parametrize(
    ("key", "value"),
    [("data-dir", "images"), ("state-dir", 3), ("secure-rng", "no"), ("secure-rng", 1), ("capcity", 0.5)],
)
def test_a_wrong_node_config_is_named(key, value):
    with refuses(key, value, where="node-config"):
        node_settings({}, {key: value})


def test_a_superlink_that_would_not_find_its_own_files_is_not_started(monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/tmp/my clone/lib/site-packages")
    with refuses("folder of Flower", "/tmp/my clone/lib/site-packages"):
        local.superlink_command([])
