"""Further models from the sums of Hessians that a run of FedSpaLLM kept, without its clients."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedprune_app.config import ConfigError, Scalar
from fedprune_app.core.named import ValueDict
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import checkpoint_store, new_run_key
from fedprune_app.learning.device import device_of, prepare_torch
from fedprune_app.learning.language_models import check_same_model, language_model, perplexities, told_perplexities
from fedprune_app.models.saving import write_codes
from fedprune_app.preflight.inputs import of_run
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.reader import load_run, read_info
from fedprune_app.results.recorder import Recorder
from strategies.merging import Compression, KeptSums, load_sums, save_sums
from strategies.pruned_model import PrunedModel

_BITS, _SHAPE = "fedspallm.bits", ("density", "fedspallm.pattern", "fedspallm.refine")  # the keys that may change
_LAYERS = "fedspallm.layers-per-exchange"
_FORM = ("dtype", "hessian-form", "segment-length", "start-token")
# the keys that two runs have alike whose sums are put together
_ALIKE = ("model", "dp.enabled", *(f"fedspallm.{key}" for key in _FORM), _LAYERS)


def compress(run: Path, changes: Mapping[str, Scalar], out: Path) -> ValueDict:
    """Make the model of a completed run anew with ``changes`` of its settings, in ``out``; return its run.json.

    If only the bits change, the run's own model is rounded, with its recovery. Otherwise each layer is made from the
    dense one, as in a run with these settings, and ``final_sha256`` is that run's. One layer is in memory at a time.
    Raises a one-line ``ValueError`` for a run without sums, and for another setting.
    """
    source = SumsRun(run, changes)
    before, now = source.info["config"], source.config.to_dict()
    for key in changes.keys() - {_BITS, *_SHAPE}:
        raise ConfigError(key, changes[key], f"no value here; {', '.join((_BITS, *_SHAPE))} may change")
    is_same = before[_BITS] == 16 and all(now[key] == before[key] for key in _SHAPE)
    if not is_same and source.options.layers_per_exchange:
        raise ConfigError(_LAYERS, before[_LAYERS], "0", condition="in the run")
    return source.make(out, source.sums, source.pruned.layer if is_same else None)


def combine(run: Path, clients: Path, out: Path, *, forgets: bool = False) -> ValueDict:
    """Make a run's model anew in ``out`` with the clients of another run or, if it ``forgets``, without these.

    They send their sums in the run ``clients``, which they alone take part in. Sums are integers. So the new ones and
    ``final_sha256`` are those of a run of just these clients, with the settings of ``run``. Returns the new run.json.
    Raises ``ValueError`` in one line where the sums cannot be put together or taken apart.
    """
    source, other = SumsRun(run, {}), SumsRun(clients, {})
    before, sent = source.info["config"], other.info["config"]
    reason = ""
    if before[_LAYERS]:
        reason = f"each sum depends on those before it, allowed: {_LAYERS} 0"
    elif before["fedspallm.recovery-rounds"]:
        reason = "clients trained its weights, from which nothing can be taken out, allowed: no recovery"
    elif before["dp.enabled"]:
        reason = "it is private, and nobody can send the same noise again, allowed: dp.enabled false"
    if reason:
        raise ValueError(f"run {str(run)!r} stays as it is: {reason}")
    for key in _ALIKE:
        if sent[key] != before[key]:
            raise ConfigError(key, sent[key], repr(before[key]), condition=f"in run {str(clients)!r}")

    def sums(layer: int) -> KeptSums:
        kept = source.sums(layer)
        kept.include(other.sums(layer), -1 if forgets else 1)
        return kept

    sums(0)  # before anything is written
    them, known = ({each["partition"]: each for each in made.info["partition"]} for made in (other, source))
    if not forgets and (twice := known.keys() & them):
        raise ValueError(f"run {str(run)!r} has the sums of client {min(twice)}, allowed: to forget that client first")
    rest = {number: each for number, each in known.items() if number not in them}
    left = rest if forgets else rest | them
    said = {"partition": [left[number] for number in sorted(left)], "forgotten" if forgets else "joined": [*them]}
    return source.make(out, sums, None, said, keeps_sums=True)


class SumsRun:
    """A completed run whose sums are there, and the settings and tools with which a model is made of them."""

    def __init__(self, run: Path, changes: Mapping[str, Scalar]) -> None:
        info = self.info = read_info(run)
        if info["status"] != "completed" or not (run / "sums").is_dir():
            reason = "it keeps no sums, and what a client gave cannot be told from its weights"
            allowed = "a completed run with fedspallm.keep-sums"
            raise ValueError(f"run {str(run)!r} stays as it is: {reason}, allowed: {allowed}")
        no_recovery = {"num-server-rounds": 1, "fedspallm.recovery-rounds": 0}
        self.config = prepare(replace(of_run(info, ()), on_command_line={**no_recovery, **changes})).config
        self.options = self.config.fedspallm
        prepare_torch(self.config)
        self.model = language_model(self.config, device_of(self.config))
        check_same_model(self.model, info)
        self.compression = Compression(self.config, self.model)
        self.pruned = PrunedModel(self.model, run, info["run_key"])
        self.pruned.versions = dict.fromkeys(self.pruned.versions, 1)
        self.epsilon = info.get("epsilon_paid")
        if rounds := info["rounds_completed"]:  # none where the model was made of sums
            versions = checkpoint_store(run, info["run_key"]).read(rounds).meta["versions"]
            self.pruned.versions = {int(layer): version for layer, version in versions.items()}
            self.epsilon = load_run(run).rounds[-1]["epsilon_max"]

    def sums(self, layer: int) -> KeptSums:
        return load_sums(self.pruned.sums, layer, self.compression)

    def make(
        self,
        out: Path,
        sums_of: Callable[[int], KeptSums],
        layer_of: Callable[[int], Payload] | None,
        said: Mapping[str, Any] | None = None,
        *,
        keeps_sums: bool = False,
    ) -> ValueDict:
        """Make a model of the layers' sums, or of its pruned layers, which are rounded, and return its run.json."""
        info, model, recorder, run_key = self.info, self.model, Recorder(out), new_run_key()
        facts = {key: info[key] for key in ("partition", "model", "headline")}
        facts |= {"run_key": run_key, "made_from": info["final_sha256"], "epsilon_paid": self.epsilon, **(said or {})}
        recorder.start(self.config.to_dict(), self.config.seed, facts)
        new = PrunedModel(model, out, run_key)
        for layer in range(model.num_layers):
            payload = layer_of(layer) if layer_of else Payload({})
            if layer_of is None or self.options.bits < 16:
                kept = sums_of(layer)
                hessian_of = self.compression.hessians_of(kept.sums)
                if keeps_sums:
                    save_sums(new.sums, layer, kept)
                payload = payload if layer_of else self.compression.pruned(layer, hessian_of)
                if self.options.bits < 16:
                    payload, quantized_of = self.compression.rounded(payload, hessian_of)
                    write_codes(new.codes, model, layer, quantized_of)
            new.install(1, layer, payload, 1)
        results = perplexities(self.config, model, lambda layer: new.layer(layer).tensors)
        recorder.annotate(
            final_model=new.write(self.compression.cut),
            perplexity={name: result.value for name, result in results.items()},
            dense_perplexity=told_perplexities(self.config, model),  # of today's texts, too
        )
        digests = new.digest() * (1 + len(facts["partition"]))  # the clients' model is the server's
        recorder.finish("completed", final_sha256=hashlib.sha256(digests.encode()).hexdigest())
        return read_info(out)
