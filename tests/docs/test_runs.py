"""The commands of README and docs as they stand, in a copy of the repository: run to their end, or until they go well.

What takes hours is interrupted after a round, as its user would by Ctrl-C. `$HOME/cifar` holds noise in the format and
size of CIFAR-10. What needs other machines, Docker or a day is parsed alone, in ``test_commands.py``.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.docs.blocks import ROOT, Block, blocks, copy_of_the_repository

USE = next(block for block in blocks() if block.page.endswith("guide.md") and "--out runs/first" in block.text)
SNIPPET, IN_PYTHON = (
    next(block for block in blocks() if block.language == "python" and text in block.text)
    for text in ("AutoModelForCausalLM", "fedprune.run(")
)
PRIVATE, AUDIT = (
    next(block for block in blocks() if block.page == "docs/privacy.md" and text in block.text)
    for text in ("--out runs/private", "audit.json")
)
DEPLOYED = next(block for block in blocks() if "fedprune deploy local --nodes 3" in block.text)
NODE_KEY = next(block for block in blocks() if block.text.startswith("fedprune deploy node-key hospital-a.key"))
CERTIFICATES = next(block for block in blocks() if block.text.startswith("umask 077\nfedprune deploy certificates"))
ENDS = (
    "--out runs/first",
    "--out runs/ward",
    "fedprune release",
    "fedprune report",
    "fedprune demo",
    "system=fedspallm",
    "fedprune audit",
)


def lines(*found: Block) -> list[str]:
    """The command lines of blocks; of one that goes on in the next line, all of it."""
    texts = [block.text.replace("\\\n", " ").splitlines() for block in found]
    return [line for text in texts for line in text if line.strip()]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A copy of the repository, and a home with data."""
    folder = tmp_path_factory.mktemp("docs")
    data = folder / "home" / "cifar" / "cifar-10-batches-bin"
    data.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records = draw.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(10_000) % 10
        records.tofile(data / name)
    (data / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    return copy_of_the_repository(folder / "fedprune")


def environment(place: Path) -> dict[str, str]:
    """Of a user who has activated fedprune's virtual environment, with a home and ports of their own."""
    from fedprune_app.launching.processes import free_ports

    ports = free_ports(2)
    return {
        **os.environ,
        "HOME": str(place.parent / "home"),
        "XDG_CACHE_HOME": str(place.parent / "home" / ".cache"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(place),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(ports[0]),
        "FLWR_LOCAL_CONTROL_API_PORT": str(ports[1]),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONWARNINGS": "ignore",
    }


def rounds_below(folder: Path) -> int:
    """How many rounds the runs in a folder, or below it, have completed."""
    found = 0
    for path in [folder / "run.json", *folder.glob("*/run.json")]:
        try:
            found += json.loads(path.read_text())["rounds_completed"]
        except (OSError, ValueError):
            continue
    return found


def run(line: str, place: Path, *, seconds: float = 5 * 3600) -> str:
    """Run a line as it stands; unless it is one that ends, interrupt it when it has done a round. Its last line."""
    words = line.split("#")[0].split()
    out = place / words[words.index("--out") + 1] if "--out" in words else place / "none"
    ends = any(text in line for text in ENDS)
    before, started = rounds_below(out), time.monotonic()
    with (place / "said.txt").open("w+") as said:
        command = ["bash", "-c", f"exec {line}"]
        listens = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # where the tests run under nohup
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment(place),
            stderr=said,
            stdout=said,
            start_new_session=True,
            preexec_fn=listens,
        )
        interrupted = False
        try:
            while process.poll() is None:
                assert time.monotonic() - started < seconds, f"{line} takes too long"
                if not (ends or interrupted) and rounds_below(out) > before:
                    process.send_signal(signal.SIGINT)
                    interrupted = True
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.kill()  # what it started ends with it
                process.wait()
        said.seek(0)
        text = said.read()
    assert process.returncode in ((0, 130) if interrupted else (0,)), f"{line}\n{text}"
    return text.strip().splitlines()[-1] if text.strip() else ""


@pytest.mark.programs
@pytest.mark.parametrize("text", ["fedprune list", "fedprune list --keys dispfl"])
def test_the_lists_are_quick(text, place):
    assert f"`{text}`" in (ROOT / "README.md").read_text()
    run(text, place)


@pytest.mark.programs
def test_a_nodes_key_and_certificates_are_made_as_the_page_says(place):
    run(NODE_KEY.text.strip(), place)
    assert (place / "hospital-a.key.pub").exists()
    run(lines(CERTIFICATES)[1], place)
    assert (place / "certificates" / "ca.crt").exists()


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_the_commands_of_the_guide_work_in_their_order(place):
    for line in lines(USE):
        started = time.monotonic()
        last = run(line, place)
        print(f"{time.monotonic() - started:6.0f} s  {line.split('  ')[0]}: {last}")
    snippet = SNIPPET.text.replace("runs/cut-4", "runs/llm")
    for code, *warnings in ((snippet, "-W", "error"), (IN_PYTHON.text,)):
        done = subprocess.run(
            [sys.executable, *warnings, "-c", code],
            cwd=place,
            env=environment(place),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_the_commands_on_privacy_work(place):
    for line in lines(PRIVATE, AUDIT):
        if "data-dir=DIR" not in line and "--without-noise" not in line:  # the latter ends with 1, as it is to show
            print(line, run(line, place))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_rehearsals_of_a_deployment_work(place):
    for line in lines(DEPLOYED):
        if "/data/" not in line:
            print(line, run(line, place))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_export_of_the_guide_works(place):
    if not (place / "runs" / "first").exists():
        run(lines(USE)[0], place)
    text = (ROOT / "docs" / "guide.md").read_text()
    command = "fedprune export runs/first --client 3 -o client-3.safetensors"
    assert f"`{command}`" in text
    for suffix, more in ((".safetensors", ""), (".safetensors", "--force"), (".onnx", "")):
        written = f"{command.removesuffix('.safetensors')}{suffix} {more}"
        done = subprocess.run(
            ["bash", "-c", written], cwd=place, env=environment(place), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
