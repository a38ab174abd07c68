"""Pin all packages of the image, by version and hash, for the next build: `make lock` calls this.

``requirements.lock`` holds all but PyTorch, and ``requirements.cuda.lock`` PyTorch and the CUDA libraries it needs: a
build for CPUs takes PyTorch from an index of the builder's choice. Flower is the release that is the default in the
Makefile; a build with another one takes that from the builder's index, without a hash.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
FLOWER = "1.39.*"  # as in the Makefile
TORCH = "2.13.*"
CERTIFI = "2026.10.19"  # without an authority whose keys were stolen; Flower 1.42 asks for it, too
HEADER = "# All packages of the image{}. Made by `make lock`, from pyproject.toml: do not edit.\n"


def main() -> None:
    command = ["uv", "pip", "compile", str(FOLDER.parent / "pyproject.toml"), "-", "--extra", "llm", "--quiet"]
    command += ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
    wanted = f"hatchling\nflwr=={FLOWER}\ntorch=={TORCH}\ncertifi>={CERTIFI}\n"
    done = subprocess.run(command, input=wanted, stdout=subprocess.PIPE, text=True, check=True)
    packages = re.split(r"^(?=[a-z0-9])", done.stdout, flags=re.MULTILINE)
    is_of_torch = re.compile(r"(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==")
    with_torch = [package for package in packages if is_of_torch.match(package)]
    others = [package for package in packages if not is_of_torch.match(package)]
    (FOLDER / "requirements.lock").write_text(HEADER.format(" but PyTorch") + "".join(others))
    (FOLDER / "requirements.cuda.lock").write_text(HEADER.format(": PyTorch and CUDA's") + "".join(with_torch))


if __name__ == "__main__":
    main()
