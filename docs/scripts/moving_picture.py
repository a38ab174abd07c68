"""Draw docs/assets/masks.webp: how the masks of twenty clients grow apart, round by round, in a real run.

Run ``python docs/scripts/moving_picture.py`` from the root of the repository. It takes about a minute. The run is that
of ``configs/quickstart.toml``, stopped after each round to look at the clients' models, and resumed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont

import fedprune
from fedprune_app.core.masks import mask_distance

ROUNDS, CLIENTS = 20, 20
OUT = Path(__file__).parents[1] / "assets" / "masks.webp"
LAYER = "conv2.weight"  # (32, 16, 3, 3): a square stands for a kernel
SQUARE, COLUMNS, GAP = 4, 5, 14
LABELS = [tuple(round(255 * part) for part in colour[:3]) for colour in matplotlib.colormaps["tab10"].colors]
INK, MUTED, PAGE, PRUNED = (22, 32, 43), (91, 104, 117), (255, 255, 255), np.array([226, 231, 237])
MILLISECONDS, LAST_MILLISECONDS = 250, 1250


def font(size: int, weight: str = "normal") -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(findfont(f"DejaVu Sans:{weight}"), size)


def rounds(folder: Path) -> list[dict]:
    """Return for each round the masks of the clients' own models, and the last row of the run's record."""
    seen = []
    for number in range(1, ROUNDS + 1):
        run = fedprune.run(
            "quickstart",
            out=folder,
            clients=CLIENTS,
            engine="inprocess",
            num_server_rounds=number,
            evaluate_every=1,
            resume=number > 1,
            progress=False,
        )
        trained = {client: fedprune.masks(run, client) for client in map(int, run.info["state_rounds"])}
        full = {name: mask | True for name, mask in next(iter(trained.values())).items()}
        masks = [trained.get(client, full) for client in range(CLIENTS)]
        down, up = (sum(row[f"bytes_{way}"] for row in run.rounds) / 1e6 for way in ("down", "up"))
        sent, dense = down + up, 2 * down  # the download of Sub-FedAvg is dense
        seen.append({"masks": masks, "row": run.rounds[-1], "sent": sent, "dense": dense, "info": run.info})
    return seen


def tile(mask: np.ndarray, colour: tuple[int, int, int]) -> Image.Image:
    """Return a client's mask: a square for each kernel, the paler the fewer of its weights are kept."""
    kept = mask.mean((2, 3))[..., None]  # (32, 16, 1)
    pixels = (PRUNED + (np.array(colour) - PRUNED) * kept).astype(np.uint8)
    return Image.fromarray(pixels).resize((16 * SQUARE, 32 * SQUARE), Image.Resampling.NEAREST)


def frame(seen: dict, number: int) -> Image.Image:
    image = Image.new("RGB", (860, 716), PAGE)
    draw = ImageDraw.Draw(image)
    masks = seen["masks"]
    held = [np.flatnonzero(part["train"]).tolist() for part in seen["info"]["partition"]]
    order = sorted(range(CLIENTS), key=lambda client: held[client])
    width, height = 16 * SQUARE, 32 * SQUARE
    for place, client in enumerate(order):
        x, y = 20 + place % COLUMNS * (width + GAP), 20 + place // COLUMNS * (height + 38)
        labels = held[client]
        image.paste(tile(masks[client][LAYER].numpy(), LABELS[labels[0]]), (x, y))
        for index, label in enumerate(labels):
            draw.text((x + index * 18, y + height + 3), str(label), LABELS[label], font(15, "bold"))
    left = 20 + COLUMNS * (width + GAP) + 30
    row = seen["row"]
    draw.text((left, 14), f"Round {number}", INK, font(34, "bold"))
    lines = (
        (f"{100 * row['accuracy_personal_mean']:.1f} %", "accuracy of the clients' own models"),
        (f"{row['density_mean']:.2f}", "of the weights are kept"),
        (f"{seen['sent']:.1f} MB", f"sent so far; dense both ways: {seen['dense']:.1f} MB"),
    )
    for index, (number_text, words) in enumerate(lines):
        draw.text((left, 70 + index * 72), number_text, INK, font(28, "bold"))
        draw.text((left, 106 + index * 72), words, MUTED, font(15))
    draw.text((left, 300), "How far two clients' masks are apart (0 to 0.25)", MUTED, font(15))
    apart = np.array([[mask_distance(masks[a], masks[b]) for b in order] for a in order])
    colours = (255 * matplotlib.colormaps["viridis"](apart / 0.25)[..., :3]).astype(np.uint8)
    side = 17 * CLIENTS
    image.paste(Image.fromarray(colours).resize((side, side), Image.Resampling.NEAREST), (left, 326))
    draw.text((20, 20 + 4 * (height + 38) + 2), "One tile is one client; its digits are its labels.", MUTED, font(14))
    return image


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        seen = rounds(Path(folder) / "run")
    frames = [frame(each, number) for number, each in enumerate(seen, 1)]
    durations = [MILLISECONDS] * (len(frames) - 1) + [LAST_MILLISECONDS]
    frames[0].save(OUT, save_all=True, append_images=frames[1:], duration=durations, loop=0, lossless=True, method=6)
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
