"""Commands for deployments on real nodes: ``fedprune deploy``."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedprune_app.cli.options import AcceptLoss, Configs, Out, Overrides, Plugins
from fedprune_app.cli.running import run_once
from fedprune_app.config import ConfigError, Scalar
from fedprune_app.config.options import share_in_turn
from fedprune_app.errors import LaunchError
from fedprune_app.preflight.inputs import Placement, inputs_in
from fedprune_app.preflight.prepare import prepare
from fedprune_app.terminal import console, echo

app = typer.Typer(no_args_is_help=True)


@app.command()
def local(
    overrides: Overrides = None,
    config: Configs = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", help="How many SuperNodes to start: else 3, or one per folder of --data-dirs.", min=1),
    ] = None,
    data_dirs: Annotated[
        str, typer.Option("--data-dirs", help="Folders with each node's own data, in place of a partition: 'A,B,C'.")
    ] = "",
    capacities: Annotated[
        str, typer.Option("--capacities", help="The density that each node can bear: '0.3 0.6 1'.")
    ] = "",
    policies: Annotated[
        str, typer.Option("--policies", help="Files with each node's own policy, see docs/deploy.md: 'A,B,C'.")
    ] = "",
    out: Out = Path("runs/deployed"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, with the same nodes.")] = False,
    accept_loss: AcceptLoss = False,
    plugin: Plugins = None,
) -> None:
    """Rehearse a deployment with all its programs on this machine.

    A SuperLink, an executor and SuperNodes run as processes here.
    They use TLS and registered keys, as on real machines.
    Each KEY=VALUE is a setting; `fedprune list --keys` shows all of them.
    """
    from fedprune_app.config import POLICY_FILE
    from fedprune_app.preflight.node import read_policy

    folders, files = _paths(data_dirs), _paths(policies)
    if nodes is None:
        nodes = len(folders) or len(files) or 3
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError("--data-dirs", folder, "folders")
    for file in files:
        read_policy({POLICY_FILE: str(file)})
    shares = [share_in_turn("--capacities", capacities, k, 1.0) for k in range(len(capacities.split()))]
    places: list[dict[str, Scalar]] = [{} for _ in range(nodes)]
    values_by_option: dict[str, tuple[str, Sequence[Scalar]]] = {
        "--data-dirs": ("data-dir", list(map(str, folders))),
        "--capacities": ("capacity", shares),
        "--policies": (POLICY_FILE, list(map(str, files))),
    }
    for option, (key, values) in values_by_option.items():
        if len(values) not in (0, nodes):
            raise ConfigError(option, ..., f"one per node, {nodes}", which=f"has {len(values)} entries")
        for place, value in zip(places, values, strict=False):
            place[key] = value
    inputs = inputs_in(config, overrides, plugin)
    inputs = inputs.for_run_in(out, resume=resume, accept_loss=accept_loss)
    placement = Placement(num_clients=nodes, nodes=tuple(places), deployment=inputs.folder / "deployment")
    run_once(prepare(inputs, placement), out)


def _paths(text: str) -> list[Path]:
    return [Path(path.strip()).expanduser().resolve() for path in text.split(",") if path.strip()]


@app.command()
def certificates(
    hosts: Annotated[
        list[str], typer.Option("--host", help="A name or address of the SuperLink. You may repeat the option.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder for the three files.")] = Path("certificates"),
    days: Annotated[
        int, typer.Option("--days", help="How many days the certificates are valid.", min=1, max=36500)
    ] = 365,
) -> None:
    """Make a certificate authority and the SuperLink's certificate.

    Give ca.crt to nodes and users. Give the private key to nobody.
    """
    from fedprune_app.launching.credentials import make_certificates, valid_until

    files = make_certificates(out.expanduser(), hosts, days)
    for path in (files.ca, files.certificate, files.key):
        echo(f": {path}", "made", "green")
    echo(f"valid until {valid_until(files.certificate):%Y-%m-%d}")


@app.command(name="node-key")
def node_key(
    path: Annotated[Path, typer.Argument(metavar="FILE")],
) -> None:
    """Make a SuperNode's key pair.

    FILE gets the private key, and FILE.pub gets the public key.
    The node's operator keeps the private key.
    The SuperLink's operator registers the public key.
    """
    from fedprune_app.launching.credentials import make_node_key

    public = make_node_key(path.expanduser())
    echo(f": {path} and {public}", "made", "green")
    echo(f"register it: flwr supernode register {public} NAME")


@app.command()
def database(
    path: Annotated[Path, typer.Argument(metavar="FILE")],
) -> None:
    """Make the SuperLink's database.

    Pass FILE to flower-superlink as --database.
    Only the owner of the file can read it.
    The file shrinks when messages are deleted.
    """
    from fedprune_app.launching.credentials import make_database

    echo(f": {make_database(path.expanduser())}", "made", "green")


@app.command(name="control-secret")
def control_secret(
    path: Annotated[Path, typer.Argument(metavar="FILE")],
) -> None:
    """Make the secret that users need for the SuperLink's Control API.

    Only the owner of FILE can read it.
    `fedprune deploy superlink` requires the secret from users.
    `fedprune deploy login` stores it for a user's commands.
    """
    from fedprune_app.launching.credentials import make_control_secret

    echo(f": {make_control_secret(path.expanduser())}", "made", "green")


@app.command()
def login(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")],
    secret: Annotated[Path, typer.Option("--secret", help="The file with the secret, from the SuperLink's operator.")],
) -> None:
    """Store the secret of a SuperLink's Control API for this user's commands.

    HOST:PORT is the address in the user's Flower configuration.
    The secret is written to credentials.yaml in the folder FLWR_HOME.
    Without FLWR_HOME the folder is ~/.flwr.
    """
    from fedprune_app.launching.credentials import log_in

    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    echo(f": {log_in(address, secret.expanduser(), home)}", "written", "green")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def superlink(
    context: typer.Context,
    secret: Annotated[Path, typer.Option("--control-secret", help="The file of `fedprune deploy control-secret`.")],
) -> None:
    """Start Flower's SuperLink with a Control API that requires the secret.

    All other options are those of flower-superlink.
    Without the secret everybody who reaches the Control API may start runs.
    """
    from fedprune_app.engine.superlink import SECRET_VARIABLE, read_secret
    from fedprune_app.launching.local import superlink_command

    command = superlink_command(context.args)
    read_secret(secret.expanduser())  # fails here in one line, in Flower's program in many
    os.execve(command[0], command, {**os.environ, SECRET_VARIABLE: str(secret.expanduser())})


@app.command()
def check(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")],
    ca: Annotated[Path, typer.Option("--root-certificates", help="The ca.crt from the SuperLink's operator.")],
) -> None:
    """Check that a SuperLink responds and that its certificate is trusted.

    HOST:PORT is the address at which nodes reach the SuperLink.
    The exit code is 1 if no server responds there with a trusted certificate.
    Run this command before you start a node.
    """
    from fedprune_app.launching.credentials import check_link

    until = check_link(address, ca.expanduser())
    console.print(f"{address} speaks TLS, its certificate is valid until {until:%Y-%m-%d}")


@app.command()
def healthy(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT")],
) -> None:
    """Check that a SuperLink, SuperExec or SuperNode serves.

    HOST:PORT is the program's --health-server-address.
    The exit code is 1 if the program does not serve.
    The command is for healthchecks.
    """
    from fedprune_app.launching.local import is_healthy

    if not is_healthy(address):
        raise LaunchError(f"{address} does not serve")
