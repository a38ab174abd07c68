"""Certificates, node keys and node-configs, read back by those who must accept them."""

from __future__ import annotations

import ipaddress
import ssl
import stat
import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from flwr.cli.supernode.register import try_load_public_key
from flwr.common.config import parse_config_args

from fedprune_app.client_app import node_settings
from fedprune_app.config import ConfigError
from fedprune_app.deploy import make_certificates, make_node_key, node_config_text


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


def test_nothing_is_overwritten(tmp_path):
    make_certificates(tmp_path, ["localhost"])
    make_node_key(tmp_path / "node.key")
    with pytest.raises(ConfigError, match=r"ca\.crt' exists"):
        make_certificates(tmp_path, ["localhost"])
    with pytest.raises(ConfigError, match=r"node\.key' exists"):
        make_node_key(tmp_path / "node.key")


@pytest.mark.parametrize("hosts", [[], [""]])
def test_a_certificate_for_nobody_is_refused(tmp_path, hosts):
    with pytest.raises(ConfigError, match=r"^--host is empty"):
        make_certificates(tmp_path, hosts)


def test_flower_reads_the_node_config_as_it_was_meant():
    values = {"partition-id": 2, "capacity": 0.5, "data-dir": '/data/my "own" images\\x', "is-large": True}
    values["state-dir"] = "/data/the node's\\y = 3"
    assert parse_config_args([node_config_text(values)]) == values
    with pytest.raises(ConfigError, match=r"^node-config has data-dir=.*, allowed: one kind of quotes$"):
        node_config_text({"data-dir": "'\""})


def test_a_node_says_where_its_data_and_state_are_whatever_the_run_says():
    own = {"partition-id": 0, "num-partitions": 2, "data-dir": "/mine", "state-dir": "/kept"}
    config = node_settings({"data-dir": "/theirs", "state-dir": "/elsewhere", "seed": 3}, own)
    assert (config.data_dir, config.state_dir, config.seed) == ("/mine", "/kept", 3)
    assert node_settings({"data-dir": "/theirs"}, {"partition-id": 0}).data_dir == "/theirs"


@pytest.mark.parametrize(
    ("node_config", "named"),
    [
        ({"data-dir": "images"}, "node-config has data-dir='images', allowed: an absolute path"),
        ({"state-dir": 3}, "node-config has state-dir=3, allowed: an absolute path"),
        ({"capcity": 0.5}, "node-config has capcity=0.5, allowed: partition-id, num-partitions, capacity"),
    ],
)
def test_a_wrong_node_config_is_named(node_config, named):
    with pytest.raises(ConfigError, match="^" + named.replace(".", r"\.")):
        node_settings({}, node_config)
