"""What ``import fedprune_app`` does to the process that imports it: nothing; and what a run does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import logging, os, signal, sys, threading, warnings
import flwr.clientapp, flwr.serverapp, numpy, opacus, torch  # which change what they change

def state():
    root, known = logging.getLogger(), logging.Logger.manager.loggerDict
    loggers = {name: log for name, log in [("", root), *known.items()] if isinstance(log, logging.Logger)}
    return {
        "finders": [*sys.meta_path, *sys.path_hooks, *sys.path],
        "loggers": {
            name: (log.level, log.propagate, log.disabled, [*log.handlers], [*log.filters])
            for name, log in loggers.items()
            if (log.level, log.propagate, log.disabled, log.handlers, log.filters) != (0, True, False, [], [])
        },
        "warnings": [*warnings.filters],
        "environment": dict(os.environ),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "hooks": [sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook],
        "torch": [torch.initial_seed(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()],
    }

before = state()
import IMPORTED
after = state()
print(*[name for name in before if before[name] != after[name]])
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "imported",
    [
        "fedprune_app.api, fedprune_app.server_app, fedprune_app.client_app",
        pytest.param("fedprune_app, strategies, clients", marks=pytest.mark.full),
    ],
)
def test_to_import_fedprune_changes_nothing_in_the_process(imported):
    command = [sys.executable, "-c", CODE.replace("IMPORTED", imported)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


UNUSED = {"matplotlib", "onnx", "opacus", "pandas", "plotly", "ray", "scipy", "sklearn", "torchvision", "transformers"}
UNUSED |= {"sympy", "torch._dynamo"}  # torch's compiler
RUN = """
import sys
from fedprune_app.cli import main
sys.argv = ["fedprune", *sys.argv[1:]]
try:
    main()
finally:
    print("unused:", *sorted(UNUSED & sys.modules.keys()))
"""


def test_server_and_clients_of_a_run_import_no_package_that_they_do_not_use(tmp_path):
    settings = ["system=dispfl", "num-server-rounds=1", "local-epochs=1", "evaluate-every=1"]
    command = ["run", "--engine", "inprocess", "--clients", "4", "--out", str(tmp_path / "run"), *settings]
    done = subprocess.run(
        [sys.executable, "-c", f"UNUSED = {UNUSED}" + RUN, *command], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "unused:"), done.stderr
