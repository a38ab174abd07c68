"""A deployment is a SuperLink, an executor and SuperNodes, here all on this machine to rehearse a real one.

This module makes certificates and node keys, and runs the same programs as on many machines:

* a SuperLink with TLS and a database, which lets only registered keys in,
* a SuperExec beside it that runs ServerApps, so that a run survives a restart of the SuperLink,
* a SuperNode per client, with its own key, its own home and its own state folder.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import secrets
import socket
import sqlite3
import ssl
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import yaml
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from fedprune_app import launch
from fedprune_app.config import ConfigError, Scalar
from fedprune_app.engine.flower_private import has_fleet_port
from fedprune_app.engine.superlink import CREDENTIALS, SECRET_VARIABLE, credentials, read_secret
from fedprune_app.engine.watchdog import LAUNCHER_VARIABLE, launcher_identity
from fedprune_app.errors import LaunchError
from fedprune_app.files import SharedFolderError, replace_file
from fedprune_app.launch import Link

_VALID_DAYS = 365
_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_MINUTE = "%Y-%m-%d %H:%M UTC"
_KNOWN_KEY = "[code: 23]"  # of `flwr supernode register`
_NODE_SECONDS = 180.0
_LINK_SECONDS = 10.0
_NODE_ID = re.compile(r"SuperNode ID: (\d+)")  # in a SuperNode's log
_SUPERLINK = "superlink"
_EXECUTOR = "superexec"


# --- certificates and keys ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certificates:
    """The certificates are PEM files: the authority's, which clients trust, and the SuperLink's with its key."""

    ca: Path
    certificate: Path
    key: Path


def certificates_in(folder: Path) -> Certificates:
    """Return the paths at which :func:`make_certificates` puts its files in ``folder``."""
    return Certificates(folder / "ca.crt", folder / "superlink.crt", folder / "superlink.key")


def make_certificates(folder: Path, hosts: Sequence[str], days: int = _VALID_DAYS) -> Certificates:
    """Make a certificate authority in ``folder``, and a SuperLink certificate for the names and addresses ``hosts``.

    Nodes and users need ``ca.crt`` alone. The authority's private key is never written: for another host make all files
    anew. ``ca.crt`` is written last, and says that all three files are there. Where ``ca.crt`` is missing, the other
    files were left by a making that was interrupted, and they are replaced. Raises :class:`ConfigError` where ``hosts``
    is empty or ``ca.crt`` exists.
    """
    files = certificates_in(folder)
    if not hosts or not all(hosts):
        raise ConfigError("--host", "", "a name or address by which the SuperLink is reached")
    for host in hosts:
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
    _write_secret(files.key, _private_bytes(server, serialization.PrivateFormat.PKCS8))
    replace_file(files.certificate, certificate.public_bytes(serialization.Encoding.PEM))
    replace_file(files.ca, ca.public_bytes(serialization.Encoding.PEM))
    return files


def valid_until(certificate: Path) -> datetime.datetime:
    """Return the time at which a certificate ends, in UTC.

    Raises :class:`ConfigError` for a certificate that has ended or not begun, and for a file that is no certificate.
    """
    allowed = "one that is valid now"
    try:
        read = x509.load_pem_x509_certificate(certificate.read_bytes())
    except ValueError:
        raise ConfigError("certificate", certificate, allowed, which="is none") from None
    now = datetime.datetime.now(datetime.UTC)
    if now > read.not_valid_after_utc:
        raise ConfigError("certificate", certificate, allowed, which=f"ended at {read.not_valid_after_utc:{_MINUTE}}")
    if now < read.not_valid_before_utc:
        raise ConfigError(
            "certificate",
            certificate,
            allowed,
            which=f"begins at {read.not_valid_before_utc:{_MINUTE}}, and it is {now:{_MINUTE}} here",
        )
    return read.not_valid_after_utc


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
        _write_secret(path, _private_bytes(key, serialization.PrivateFormat.OpenSSH))
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


def _private_bytes(key: ec.EllipticCurvePrivateKey, format: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, format, serialization.NoEncryption())


def _write_secret(path: Path, content: bytes) -> None:
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
        _write_secret(path, database.serialize())
    return path


def make_control_secret(path: Path) -> Path:
    """Make the secret that users show to the Control API. Raises :class:`ConfigError` if ``path`` exists."""
    if path.exists():
        raise ConfigError("secret", path, "a new file", which="exists")
    _write_secret(path, secrets.token_hex(32).encode())
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
    _host_and_port(address)
    path = home / CREDENTIALS
    try:
        known = yaml.safe_load(path.read_text()) if path.exists() else {}
    except (yaml.YAMLError, UnicodeDecodeError):
        known = None
    if not isinstance(known, dict):
        raise ConfigError("credentials", path, "the file that `flwr login` writes", which="is no mapping in YAML")
    more = json.loads(credentials(address, read_control_secret(secret)))
    home.mkdir(0o700, parents=True, exist_ok=True)
    _write_secret(path, json.dumps(known | more).encode())
    return path


def _host_and_port(address: str) -> tuple[str, str]:
    """Return the two parts of HOST:PORT. Raises :class:`ConfigError` for another form."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit():
        raise ConfigError("address of the SuperLink", address, "HOST:PORT")
    return host, port


def superlink_command(options: Sequence[str]) -> list[str]:
    """Return the command that starts Flower's SuperLink with these options and a check at its Control API.

    Raises :class:`ConfigError` where Flower finds nothing of its own, since it splits its path at spaces and commas.
    """
    place = sysconfig.get_path("purelib")
    if " " in place or "," in place:
        raise ConfigError("folder of Flower", place, "a path without spaces and commas", condition="for its SuperLink")
    return [sys.executable, "-m", "fedprune_app.engine.superlink", *options]


def check_link(address: str, ca: Path) -> datetime.datetime:
    """Return the time until which the certificate that is shown at ``address`` (HOST:PORT) is valid.

    The certificate is checked as a SuperNode checks it. A SuperNode that cannot connect tries again and says little.
    Raises :class:`LaunchError` with the reason where nobody answers, where there is no TLS, and where the authority of
    ``ca`` does not vouch for that name.
    """
    host, port = _host_and_port(address)
    valid_until(ca)
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2", "http/1.1"])  # of gRPC, and of HTTP from Flower 1.40 on
    try:
        connection = socket.create_connection((host, int(port)), _LINK_SECONDS)
    except (OSError, OverflowError) as error:
        raise LaunchError(f"{address} cannot be reached: {error}") from None
    try:
        with connection, context.wrap_socket(connection, server_hostname=host) as link:
            certificate = link.getpeercert(binary_form=True)
    except ssl.SSLCertVerificationError as error:
        raise LaunchError(f"{address} shows a certificate that {str(ca)!r} refuses: {error.verify_message}") from None
    except OSError as error:
        raise LaunchError(f"{address} does not speak TLS: {error.strerror or error}") from None
    assert certificate is not None
    return x509.load_der_x509_certificate(certificate).not_valid_after_utc


def is_healthy(address: str, timeout_seconds: float = 3.0) -> bool:
    """Return whether a Flower program with ``--health-server-address ADDRESS`` says at ``address`` that it serves."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=timeout_seconds)
        except grpc.RpcError:
            return False
    return bool(answer.status == HealthCheckResponse.SERVING)


# --- the topology on this machine -----------------------------------------------------------------------------------


@dataclass
class Deployment:
    """A deployment holds its processes by name: ``superlink``, ``superexec``, ``node-0``, ``node-1`` and so on.

    All their files are below ``folder``.
    """

    folder: Path
    certificates: Certificates
    port: int  # of the Runtime API and the Control API, and from Flower 1.40 on of the nodes, too
    fleet_port: int  # of the nodes, up to Flower 1.39
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def node_address(self) -> str:
        """The node address is where nodes reach the SuperLink: at a port of their own, if this release has one."""
        return f"127.0.0.1:{self.fleet_port if has_fleet_port() else self.port}"

    @property
    def link(self) -> Link:
        """The link is how users reach the SuperLink: a connection ``local`` that checks the SuperLink's certificate."""
        home, address = self.folder / "user", f"127.0.0.1:{self.port}"
        content = (
            '[superlink]\ndefault = "local"\n\n[superlink.local]\n'
            f'address = "{address}"\nroot-certificates = "{self.certificates.ca}"\n'
        )
        replace_file(home / "config.toml", content.encode())
        _write_secret(home / CREDENTIALS, credentials(address, read_control_secret(self._secret("control"))))
        return Link("local", launch.flower_environment(home), self.log_file(_SUPERLINK))

    def log_file(self, name: str) -> Path:
        """Return the path of the log of the program ``name``."""
        return self.folder / name / "log.txt"

    def _secret(self, whose: str) -> Path:
        """Return the path of a file with a secret of this deployment, and make the file if it is missing."""
        path = self.folder / f"{whose}.secret"
        if not path.exists():
            _write_secret(path, secrets.token_hex(32).encode())
        return path

    def _spawn(
        self, name: str, command: Sequence[str], more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        environment = {**launch.flower_environment(home), LAUNCHER_VARIABLE: launcher_identity(), **(more or {})}
        self.processes[name] = launch.spawn(command, environment, self.log_file(name))
        return self.processes[name]

    def start_superlink(self) -> None:
        """Start the SuperLink, or start it again: the database keeps its runs, nodes and messages."""
        database = self.folder / "superlink.db"
        if not database.exists():
            make_database(database)
        command = superlink_command(["--isolation", "process"])
        command += ["--ssl-ca-certfile", str(self.certificates.ca), "--ssl-keyfile", str(self.certificates.key)]
        command += ["--ssl-certfile", str(self.certificates.certificate), "--enable-supernode-auth"]
        command += ["--superexec-auth-secret-file", str(self._secret(_EXECUTOR)), "--database", str(database)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        if has_fleet_port():
            command += ["--fleet-api-address", self.node_address]
        process = self._spawn(_SUPERLINK, command, {SECRET_VARIABLE: str(self._secret("control"))})
        url = f"https://127.0.0.1:{self.port}/health"
        launch.wait_until_up(process, url, self.log_file(_SUPERLINK), self.certificates.ca)

    def start_executor(self) -> None:
        """Start the SuperExec, the program that runs the ServerApps."""
        command = [launch.tool("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{self.port}"]
        command += ["--root-certificates", str(self.certificates.ca)]
        command += ["--superexec-auth-secret-file", str(self._secret(_EXECUTOR))]
        self._spawn(_EXECUTOR, command)

    def register(self, name: str) -> None:
        """Register the key of the node ``name`` at the SuperLink, unless that was done; make a key that is missing."""
        key = self.folder / name / "node.key"
        public = public_half(key) if public_half(key).exists() else make_node_key(key)
        try:
            launch.flwr(self.link, "supernode", "register", str(public), "local", "--name", name)
        except LaunchError as error:
            if _KNOWN_KEY not in str(error):
                raise

    def start_node(self, name: str, node_config: Mapping[str, Scalar]) -> None:
        """Start the SuperNode ``name``, or start it again; its key makes it the same node as before.

        A SuperLink takes a node that was killed for online for about a minute, and refuses the node in this time. So
        this method waits until that is over.
        """
        self._wait_until_missed(name)
        (port,) = launch.free_ports(1)
        command = [launch.tool("flower-supernode"), "--superlink", self.node_address]
        command += ["--root-certificates", str(self.certificates.ca), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--auth-supernode-private-key", str(self.folder / name / "node.key")]
        command += ["--node-config", node_config_text(node_config)]
        self._spawn(name, command)

    def _nodes(self) -> list[dict[str, object]]:
        """Return the SuperLink's list of nodes."""
        listed = launch.flwr(self.link, "supernode", "list", "local").get("nodes")
        return listed if isinstance(listed, list) else []

    def _wait_until_missed(self, name: str) -> None:
        log = self.log_file(name)
        ids = _NODE_ID.findall(log.read_text(errors="replace")) if log.exists() else []
        deadline = time.monotonic() + _NODE_SECONDS
        while ids and any((n.get("node-id"), n.get("status")) == (ids[-1], "online") for n in self._nodes()):
            if time.monotonic() > deadline:
                raise LaunchError(f"{name} is still online: another process has its key")
            time.sleep(2)

    def wait_for_nodes(self, count: int) -> None:
        """Wait until ``count`` nodes are online.

        Raises :class:`LaunchError` when a program of the deployment stops, or when nodes are still missing in the end.
        """
        deadline = time.monotonic() + _NODE_SECONDS
        while True:
            online = [node for node in self._nodes() if node.get("status") == "online"]
            if len(online) >= count:
                return
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise LaunchError(f"{name} stopped: {launch.last_line(self.log_file(name))}")
            if time.monotonic() > deadline:
                raise LaunchError(f"{len(online)} of {count} nodes came online within {_NODE_SECONDS:g} s")
            time.sleep(0.5)

    def kill(self, name: str) -> None:
        """End the program ``name`` and all that it started, at once."""
        launch.end(self.processes.pop(name))

    def stop(self) -> None:
        """End all programs, the nodes first."""
        for name in list(reversed(self.processes)):
            self.kill(name)


def node_config_text(values: Mapping[str, Scalar]) -> str:
    """Return the value of ``--node-config`` as Flower reads it: TOML values, separated by spaces.

    Flower ends a quoted value at the next quote of its kind, even if that quote is escaped. So :class:`ConfigError` is
    raised for a value that holds quotes of both kinds.
    """
    return " ".join(f"{key}={_toml(key, value)}" for key, value in values.items())


def _toml(key: str, value: Scalar) -> str:
    if not isinstance(value, str):
        return str(value).lower()
    if '"' not in value:
        return '"' + value.replace("\\", "\\\\") + '"'
    if "'" not in value:
        return f"'{value}'"
    raise ConfigError(key, value, "one kind of quotes", where="node-config")


@contextmanager
def local_deployment(folder: Path, nodes: Sequence[Mapping[str, Scalar]]) -> Iterator[Deployment]:
    """Start a whole deployment on this machine, and end it when the block ends.

    There is one SuperNode for each entry of ``nodes``, which is its node-config. The state of node k is below
    ``folder/node-k/state`` unless its node-config says otherwise. A ``folder`` that held a deployment before continues
    that one, with the same keys, nodes and states.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)  # keys, states and the SuperLink's messages are in there
    certificates = certificates_in(folder / "certificates")
    if not certificates.ca.exists():
        make_certificates(folder / "certificates", ["127.0.0.1", "localhost"])
    for each in (certificates.certificate, certificates.ca):
        try:
            valid_until(each)
        except ConfigError as error:
            error.hint = f"remove {str(certificates.ca)!r}, and new ones are made"
            raise
    port, fleet_port = launch.free_ports(2)
    deployment = Deployment(folder, certificates, port, fleet_port)
    try:
        deployment.start_superlink()
        deployment.start_executor()
        for k, node_config in enumerate(nodes):
            deployment.register(f"node-{k}")
            deployment.start_node(f"node-{k}", {"state-dir": str(folder / f"node-{k}" / "state"), **node_config})
        deployment.wait_for_nodes(len(nodes))
        yield deployment
    finally:
        deployment.stop()
