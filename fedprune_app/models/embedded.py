"""The embedded language model: a byte-level LLaMA of a million parameters, trained here within minutes, then cached.

It needs no download. Plain transformers can load its folder, tokenizer included.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch.nn import functional as F

from fedprune_app.core.named import TensorDict
from fedprune_app.files import replace_file
from fedprune_app.models.cached import cache_folder, cached_model
from fedprune_app.models.transformers import import_transformers

NAME = "byte-llama"
_STEPS_TO_A_CHECKPOINT = 100
# A callback with (step, steps, loss) after every step.
OnStep = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Recipe:
    """The architecture and training of the embedded model; recipe and text determine the cached folder."""

    width: int = 128
    inner_width: int = 352
    num_layers: int = 5
    num_heads: int = 4
    length: int = 128  # pruning on longer sequences than in training shows little
    batch_size: int = 8
    steps: int = 1600
    learning_rate: float = 4e-3
    embedding_deviation: float = 0.05
    seed: int = 0


DEFAULT = Recipe()


def embedded_folder(texts: Sequence[str], recipe: Recipe = DEFAULT) -> Path:
    """Return the folder, existing or not, of the model trained by this recipe on these texts."""
    return cache_folder() / f"{NAME}-{_digest(tuple(texts), recipe)[:12]}"


@lru_cache(maxsize=1)
def _digest(texts: tuple[str, ...], recipe: Recipe) -> str:
    total = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    for text in texts:
        total.update(hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).digest())
    return total.hexdigest()


def train_embedded(texts: Sequence[str], recipe: Recipe = DEFAULT, on_step: OnStep | None = None) -> Path:
    """Return the model's folder, after training the model unless this or another process already did."""
    folder = embedded_folder(texts, recipe)
    checkpoint = folder.with_name(f".{folder.name}.safetensors")

    def make(place: Path) -> None:
        _save(_train_model(texts, recipe, on_step, checkpoint), place)

    made = cached_model(folder, "trains the embedded language model", make)
    checkpoint.unlink(missing_ok=True)
    return made


def write_untrained(folder: Path) -> None:
    """Write a model with the shapes and the tokenizer of the embedded one, and random weights."""
    _save(_untrained_model(DEFAULT, torch.Generator().manual_seed(DEFAULT.seed)), folder)


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer() -> Any:
    """Return a transformers tokenizer of bytes, whose ids are the bytes."""
    transformers = import_transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters = bytes_to_unicode()  # type: ignore[no-untyped-call]
    byte_of = {characters[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=byte_of, merges=[]))
    # short pieces, because the tokenizer handles each piece as one word
    pieces = pre_tokenizers.Split("\n", behavior="merged_with_previous")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def _untrained_model(recipe: Recipe, draw: torch.Generator) -> Any:
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=recipe.width,
        intermediate_size=recipe.inner_width,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=recipe.length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    _initialise(model, recipe, draw)
    return model


def _train_model(texts: Sequence[str], recipe: Recipe, on_step: OnStep | None, checkpoint: Path) -> Any:
    """Train the model; a training that was killed goes on from its ``checkpoint``, and ends with the same bits."""
    draw = torch.Generator().manual_seed(recipe.seed)
    model = _untrained_model(recipe, draw)
    data = torch.frombuffer(bytearray("\n".join(texts).encode("utf-8", errors="replace")), dtype=torch.uint8)
    if len(data) <= recipe.length:
        raise ValueError(f"{len(data)} bytes of text to train on, allowed: more than {recipe.length}")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    model.train()
    first_step = 0
    if checkpoint.exists():
        saved = load(checkpoint.read_bytes())
        draw.set_state(saved.pop("draw"))
        first_step = int(saved.pop("steps"))
        model.load_state_dict({name: saved.pop(name) for name, _ in model.named_parameters()}, strict=False)
        moments: dict[int, TensorDict] = {}
        for name, tensor in saved.items():
            number, _, key = name.partition(" ")
            moments.setdefault(int(number), {})[key] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    for step in range(first_step, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _warm_cosine(step, recipe.steps)
        starts = torch.randint(len(data) - recipe.length, (recipe.batch_size,), generator=draw).tolist()
        batch = torch.stack([data[s : s + recipe.length + 1] for s in starts]).long()
        logits = model(batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if on_step is not None:
            on_step(step + 1, recipe.steps, float(loss.detach()))
        if (step + 1) % _STEPS_TO_A_CHECKPOINT == 0:
            moments = optimizer.state_dict()["state"]
            state = {f"{number} {key}": t for number, tensors in moments.items() for key, t in tensors.items()}
            state |= {"draw": draw.get_state(), "steps": torch.tensor(step + 1)}
            replace_file(checkpoint, save({**state, **dict(model.named_parameters())}))
    return model.eval()


def _initialise(model: torch.nn.Module, recipe: Recipe, draw: torch.Generator) -> None:
    """Draw normal weights: a matrix has variance 1 / inputs, and less at the end of a residual branch; norms are 1.

    transformers' own deviation of 0.02 is meant for widths in the thousands. At a width of 128 its layers start near 0,
    and after this recipe the model would have learned only the statistics of byte pairs.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            deviation = recipe.embedding_deviation if "embed" in name else parameter.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                deviation /= (2 * recipe.num_layers) ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * deviation)


def _warm_cosine(step: int, steps: int) -> float:
    """Return a factor that rises linearly over the first twentieth, then falls by half a cosine to a twentieth."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
