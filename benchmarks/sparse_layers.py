"""What zeros save: linear layers and a language model from kept weights alone, against dense ones and torch's CSR.

    python benchmarks/sparse_layers.py [--densities 0.5 0.3 0.2] [--threads 1] [--dtypes float32 bfloat16] [--repeats 7]
    python benchmarks/sparse_layers.py --width 2048 --inner 5632 --layers 6     # another LLaMA shape

First 24 matrices of 2048 x 2048 are multiplied with some inputs, one matrix after the other, so that weights come from
memory. Then a random LLaMA computes the logits of one token, and of a prompt. Its decoder has 308 million parameters by
default, and its matrices are pruned at random. Both ways take turns; a ratio is the median of the turns' ratios, dense
over sparse: above 1 the zeros save time. Memory is that of the decoder, without embeddings and head.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from _turns import in_turns, ratio
from torch import Tensor, nn
from torch.nn import functional as F

from fedprune_app.core.sparse_linear import instructions, linear, pack
from fedprune_app.models.sparse import sparsify
from fedprune_app.models.transformers import import_transformers

SIDE, COUNT = 2048, 24
INPUTS = (1, 2, 4, 8, 16, 32, 128)
PROMPT = 128


def random_matrices(density: float, dtype: torch.dtype) -> list[Tensor]:
    return [(torch.randn(SIDE, SIDE) * (torch.rand(SIDE, SIDE) < density)).to(dtype) for _ in range(COUNT)]


def layers(density: float, dtype: torch.dtype, repeats: int) -> None:
    dense = random_matrices(density, dtype)
    packed = [pack(matrix) for matrix in dense]
    for count in INPUTS:
        inputs = torch.randn(count, SIDE, dtype=dtype)
        ways: dict[str, Callable[[], object]] = {
            "dense": lambda inputs=inputs: [F.linear(inputs, matrix) for matrix in dense],
            "sparse": lambda inputs=inputs: [linear(inputs, matrix) for matrix in packed],
        }
        if count == 1 and dtype == torch.float32:
            csr = [matrix.to_sparse_csr() for matrix in dense]
            column = inputs.t().contiguous()
            ways["csr"] = lambda csr=csr, column=column: [matrix @ column for matrix in csr]
        seconds = in_turns({name: lambda way=way: way for name, way in ways.items()}, repeats)
        found = [f"{name} {ratio(seconds['dense'], seconds[name]):5.2f}" for name in ways if name != "dense"]
        milliseconds = 1000 * min(seconds["dense"]) / COUNT
        print(
            f"  {dtype!s:15} density {density:.2f}  {count:4} inputs  dense {milliseconds:6.2f} ms  ",
            "  ".join(found),
        )


def decoder_bytes(model: nn.Module) -> int:
    decoder = model.model.layers
    return sum(each.numel() * each.element_size() for each in [*decoder.parameters(), *decoder.buffers()])


def language_model(density: float, dtype: torch.dtype, width: int, inner: int, layers: int, repeats: int) -> None:
    transformers = import_transformers()
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
    )
    dense = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False).to(dtype)
    parameters = 0
    for module in dense.model.layers.modules():
        if isinstance(module, nn.Linear):
            parameters += module.weight.numel()
            module.weight.mul_(torch.rand_like(module.weight) < density)
    sparse = copy.deepcopy(dense)
    replaced = len(sparsify(sparse))
    print(f"  {dtype}, density {density:.2f}: {parameters / 1e6:.0f} M parameters, {replaced} layers sparse")
    with torch.inference_mode():
        for count in (1, PROMPT):
            tokens = torch.randint(32000, (1, count))
            expected, found = dense(tokens).logits.float(), sparse(tokens).logits.float()
            error = float((found - expected).abs().max() / expected.abs().max())
            ways = {"dense": dense, "sparse": sparse}
            seconds = in_turns(
                {
                    name: lambda model=model, tokens=tokens: lambda: model(tokens, use_cache=False)
                    for name, model in ways.items()
                },
                repeats,
            )
            print(
                f"    {count:4} tokens: dense {1000 * min(seconds['dense']):7.1f} ms, "
                f"ratio {ratio(seconds['dense'], seconds['sparse']):.2f}, logits off by {error:.1e} of the largest"
            )
    print(f"    memory of the decoder: {decoder_bytes(sparse) / decoder_bytes(dense):.3f} of dense")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.5, 0.3, 0.2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=24)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    print(f"{given.threads} thread(s), {instructions() or 'no library in C'}; {COUNT} matrices of {SIDE} x {SIDE}")
    dtypes = [getattr(torch, name) for name in given.dtypes]
    for dtype in dtypes:
        for density in given.densities:
            layers(density, dtype, given.repeats)
    print(f"a random LLaMA, {given.layers} layers of {given.width} and {given.inner}")
    for dtype in dtypes:
        for density in given.densities:
            language_model(density, dtype, given.width, given.inner, given.layers, given.repeats)


if __name__ == "__main__":
    main()
