"""One folder for whoever decides whether a trained model may leave: model, promise, attacks, provenance.

Nothing in it names a path, a machine, an owner or a record. ``SHA256SUMS`` has the digest of each other file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from packaging.requirements import Requirement
from torch import Tensor
from torch.nn import functional as F

from fedprune_app.config import NO_POLICY, POLICY_FILE, Config, ConfigError, Policy, PolicyError
from fedprune_app.config.config import flat
from fedprune_app.config.options import PathKind
from fedprune_app.core.named import ValueDict, Values
from fedprune_app.data.splits import client_data, data_config
from fedprune_app.engine.store import state_folder
from fedprune_app.exports.find import Exportable, find_model
from fedprune_app.exports.formats import convert, is_language_model, pack_model
from fedprune_app.files import replace_file, sha256_of
from fedprune_app.preflight.inputs import of_run
from fedprune_app.preflight.node import read_policy
from fedprune_app.preflight.prepare import prepare
from fedprune_app.privacy.accounting import ACCOUNTANTS, Laplace, Release, Steps, epsilon
from fedprune_app.privacy.ledger import Ledger
from fedprune_app.results.reader import Run, load_run
from fedprune_app.results.recorder import git_hash, versions
from fedprune_app.results.report import filled
from fedprune_app.results.similarity import ranks

SUMS, PAGE = "SHA256SUMS", "README.html"
REFUSALS = ("no-ledger", "seeded-noise", "open-accuracies", "no-audit", "no-policy")
_NAMES = ("system", "dataset", "partition")  # of what is registered: no paths


@dataclass(frozen=True)
class Question:
    """What to release, and with which evidence; ``allowed`` are refusals that do not count."""

    run: Path
    client: int | None = None
    audit: Path | None = None
    policy: Path | None = None
    ledgers: Sequence[Path] = ()
    allowed: Collection[str] = ()
    trusted: Collection[str] = ()


def settings_digest(config: Config) -> str:
    """Return a digest of the settings on which an audit's outcome depends: not of paths, nor of the seed."""
    told = {
        key: value
        for key, value, option in flat(config)
        if option.changes_results and option.kind is PathKind.PLAIN and key not in ("seed", "download")
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@dataclass
class Pack:
    """What is known of a run for its release, and the ``files`` of the release, by name."""

    question: Question
    run: Run
    files: dict[str, bytes] = field(default_factory=dict)

    @cached_property
    def config(self) -> Config:
        return prepare(of_run(self.run.info, self.question.trusted)).config

    @cached_property
    def clients(self) -> list[int]:
        """Who sent something: what left of each is in every model."""
        return sorted({row["partition"] for row in self.run.clients if row.get("bytes_up")})

    @cached_property
    def ledgers(self) -> list[Ledger]:
        states = state_folder(self.run.folder, self.config.state_dir, str(self.run.info.get("run_key")))
        own = (states / f"{client:05d}" / "ledger.jsonl" for client in self.clients)
        paths = dict.fromkeys(path.resolve() for path in (*own, *self.question.ledgers))
        return [Ledger(path) for path in paths if path.is_file()]

    @cached_property
    def audit(self) -> Values:
        return {} if self.question.audit is None else json.loads(self.question.audit.read_bytes())

    @cached_property
    def policy(self) -> Policy:
        """The node's policy, as far as it can be told."""
        file = self.question.policy
        return NO_POLICY if file is None else read_policy({POLICY_FILE: str(file.absolute())})

    def epsilon(self, delta: float) -> float:
        """Return the largest ε of a ledger."""
        return max((ledger.epsilon(delta, self.config.dp.accountant) for ledger in self.ledgers), default=0.0)

    def refusals(self) -> dict[str, str]:
        """Return by name why the model should not leave."""
        reasons = {
            "no-ledger": self._no_ledger(),
            "seeded-noise": "the noise of clients was drawn from the seed, which the server knows"
            if (self.run.info.get("noise") or {}).get("seed")
            else "",
            "open-accuracies": "accuracies on private data were told without noise"
            if self.config.dp.accuracies == "open"
            else "",
            "no-audit": self._no_audit(),
            "no-policy": self._no_policy(),
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def _no_ledger(self) -> str:
        if not self.config.dp.enabled:
            return "the run had no differential privacy"
        missing = len(self.clients) - len(self.ledgers)
        if missing > 0:
            return f"the ledgers of {missing} of {len(self.clients)} clients are not here"
        told = {row["partition"]: row["epsilon_rdp"] for row in self.run.clients if row.get("epsilon_rdp")}
        spent = sorted(ledger.epsilon(self.config.dp.delta, "rdp") for ledger in self.ledgers)[-len(told) or None :]
        if any(ours < theirs - 1e-6 for ours, theirs in zip(spent, sorted(told.values()), strict=False)):
            return "the ledgers have spent less than the clients told: they are of another run"
        return "" if self.ledgers else "no ledger is given"

    def _no_audit(self) -> str:
        if not self.audit:
            return "no audit is given"
        if self.audit.get("settings") != settings_digest(self.config):
            return "the audit is of other settings"
        if self.audit.get("run") not in (None, self.run.info["final_sha256"]):
            return "the audit is of another run"
        if self.ledgers and self.audit["bound"] > self.epsilon(self.config.dp.delta):
            return "the audit found more than the ledgers have spent"
        return "" if self.audit["holds"] else "the audit found that the ledger is wrong"

    def _no_policy(self) -> str:
        policy = self.policy
        if not policy.why_private:
            return "no node's policy that demands privacy is given"
        try:
            policy.check(self.config)
            for release in (each for ledger in self.ledgers for each in ledger.spent if isinstance(each, Steps)):
                policy.check_noise(self.config.dp, release.noise_multiplier, "noise multiplier")
        except PolicyError as error:
            return str(error)
        if 0 < policy.epsilon_budget < (spent := self.epsilon(policy.budget_delta)):
            return f"the policy allows ε {policy.epsilon_budget:g} at δ = {policy.budget_delta:g}: {spent:.3g} is spent"
        return ""

    # --- the files ------------------------------------------------------------------------------------------------

    def privacy(self) -> ValueDict:
        dp, ledgers = self.config.dp, self.ledgers
        rows = self.run.clients
        traffic = {way: int(sum(row.get(f"bytes_{way}") or 0 for row in rows)) for way in ("up", "down")}
        clients = [
            {
                "ledger": number,
                "epsilon": {name: ledger.epsilon(dp.delta, name) for name in ACCOUNTANTS},
                "releases": [_told(release, count) for release, count in ledger.spent.items()],
            }
            for number, ledger in enumerate(ledgers, start=1)
        ]
        most_spent = max(ledgers, key=lambda ledger: ledger.epsilon(dp.delta, dp.accountant), default=None)
        spent = {} if most_spent is None else most_spent.spent
        largest = None if most_spent is None else most_spent.epsilon(dp.delta, dp.accountant)
        budget = dp.epsilon_limit
        return {
            "unit": self.config.protected_unit,
            "delta": dp.delta,
            "accountant": dp.accountant,
            "epsilon": largest,
            "budget": budget,
            "budget_left": None if budget is None or largest is None else max(budget - largest, 0.0),
            "clip_norm": dp.clip_norm,
            "noise_multiplier": min((each.noise_multiplier for each in spent if isinstance(each, Steps)), default=None),
            "releases": sum(spent.values()),
            "accuracies": dp.accuracies,
            "noise": {name: len(who) for name, who in (self.run.info.get("noise") or {}).items() if who},
            "clients": clients,
            "messages": {"client_to_server": sum(bool(row.get("bytes_up")) for row in rows)},
            "bytes": {"client_to_server": traffic["up"], "server_to_client": traffic["down"]},
        }

    def provenance(self, model: dict[str, str]) -> ValueDict:
        info = self.run.info
        told = {
            key: value
            for key, value, option in flat(self.config)
            if key in _NAMES or not isinstance(value, str) or (value in option.choices and option.choices)
        }
        defaults = {key: option.default for key, _, option in flat(self.config)}
        chosen = {key: value for key, value in told.items() if value != defaults[key] or key == "system"}
        settings = " ".join(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in chosen.items())
        run_fields = ("versions", "git_hash", "final_sha256", "rounds_completed", "seed", "records")
        return {
            "run": {key: info.get(key) for key in run_fields},
            "released_with": {"versions": versions(), "git_hash": git_hash()},
            "settings": told,
            "not_told": sorted({key for key, _, _ in flat(self.config)} - told.keys()),
            "settings_sha256": settings_digest(self.config),
            "model_files": model,
            "commands": [f"fedprune run {settings} --out RUN", "fedprune audit RUN --json audit.json"],
        }

    def membership(self, model: Exportable) -> ValueDict | None:
        """Return what an attack by the released model's confidence finds; None where the data are not here.

        The score of an example is the largest probability that the model gives it. ``auc`` is the chance that an
        example of the training data has a larger score than a test example; equal scores count half.
        """
        if "nodes" in self.run.info:
            return None
        clients = self.clients if self.question.client is None else [self.question.client]
        data = [client_data(data_config(self.config), client, self.num_partitions) for client in clients]
        scores = [
            [confidences(model.network, getattr(each, f"{part}_images")) for each in data] for part in ("train", "test")
        ]
        members, others = (np.concatenate(part) for part in scores)
        above = ranks(np.concatenate([members, others]))[: len(members)].sum() - len(members) * (len(members) + 1) / 2
        auc = above / (len(members) * len(others))
        # how many examples groups have is private
        sizes = {} if self.config.dp.unit == "group" else {"n_pos": len(members), "n_neg": len(others)}
        return {"auc": round(float(auc), 2), **sizes}

    @property
    def units(self) -> int:
        """How many examples or groups the model was trained on."""
        numbers = {row["partition"]: row.get("num_examples") or 0 for row in self.run.clients}
        return sum(numbers[client] for client in self.clients)

    @property
    def num_partitions(self) -> int:
        return int(self.run.info["num_partitions"])


def confidences(network: torch.nn.Module, images: Tensor) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    with torch.inference_mode():
        parts = [F.softmax(network(part), dim=1).amax(1) for part in torch.split(images, 256)]
    return torch.cat(parts).numpy() if parts else np.empty(0, np.float32)


def _told(release: Release, count: int) -> ValueDict:
    return {"kind": "steps" if isinstance(release, Steps) else "laplace", **vars(release), "count": count}


def bill_of_materials(name: str, model: dict[str, str]) -> ValueDict:
    """Return what the model was made with, as a CycloneDX 1.6 document: its files, and fedprune's dependencies."""
    files = [
        {"type": "machine-learning-model", "name": file, "hashes": [{"alg": "SHA-256", "content": digest}]}
        for file, digest in model.items()
    ]
    libraries = [
        {"type": "library", "name": library, "version": version, "purl": f"pkg:pypi/{library}@{version}"}
        for library, version in sorted(_installed("fedprune").items())
    ]
    component = {"type": "machine-learning-model", "name": name}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component},
        "components": files + libraries,
    }


def _installed(name: str) -> dict[str, str]:
    """Return the versions of a distribution and of all that it needs, by name, as far as they are installed."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = distribution.version
        needed = map(Requirement, distribution.requires or [])
        waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def release(question: Question, output: Path) -> Path:
    """Write the pack to the new folder ``output``.

    Raises :class:`ConfigError` for a folder that exists, and ``ValueError`` in one line for what may not leave.
    """
    if output.exists():
        raise ConfigError("--output", output, "a new folder", which="exists")
    pack = Pack(question, load_run(question.run))
    refusals = pack.refusals()
    for name, reason in refusals.items():
        if name not in question.allowed:
            raise ValueError(f"{reason}: refused; allowed: another run, or --allow {name}, which the page then says")
    attack, info = None, None
    if is_language_model(question.run):
        output.mkdir(parents=True)
        pack_model(question.run, output / "MODEL")
    else:
        model = find_model(question.run, question.client, trusted=question.trusted)
        pack.files["MODEL/model.safetensors"] = convert(model, "safetensors")[0]
        attack, info = pack.membership(model), model.info
    for name, content in pack.files.items():
        replace_file(output / name, content)
    digests = dict(_digests(output))
    privacy = pack.privacy()
    documents = {
        "privacy.json": privacy,
        "provenance.json": pack.provenance(digests),
        "sbom.cdx.json": bill_of_materials(f"{pack.run.system} {pack.config.dataset}", digests),
        "attack/audit.json": pack.audit,
        **_for_sacroml(pack, attack),
    }
    for name, document in documents.items():
        replace_file(output / name, json.dumps(document, indent=1).encode())
    page = filled(
        "fedprune_app.results",
        "templates/release.html",
        pack=pack,
        privacy=privacy,
        attack=attack,
        info=info,
        warnings=refusals,
        digests=digests,
        day=datetime.now(UTC).date().isoformat(),
    )
    replace_file(output / PAGE, page.encode())
    sums = "".join(f"{digest}  {name}\n" for name, digest in _digests(output))
    replace_file(output / SUMS, sums.encode())
    return output


def _for_sacroml(pack: Pack, attack: ValueDict | None) -> dict[str, ValueDict]:
    """Return the files that SACRO-ML 2 reads: JSON is YAML, too. The data of the attack stay where they are."""
    target = {"dataset_name": str(pack.config.dataset), "dataset_module_path": "", "features": {}, "safemodel": []}
    if attack is None:
        return {"attack/target.yaml": target}
    name = "Membership by the model's confidence"
    metadata = {"attack_name": name, "attack_params": {}, "global_metrics": {}}
    instances = {"attack_instance_logger": {"instance_0": {**attack, "AUC": attack["auc"]}}}
    report = {"log_id": "fedprune", "metadata": metadata, "attack_experiment_logger": instances}
    return {"attack/target.yaml": target, "attack/attack_results.json": report}


def _digests(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != SUMS:
            yield path.relative_to(folder).as_posix(), sha256_of(path)


def verify(pack: Path) -> dict[str, float]:
    """Check every digest of a pack, and return the ε of each ledger, computed anew from its releases.

    Raises ``ValueError`` in one line for a file that is missing, changed or not named, and for another ε.
    """
    if not (pack / SUMS).is_file():
        raise ValueError(f"'{pack}' is no pack: it has no {SUMS}")
    known = {name: digest for digest, name in map(str.split, (pack / SUMS).read_text().splitlines())}
    found = dict(_digests(pack))
    for name in sorted(known.keys() | found.keys()):
        if known.get(name) != found.get(name):
            raise ValueError(f"{name} in '{pack}' is missing, changed or not named in {SUMS}")
    privacy = json.loads((pack / "privacy.json").read_bytes())
    epsilons = {}
    for client in privacy["clients"]:
        spent = {_release_of(entry): entry["count"] for entry in client["releases"]}
        for accountant, claim in client["epsilon"].items():
            if abs(epsilon(spent, privacy["delta"], accountant) - claim) > 1e-6 * claim:
                raise ValueError(f"ledger {client['ledger']} in '{pack}' has not the ε that the pack says")
        epsilons[str(client["ledger"])] = client["epsilon"][privacy["accountant"]]
    return epsilons


def _release_of(entry: Values) -> Release:
    values = {key: value for key, value in entry.items() if key not in ("kind", "count")}
    return Steps(**values) if entry["kind"] == "steps" else Laplace(**values)
