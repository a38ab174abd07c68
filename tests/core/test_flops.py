import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fedprune_app.core.flops import forward_flops, sparse_flops, training_flops


def lenet5():
    # Named as the models of this project are; core knows none of them.
    layers = {
        "conv1": nn.Conv2d(3, 6, 5),
        "bn1": nn.BatchNorm2d(6),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5),
        "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(400, 120),
        "fc2": nn.Linear(120, 84),
        "fc3": nn.Linear(84, 10),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


BY_HAND = {  # 2 x output positions x output channels x inputs of each output
    "conv1": 2 * 28 * 28 * 6 * (3 * 25),
    "conv2": 2 * 10 * 10 * 16 * (6 * 25),
    "fc1": 2 * 400 * 120,
    "fc2": 2 * 120 * 84,
    "fc3": 2 * 84 * 10,
}


def test_the_flops_of_lenet5_are_those_computed_by_hand():
    assert forward_flops(lenet5(), (3, 32, 32)) == BY_HAND


def test_counting_leaves_the_model_as_it_is():
    model = lenet5().train()
    model.bn1.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forward_flops(model, (3, 32, 32))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert not model.bn1.training


class Gram(nn.Module):
    """A product of its own beside that of its layer, as attention has."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 8)

    def forward(self, rows):  # (batch, 5, 4)
        projected = self.project(rows)
        return projected @ projected.transpose(1, 2)


def test_products_outside_any_layer_are_counted_for_the_module_that_makes_them():
    assert forward_flops(nn.Sequential(Gram()), (5, 4)) == {"0": 2 * 5 * 8 * 5, "0.project": 2 * 5 * 4 * 8}


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, rows):  # (batch, 5, 8)
        return self.attention(rows, rows, rows)[0].mean(1) @ torch.ones(8, 3)


@pytest.mark.parametrize(
    ("model", "shape"),
    [(lenet5(), (3, 32, 32)), (Gram(), (5, 4)), (Attending(), (5, 8))],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_there_are_as_many_flops_as_torchs_own_counter_finds(model, shape, mode):
    with mode():
        counts = forward_flops(model, shape)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:  # without gradients torch fuses attention, and counts nothing of it
        model.eval()(torch.zeros(1, *shape))
    assert sum(counts.values()) == counter.get_total_flops() > 0


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells = kind(8, 32, batch_first=True)

    def forward(self, rows):  # (batch, 5, 8)
        return self.cells(rows)[0]


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_a_recurrent_layer_has_the_products_of_its_gates_in_every_step(kind, gates):
    assert forward_flops(Recurrent(kind), (5, 8)) == {"cells": 5 * 2 * gates * 32 * (8 + 32)}


def test_an_encoder_layer_has_the_products_of_its_attention_and_of_both_linear_layers():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1)
    was_fast = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    attention = 5 * 2 * 8 * (3 * 8 + 8) + 2 * 2 * 5 * 5 * 8  # four projections, the weights and the weighted mean
    assert sum(forward_flops(encoder, (5, 8)).values()) == attention + 2 * 5 * 2 * 8 * 16
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled) == was_fast


@pytest.mark.full
def test_counting_imports_no_compiler():
    program = (
        "import sys\nfrom torch import nn\nfrom fedprune_app.core.flops import forward_flops\n"
        "forward_flops(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3)), (1, 8, 8))\n"
        "print(*sorted({'torch._dynamo', 'torch._inductor', 'sympy'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_a_model_in_train_mode_is_counted_on_one_example_all_the_same():
    normed = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # refuses one example in train mode
    assert forward_flops(normed.train(), (3,)) == {"0": 24}


def test_a_single_layer_counts_as_the_root():
    assert forward_flops(nn.Linear(3, 4), (3,)) == {"": 24}


def test_layers_of_one_weight_count_by_its_mask():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert forward_flops(model, (4,)) == {"0": 64}
    assert sparse_flops({"0": 64}, {"0.weight": torch.zeros(4, 4, dtype=torch.bool)}) == 0


def test_sparse_flops_weigh_each_layer_by_the_kept_share_of_its_own_weight():
    mask = torch.zeros(84, 120, dtype=torch.bool)
    mask[:21] = True  # a quarter
    masks = {"fc2.weight": mask, "fc1.bias": torch.zeros(120, dtype=torch.bool)}
    expected = sum(BY_HAND.values()) - 0.75 * BY_HAND["fc2"]
    assert sparse_flops(BY_HAND, masks) == pytest.approx(expected)
    assert sparse_flops(BY_HAND, {}) == sum(BY_HAND.values())


def test_training_costs_three_forward_passes_per_example_and_nothing_where_all_is_pruned():
    forward = sum(BY_HAND.values())
    assert training_flops(BY_HAND, 50) == 3 * forward * 50
    nothing = {f"{name}.weight": torch.zeros(1, dtype=torch.bool) for name in BY_HAND}
    assert training_flops(BY_HAND, 50, nothing) == 0
