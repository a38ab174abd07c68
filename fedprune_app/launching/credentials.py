"""Secrets of a deployment: nodes' keys, certificates, the SuperLink's database, and the Control API's secret."""

import datetime
import ipaddress
import json
import re
import secrets
import socket
import sqlite3
import ssl
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedprune_app.config import ConfigError
from fedprune_app.engine.superlink import CREDENTIALS, credentials, read_secret
from fedprune_app.errors import LaunchError
from fedprune_app.files import replace_file


def make_node_key(path: Path) -> Path:
    """Make a key pair that identifies a SuperNode (OpenSSH, P-384), and return the path of the public key.

    The private key is written to ``path``, the public one, for `flwr supernode register`, beside it. Raises
    :class:`ConfigError` if one of the two files exists.
    """
    public = public_half(path)
    for file in (path, public):
        if file.exists():
            raise ConfigError("node key", file, "a new file", which="exists")
    key = ec.generate_private_key(ec.SECP384R1())
    replace_file(path, private_bytes(key, serialization.PrivateFormat.OpenSSH), mode=0o600)
    encoding, format = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    replace_file(public, key.public_key().public_bytes(encoding, format) + b"\n")
    return public


def public_half(key: Path) -> Path:
    return key.with_name(key.name + ".pub")


def private_bytes(key: ec.EllipticCurvePrivateKey, format: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, format, serialization.NoEncryption())


def make_database(path: Path) -> Path:
    """Make an empty SuperLink database, which only its owner can read and which shrinks when messages are deleted.

    The file of a database that Flower itself makes never shrinks. Raises :class:`ConfigError` if ``path`` exists.
    """
    if path.exists():
        raise ConfigError("database", path, "a new file", which="exists")
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("PRAGMA auto_vacuum = FULL")  # set before the first table; stays in the file
        database.execute("VACUUM")
        replace_file(path, database.serialize(), mode=0o600)
    return path


def make_control_secret(path: Path) -> Path:
    """Make the secret that users need for the Control API. Raises :class:`ConfigError` if ``path`` exists."""
    if path.exists():
        raise ConfigError("secret", path, "a new file", which="exists")
    replace_file(path, secrets.token_hex(32).encode(), mode=0o600)
    return path


def log_in(address: str, secret: Path, home: Path) -> Path:
    """Store the secret for ``flwr`` and the SuperLink at ``address``; return the file with the credentials.

    ``home`` is the ``FLWR_HOME`` of ``flwr``. Credentials of other SuperLinks stay in the file. Raises
    :class:`ConfigError` for an address without a port and for a file that is no mapping, and ``ValueError`` for an
    invalid secret.
    """
    host_and_port(address)
    path = home / CREDENTIALS
    try:
        entries = yaml.safe_load(path.read_text()) if path.exists() else {}
    except (yaml.YAMLError, UnicodeDecodeError):
        entries = None
    if not isinstance(entries, dict):
        raise ConfigError("credentials", path, "the file that `flwr login` writes", which="is no mapping in YAML")
    new_entries = json.loads(credentials(address, read_secret(secret)))
    home.mkdir(0o700, parents=True, exist_ok=True)
    replace_file(path, json.dumps(entries | new_entries).encode(), mode=0o600)
    return path


def host_and_port(address: str) -> tuple[str, str]:
    """Return the two parts of HOST:PORT. Raises :class:`ConfigError` for another form."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit():
        raise ConfigError("address of the SuperLink", address, "HOST:PORT")
    return host, port


_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_MINUTE = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True)
class Certificates:
    """PEM files for TLS: the authority's certificate, which clients trust, and the SuperLink's with its key."""

    ca: Path
    certificate: Path
    key: Path


def certificates_in(folder: Path) -> Certificates:
    return Certificates(folder / "ca.crt", folder / "superlink.crt", folder / "superlink.key")


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 365) -> Certificates:
    """Make a certificate authority in ``folder``, and a SuperLink certificate for the names and addresses ``hosts``.

    Nodes and users need only ``ca.crt``. The authority's private key is never written: for another host make all files
    anew. ``ca.crt`` is written last; without it the other files are from an interrupted call, and are replaced. Raises
    :class:`ConfigError` if ``hosts`` is empty or ``ca.crt`` exists.
    """
    files = certificates_in(folder)
    for host in hosts or [""]:
        if not _HOST.fullmatch(host) and not isinstance(_alternative_name(host), x509.IPAddress):
            raise ConfigError("--host", host, "a name as link.example.org, or an address")
    if files.ca.exists():
        raise ConfigError("--out", folder, "a folder without certificates", which=f"has {files.ca.name}")
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = _name("fedprune certificate authority")
    usage = {
        "content_commitment": False,
        "key_encipherment": False,
        "data_encipherment": False,
        "key_agreement": False,
        "encipher_only": False,
        "decipher_only": False,
    }
    ca = (
        _certificate(issuer, issuer, authority.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(False, key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    certificate = (
        _certificate(_name(hosts[0]), issuer, server.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(True, key_cert_sign=False, crl_sign=False, **usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative_name(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    replace_file(files.key, private_bytes(server, serialization.PrivateFormat.PKCS8), mode=0o600)
    replace_file(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    replace_file(files.ca, ca.public_bytes(serialization.Encoding.PEM))
    return files


def valid_until(certificate: Path) -> datetime.datetime:
    """Return the time at which a certificate expires, in UTC.

    Raises :class:`ConfigError` for a certificate that is expired or not valid yet, and for another file.
    """
    try:
        read = x509.load_pem_x509_certificate(certificate.read_bytes())
    except ValueError:
        raise ConfigError("certificate", certificate, "a certificate in PEM") from None
    begin, end, now = read.not_valid_before_utc, read.not_valid_after_utc, datetime.datetime.now(datetime.UTC)
    if not begin <= now <= end:
        times = f"is valid from {begin:{_MINUTE}} to {end:{_MINUTE}}, and it is {now:{_MINUTE}} here"
        raise ConfigError("certificate", certificate, "one that is valid now", which=times)
    return end


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # the clocks of machines differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def check_link(address: str, ca: Path) -> datetime.datetime:
    """Return the expiry of the certificate at ``address`` (HOST:PORT), checked as a SuperNode checks it.

    A SuperNode that cannot connect retries and logs little. Raises :class:`LaunchError` with the reason: no response,
    no TLS, or a certificate that is not signed by ``ca`` or is for another name.
    """
    host, port = host_and_port(address)
    valid_until(ca)
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2", "http/1.1"])  # of gRPC, and of HTTP from Flower 1.40 on
    try:
        connection = socket.create_connection((host, int(port)), timeout=10)
        with connection, context.wrap_socket(connection, server_hostname=host) as link:
            certificate = link.getpeercert(binary_form=True)
    except (OSError, OverflowError) as error:
        raise LaunchError(f"{address} shows no certificate that {str(ca)!r} vouches for: {error}") from None
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).not_valid_after_utc
