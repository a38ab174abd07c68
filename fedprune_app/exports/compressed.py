"""Further models from the sums of Hessians that a run of FedSpaLLM kept, without its clients."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedprune_app.config import ConfigError, Scalar
from fedprune_app.core.payload import Payload
from fedprune_app.engine.store import checkpoint_store, new_run_key
from fedprune_app.learning.device import device_of, prepare_torch
from fedprune_app.learning.language_models import language_model, perplexities
from fedprune_app.models.saving import write_codes
from fedprune_app.preflight.inputs import of_run
from fedprune_app.preflight.prepare import prepare
from fedprune_app.results.reader import read_info
from fedprune_app.results.recorder import Recorder
from strategies.merging import Compression, load_sums
from strategies.pruned_model import PrunedModel

_BITS, _SHAPE = "fedspallm.bits", ("density", "fedspallm.pattern", "fedspallm.refine")  # the keys that may change


def compress(run: Path, changes: Mapping[str, Scalar], out: Path) -> dict[str, Any]:
    """Make the model of a completed run anew with ``changes`` of its settings, in ``out``; return its run.json.

    If only the bits change, the run's own model is rounded, with its recovery. Otherwise each layer is made from the
    dense one, as in a run with these settings, and ``final_sha256`` is that run's. One layer is in memory at a time.
    Raises a one-line ``ValueError`` for a run without sums, and for another setting.
    """
    info = read_info(run)
    if info["status"] != "completed" or not info["config"].get("fedspallm.keep-sums"):
        raise ValueError(f"run {str(run)!r} is none that can be compressed, allowed: fedspallm.keep-sums, completed")
    for key in changes.keys() - {_BITS, *_SHAPE}:
        raise ConfigError(key, changes[key], f"no value here; {', '.join((_BITS, *_SHAPE))} may change")
    no_recovery = {"num-server-rounds": 1, "fedspallm.recovery-rounds": 0}
    config = prepare(replace(of_run(info, ()), on_command_line={**no_recovery, **changes})).config
    values, options = config.to_dict(), config.fedspallm
    is_same = info["config"][_BITS] == 16 and all(values[key] == info["config"][key] for key in _SHAPE)
    if not is_same and options.layers_per_exchange:
        raise ConfigError("fedspallm.layers-per-exchange", options.layers_per_exchange, "0", condition="in the run")
    prepare_torch(config)
    model = language_model(config, device_of(config))
    compression, old = Compression(config, model), PrunedModel(model, run, info["run_key"])
    checkpoints = checkpoint_store(run, info["run_key"])
    old.versions = {int(i): n for i, n in checkpoints.read(info["rounds_completed"]).meta["versions"].items()}

    recorder, run_key = Recorder(out), new_run_key()
    kept = {key: info[key] for key in ("partition", "model", "dense_perplexity", "headline")}
    recorder.start(values, config.seed, {**kept, "run_key": run_key, "compressed_from": info["final_sha256"]})
    new = PrunedModel(model, out, run_key)
    for layer in range(model.num_layers):
        payload = old.layer(layer) if is_same else Payload({})
        if not is_same or options.bits < 16:
            hessian_of = compression.hessians_of(load_sums(old.sums, layer, compression))
            payload = payload if is_same else compression.pruned(layer, hessian_of)
            if options.bits < 16:
                payload, quantized_of = compression.rounded(payload, hessian_of)
                write_codes(new.codes, model, layer, quantized_of)
        new.install(1, layer, payload, 1)
    results = perplexities(config, model, lambda layer: new.layer(layer).tensors)
    recorder.annotate(
        final_model=new.write(compression.cut),
        perplexity={name: result.value for name, result in results.items()},
    )
    digests = new.digest() * (1 + len(info["partition"]))  # the clients' model is the server's
    recorder.finish("completed", final_sha256=hashlib.sha256(digests.encode()).hexdigest())
    return read_info(out)
