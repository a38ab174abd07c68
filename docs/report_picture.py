"""Take docs/assets/report.png, the picture of the demo's report, and note of which numbers it is.

Run ``make demo`` first, then ``python docs/report_picture.py``. It needs Chromium.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from fedprune_app.results.reader import load_run
from fedprune_app.running.demo import DEMO_SYSTEMS, demo_settings

ROOT = Path(__file__).parents[1]
DEMO, OUT = ROOT / "runs" / "demo", ROOT / "docs" / "assets" / "report.png"
WIDTH, HEIGHT = 1280, 920


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("error: Chromium is not installed")
    address = (DEMO / "report.html").as_uri()
    look = [f"--window-size={WIDTH},{HEIGHT}", "--hide-scrollbars", "--virtual-time-budget=8000", f"--screenshot={OUT}"]
    subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", *look, address], check=True)
    shown = {
        system: {
            "settings": demo_settings(system),
            "accuracy": load_run(DEMO / system).last("accuracy_personal_mean"),
        }
        for system in DEMO_SYSTEMS
    }
    OUT.with_suffix(".json").write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
