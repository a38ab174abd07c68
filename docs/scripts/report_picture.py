"""Take the demo's report to docs/assets, pictures of it at four widths, and note of which numbers they are.

Run ``make demo`` first, then ``python docs/scripts/report_picture.py``. It needs Chromium.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from PIL import Image

from fedprune_app.cli.demo import DEMO_SYSTEMS, demo_settings
from fedprune_app.results.reader import load_run
from fedprune_app.results.report import packed_plotly

ROOT = Path(__file__).parents[2]
DEMO, ASSETS = ROOT / "runs" / "demo", ROOT / "docs" / "assets"
SIZES = {420: 3400, 800: 2200, 1280: 920, 1920: 1400}
"""The heights of the pictures in pixels, by width: of a phone, a tablet, a laptop and a desk."""
README_WIDTH = 1280
FRAME = """<!doctype html><body style="margin: 0">
<iframe src="{address}" style="border: 0; width: {width}px; height: {height}px"></iframe>
"""


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("error: Chromium is not installed")
    address = (DEMO / "report.html").as_uri()
    for width, height in SIZES.items():
        # a browser's window cannot be made as narrow as a phone, so a frame is
        frame = DEMO / "frame.html"
        frame.write_text(FRAME.format(address=address, width=width, height=height))
        picture = ASSETS / ("report.png" if width == README_WIDTH else f"report-{width}.png")
        look = [f"--window-size={max(width, 800)},{height}", "--hide-scrollbars", "--virtual-time-budget=8000"]
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", *look, f"--screenshot={picture}"]
        subprocess.run([*command, frame.as_uri()], check=True)
        frame.unlink()
        with Image.open(picture) as image:
            image.crop((0, 0, width, height)).convert("P", palette=Image.Palette.ADAPTIVE).save(picture, optimize=True)
    report = (DEMO / "report.html").read_text()
    (ASSETS / "demo.html").write_text(report.replace(packed_plotly(), ""))  # `make site` puts it in again
    shown = {
        system: {
            "settings": demo_settings(system),
            "accuracy": load_run(DEMO / system).last("accuracy_personal_mean"),
        }
        for system in DEMO_SYSTEMS
    }
    (ASSETS / "report.json").write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
