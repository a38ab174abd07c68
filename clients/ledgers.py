"""Whose ledger a private client's is, where it lies, and which secret draws the parts of its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from clients.node import Node, Place
from clients.privacy import ClientPrivacy
from fedprune_app.config import Config
from fedprune_app.files import kept_secret

if TYPE_CHECKING:  # dp-accounting takes seconds to import, and most runs do without
    from fedprune_app.privacy.ledger import Data


def open_privacy(node: Node, records: Callable[[], list[bytes]], dealing: str) -> ClientPrivacy | None:
    """Open the ledger where ``dp.enabled`` asks for one, once the client knows its data.

    ``records`` gives a digest of each record of the client's data, all parts of them. ``dealing`` says for readers of
    the ledger how data are dealt to clients. Raises ``ValueError`` where the ledger is damaged, and where the noise is
    less than the node asks for.
    """
    config, place = node.config, node.place
    if not config.dp.enabled:
        return None
    data = _data(config, place, records(), dealing)
    path = _path(config, place, data, node.store.folder)
    spending, count = node.spending(), node.num_examples
    return node.privacy_kind(config, node.client_id, count, spending, path, data, place.policy)


def split_secret(config: Config, place: Place) -> str:
    """Return the node's secret by which parts of its own data are drawn; empty where the run's seed draws them.

    The secret is for private runs whose noise nobody else knows. It is made once, and is beside the ledger.
    """
    dp = config.dp
    if not (place.has_own_data and dp.enabled and dp.secure_rng):
        return ""
    return kept_secret(Path(dp.ledger_dir or place.state_dir) / "split.secret")


def _data(config: Config, place: Place, records: list[bytes], dealing: str) -> Data:
    """Say whose ledger the client's is: its data's, known by their content.

    Where the node's operator says where the ledger is, there is one for all data. Elsewhere a client's own data may
    change with time, and go on with the same ledger while they share a record with the data before. Data that are dealt
    otherwise have another ledger.
    """
    from fedprune_app.privacy.ledger import Data

    if place.has_own_data:
        return Data.of(records, "a folder of the client's own", may_change=True, joins=_is_one_for_all(place))
    number, clients = place.share
    about = f"client {number} of {clients}, {config.dataset} dealt by {dealing} with seed {config.seed}"
    return Data.of(records, about, joins=_is_one_for_all(place))


def _is_one_for_all(place: Place) -> bool:
    """Say whether the node's operator asks for one ledger, whatever the runs make of the node's data."""
    return bool(place.policy.ledger_dir or place.policy.epsilon_budget)


def _path(config: Config, place: Place, data: Data, folder: Path) -> Path:
    """Return the path of the client's ledger: in its ``folder``, or in ``dp.ledger-dir`` for all runs on the data.

    The name of a ledger of own data follows from the data. The client's number, which the server gives, plays no part
    in it.
    """
    from fedprune_app.privacy.ledger import ledger_of

    shared_folder = config.dp.ledger_dir
    if place.has_own_data:
        return ledger_of(data, Path(shared_folder) if shared_folder else place.state_dir)
    if not shared_folder:
        return folder / "ledger.jsonl"
    dealing = "" if _is_one_for_all(place) else f"-{data.identity[:16]}"
    return Path(shared_folder) / f"{place.client_id:05d}{dealing}.jsonl"
