"""Secrets of a deployment: the keys of nodes, the SuperLink's database, and who may submit runs."""

import json
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedprune_app.config import ConfigError
from fedprune_app.engine.superlink import CREDENTIALS, credentials, read_secret
from fedprune_app.files import replace_file


def make_node_key(path: Path) -> Path:
    """Make a key pair that identifies a SuperNode (OpenSSH, P-384), and return the path of the public key.

    The private key is written to ``path``, the public one beside it. `flwr supernode register` takes the public key.
    Raises :class:`ConfigError` if one of the two files exists.
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

    A database that Flower itself made only grows: the room of a deleted message stays in the file. Raises
    :class:`ConfigError` if ``path`` exists.
    """
    if path.exists():
        raise ConfigError("database", path, "a new file", which="exists")
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("PRAGMA auto_vacuum = FULL")  # set before the first table; stays in the file
        database.execute("VACUUM")
        replace_file(path, database.serialize(), mode=0o600)
    return path


def make_control_secret(path: Path) -> Path:
    """Make the secret that users show to the Control API. Raises :class:`ConfigError` if ``path`` exists."""
    if path.exists():
        raise ConfigError("secret", path, "a new file", which="exists")
    replace_file(path, secrets.token_hex(32).encode(), mode=0o600)
    return path


def log_in(address: str, secret: Path, home: Path) -> Path:
    """Let ``flwr`` show the secret to the SuperLink at ``address``, and return the file that says so.

    ``home`` is the ``FLWR_HOME`` of ``flwr``. What the file says of other SuperLinks stays. Raises
    :class:`ConfigError` for an address without a port and for a file that is no mapping, and ``ValueError`` for a
    secret that no SuperLink takes.
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
