"""Secrets of a deployment: the keys of nodes, the SuperLink's database, and who may submit runs."""

from __future__ import annotations

import json
import secrets
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import yaml
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedprune_app.config import ConfigError
from fedprune_app.engine.superlink import CREDENTIALS, credentials, read_secret
from fedprune_app.files import SharedFolderError, replace_file


def make_node_key(path: Path) -> Path:
    """Make a key pair that identifies a SuperNode (OpenSSH, P-384), and return the path of the public key.

    The private key is written to ``path``, the public one beside it. `flwr supernode register` takes the public key.
    Raises :class:`ConfigError` if the pair exists. A private key without a public one was left by a making that was
    interrupted: the private key is kept, and its public key is written.
    """
    public = public_half(path)
    if public.exists():
        raise ConfigError("node key", path if path.exists() else public, "a new file", which="exists")
    if path.exists():
        key = _node_key_in(path)
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        write_secret(path, private_bytes(key, serialization.PrivateFormat.OpenSSH))
    encoding, format = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    replace_file(public, key.public_key().public_bytes(encoding, format) + b"\n")
    return public


def public_half(key: Path) -> Path:
    """Return the path at which :func:`make_node_key` puts the public key of the private ``key``."""
    return key.with_name(key.name + ".pub")


def _node_key_in(path: Path) -> ec.EllipticCurvePrivateKey:
    with suppress(ValueError, UnsupportedAlgorithm):
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    raise ConfigError("node key", path, "a new file", which="exists and is no node key")


def private_bytes(key: ec.EllipticCurvePrivateKey, format: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, format, serialization.NoEncryption())


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that nobody else can read at any time.

    Raises :class:`ConfigError` where others may write beside the file.
    """
    try:
        replace_file(path, content, mode=0o600)
    except SharedFolderError as error:
        raise ConfigError(str(error)) from None


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
        write_secret(path, database.serialize())
    return path


def make_control_secret(path: Path) -> Path:
    """Make the secret that users show to the Control API. Raises :class:`ConfigError` if ``path`` exists."""
    if path.exists():
        raise ConfigError("secret", path, "a new file", which="exists")
    write_secret(path, secrets.token_hex(32).encode())
    return path


def read_control_secret(path: Path) -> str:
    """Return the secret in a file. Raises :class:`ConfigError` for a file without one that is long enough."""
    try:
        return read_secret(path)
    except OSError as error:
        raise ConfigError("secret", path, f"a file ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def log_in(address: str, secret: Path, home: Path) -> Path:
    """Let ``flwr`` show the secret to the SuperLink at ``address``, and return the file that says so.

    ``home`` is the ``FLWR_HOME`` of ``flwr``. What the file says of other SuperLinks stays. Raises
    :class:`ConfigError` for an address without a port, for a file that is no mapping, and for a secret that no
    SuperLink takes.
    """
    host_and_port(address)
    path = home / CREDENTIALS
    try:
        entries = yaml.safe_load(path.read_text()) if path.exists() else {}
    except (yaml.YAMLError, UnicodeDecodeError):
        entries = None
    if not isinstance(entries, dict):
        raise ConfigError("credentials", path, "the file that `flwr login` writes", which="is no mapping in YAML")
    new_entries = json.loads(credentials(address, read_control_secret(secret)))
    home.mkdir(0o700, parents=True, exist_ok=True)
    write_secret(path, json.dumps(entries | new_entries).encode())
    return path


def host_and_port(address: str) -> tuple[str, str]:
    """Return the two parts of HOST:PORT. Raises :class:`ConfigError` for another form."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit():
        raise ConfigError("address of the SuperLink", address, "HOST:PORT")
    return host, port
