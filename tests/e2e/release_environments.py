"""Make an environment for each of some releases of Flower: ``release_environments.py FOLDER RELEASE...``.

An environment shares all packages with the one whose Python runs this, but for Flower and what Flower pins. So PyTorch
is the same in all of them, and an environment is made in a minute. A release that the package index does not have is
left out. Where pip finds no set of packages for a release, Flower and cryptography alone are installed, and a line says
why.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make(folder: Path, release: str) -> str:
    """Make the environment of one release; what became of it, on one line."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    places = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(places, capture_output=True, text=True, check=True).stdout.strip())
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    ours = ["--editable", str(ROOT)]
    done = subprocess.run([*pip, f"flwr[simulation]=={release}.*", *ours], capture_output=True, text=True)
    if done.returncode == 0:
        return f"Flower {release}: installed"
    reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR: ")), "pip failed")[:160]
    alone = [f"flwr=={release}.*", "cryptography>=50,<51"]
    if subprocess.run([*pip, "--no-deps", *alone, *ours], capture_output=True).returncode == 0:
        return f"Flower {release}: installed without all that it asks for ({reason})"
    python.unlink()
    return f"Flower {release}: left out ({reason})"


def main(folder: str, *releases: str) -> None:
    for release in releases:
        print(make(Path(folder).resolve() / release, release), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
