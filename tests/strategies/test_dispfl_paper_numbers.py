"""The costs that Dis-PFL's tables print, from the shapes of its networks and the product's own accounting."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedprune_app.config import parse_config
from fedprune_app.core import rng
from fedprune_app.core.flops import forward_flops, training_flops
from fedprune_app.core.masks import erk_densities, keep_count, uniform_densities
from fedprune_app.data import splits
from fedprune_app.data.dataset import Dataset
from fedprune_app.data.splits import data_config
from fedprune_app.federation.round import Round, RunContext
from fedprune_app.models.vision import build_model, prunable_names
from fedprune_app.preflight.inputs import RunInputs
from fedprune_app.sweeps.matrix import read_matrix
from strategies.dispfl import DisPFL
from strategies.dpsgd import DPSGD
from strategies.fedavg import FedAvg
from tests.examples import full, in_test

CIFAR10, CIFAR100 = ("resnet18-gn", (3, 32, 32), 10), ("resnet18-gn", (3, 32, 32), 100)
TINY_IMAGENET, VGG11 = ("resnet18-gn", (3, 64, 64), 200), ("vgg11-gn", (3, 32, 32), 10)
NUM_CLIENTS = 100
MATRICES = Path(__file__).parents[2] / "configs" / "matrices"
PATHS = sorted(MATRICES.rglob("dispfl_*.yaml"))
SHIPPED = {
    CIFAR10: "table1_cifar10",
    CIFAR100: "table1_cifar100",
    TINY_IMAGENET: "table1_tiny-imagenet",
    VGG11: "table3",
}
TRAINING_IMAGES = {CIFAR10: 50_000, CIFAR100: 50_000, TINY_IMAGENET: 100_000, VGG11: 50_000}
IN_TURN = "0.2 0.4 0.6 0.8 1.0"  # setting (ii): a fifth of the clients each


@cache
def network(setting):
    return build_model(*setting, rng=rng.generator(0, "model"))


def tensors_of(setting):
    return {name: parameter.detach() for name, parameter in network(setting).named_parameters()}


@cache
def kept_counts(setting, density, allocation=erk_densities):
    shapes = {name: tensor.shape for name, tensor in tensors_of(setting).items()}
    densities = allocation(shapes, density)
    return {name: keep_count(shape.numel(), densities[name]) for name, shape in shapes.items()}


# --- communication ------------------------------------------------------------------------------------------------


def gossip_megabytes(kind, setting, **options):
    """(busiest node, mean over nodes) of the paper's formula in a round of 100 clients, as the product reports it."""
    system = {DisPFL: "dispfl", DPSGD: "dpsgd"}[kind]
    table = {f"{system}.{key}": value for key, value in options.items() if key != "density"}
    config = parse_config({"system": system, "fraction-train": 1.0, "density": options.get("density", 1.0), **table})
    tensors, clients = tensors_of(setting), dict.fromkeys(range(NUM_CLIENTS))
    recorder = SimpleNamespace(folder=Path("/nonexistent"))
    strategy = kind(RunContext(config, clients, recorder, None, ""), tensors, frozenset())
    total = sum(tensor.numel() for tensor in tensors.values())
    for k in range(NUM_CLIENTS):
        density = config.dispfl.density_of(k, config.density)
        strategy.densities[k] = sum(kept_counts(setting, density).values()) / total
    strategy.begin(round := strategy.participation.round(1))
    traffic = strategy.traffic(round)
    assert traffic["paper_bytes_down"] == pytest.approx(traffic["paper_bytes_up"])
    return traffic["paper_busiest_bytes"] / 1e6, traffic["paper_bytes_down"] / NUM_CLIENTS / 1e6


def as_the_paper_counts(megabytes, setting, links):
    """The authors count non-zero weights, once before and once after training, and take the mean: norm shifts, which
    begin at zero, count half. The product counts what is kept, zero or not, and so is above by this much (0.02 %)."""
    zeros = sum(tensor.numel() for tensor in tensors_of(setting).values() if not tensor.any())
    assert zeros == {"resnet18-gn": 4800, "vgg11-gn": 2752}[setting[0]]
    return megabytes - 4 * links * zeros / 2 / 1e6


LINKS = {"random": 10, "ring": 2, "full": 99}  # links of a node
COMMUNICATION = [  # Tables 1, 2, 4, 8 and 9: megabytes in one direction at the busiest node
    (DPSGD, CIFAR10, 1.0, "random", 446.9),
    (DPSGD, CIFAR10, 1.0, "ring", 89.4),
    (DPSGD, CIFAR10, 1.0, "full", 4423.9),
    (DisPFL, CIFAR10, 0.2, "random", 89.30),
    (DisPFL, CIFAR10, 0.4, "random", 178.69),
    (DisPFL, CIFAR10, 0.5, "random", 223.4),
    (DisPFL, CIFAR10, 0.6, "random", 268.1),
    (DisPFL, CIFAR10, 0.8, "random", 357.5),
    (DisPFL, CIFAR10, 0.5, "ring", 44.6),
    (DisPFL, CIFAR10, 0.5, "full", 2211.4),
    full(DPSGD, CIFAR100, 1.0, "random", 448.7),
    full(DPSGD, CIFAR100, 1.0, "ring", 89.7),
    full(DPSGD, CIFAR100, 1.0, "full", 4442.2),
    full(DisPFL, CIFAR100, 0.5, "random", 224.3),
    full(DisPFL, CIFAR100, 0.5, "ring", 44.8),
    full(DisPFL, CIFAR100, 0.5, "full", 2222.0),
    full(DPSGD, TINY_IMAGENET, 1.0, "random", 450.7),
    full(DPSGD, TINY_IMAGENET, 1.0, "ring", 90.1),
    full(DPSGD, TINY_IMAGENET, 1.0, "full", 4462.5),
    full(DisPFL, TINY_IMAGENET, 0.5, "random", 225.3),
    full(DisPFL, TINY_IMAGENET, 0.5, "ring", 45.0),
    full(DisPFL, TINY_IMAGENET, 0.5, "full", 2229.8),
]
OFF_ITS_OWN_RULE = {2222.0: -1.4, 2229.8: 1.0}  # it should be 99/10 of the 224.3 and 225.3 in the lines above


@pytest.mark.parametrize(("kind", "setting", "density", "topology", "paper"), COMMUNICATION)
def test_the_busiest_node_moves_the_papers_megabytes(kind, setting, density, topology, paper):
    busiest, mean = gossip_megabytes(kind, setting, density=density, topology=topology)
    assert busiest == pytest.approx(mean)  # in these topologies and at one density all nodes are as busy
    above = as_the_paper_counts(busiest, setting, LINKS[topology]) - paper - OFF_ITS_OWN_RULE.get(paper, 0)
    assert -0.05 <= above < 0.1  # some of the numbers are rounded to the digit, others cut off
    assert busiest == pytest.approx(paper, rel=2.2e-3)  # without that correction


@pytest.mark.parametrize(
    ("kind", "setting", "options", "paper"),
    [
        (DisPFL, CIFAR10, {"density": 0.5}, 223.4),
        (DisPFL, CIFAR10, {"densities": IN_TURN}, 268.0),
        (DPSGD, CIFAR10, {"density": 0.2}, 89.4),
        (DPSGD, CIFAR10, {"density": 0.5}, 223.4),
        (DisPFL, VGG11, {"density": 0.5}, 184.6),
        (DisPFL, VGG11, {"densities": IN_TURN}, 221.4),
        (DPSGD, VGG11, {"density": 0.2}, 73.8),
        (DPSGD, VGG11, {"density": 0.5}, 184.6),
    ],
)
def test_the_average_node_moves_the_megabytes_of_table_3(kind, setting, options, paper):
    """To 0.1 %: the table charges D-PSGD's 20 % without the zeros and Dis-PFL's half with them."""
    _, mean = gossip_megabytes(kind, setting, **options)
    assert mean == pytest.approx(paper, rel=1.1e-3)


@pytest.mark.parametrize(("setting", "paper"), [(CIFAR10, 446.9), (CIFAR100, 448.7), (TINY_IMAGENET, 450.7)])
def test_a_server_with_ten_clients_a_round_moves_as_much_as_the_busiest_of_ten_links(setting, paper):
    context = RunContext(parse_config({"system": "fedavg"}), {}, None, None, "")
    strategy = FedAvg(context, tensors_of(setting))
    down, up = strategy.paper_bytes(Round(1, tuple(range(10)), participants=tuple(range(10))))
    assert down == up == pytest.approx(1e6 * gossip_megabytes(DPSGD, setting)[0])
    assert as_the_paper_counts(down / 1e6, setting, 10) == pytest.approx(paper, abs=0.07)


# --- FLOPs --------------------------------------------------------------------------------------------------------


@cache
def layers_of(setting):
    return forward_flops(network(setting), setting[1])


@cache
def shipped(setting):
    """Dis-PFL's first row in the configuration that the product ships, and what each of its clients trains on."""
    cells = read_matrix(MATRICES / "papers" / f"dispfl_{SHIPPED[setting]}.yaml").cells(RunInputs(out=Path("/nowhere")))
    config = next(cell.config for cell in cells if cell.config.system == "dispfl")
    num_images, num_classes = TRAINING_IMAGES[setting], setting[2]
    labels = np.arange(num_images) % num_classes
    pixels, few = np.zeros((num_images, 1, 1, 1), dtype=np.uint8), slice(10 * num_classes)
    classes = tuple(map(str, range(num_classes)))
    stand_in = Dataset(config.dataset, pixels, labels, pixels[few], labels[few], classes, (0.0,), (1.0,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "load_dataset", lambda *_, **__: stand_in)
        splits._pool.cache_clear()
        counts = [splits.label_counts(data_config(config), k, NUM_CLIENTS)["train"] for k in range(NUM_CLIENTS)]
        splits._pool.cache_clear()
    return config, [sum(of_label) for of_label in counts]


@pytest.mark.parametrize(
    ("setting", "paper"), [(CIFAR10, 500), full(CIFAR100, 500), full(TINY_IMAGENET, 1000), full(VGG11, 500)]
)
def test_in_the_shipped_configurations_clients_train_on_all_images_that_the_paper_gives_them(setting, paper):
    config, num_examples = shipped(setting)
    assert config.validation_fraction == 0
    assert set(num_examples) == {paper}


@pytest.mark.parametrize(
    "path", in_test(PATHS, MATRICES / "dispfl_beside.yaml", MATRICES / "dispfl_scarce.yaml"), ids=lambda path: path.stem
)
def test_only_systems_that_decide_by_validation_data_hold_some_out(path):
    for cell in read_matrix(path).cells(RunInputs(out=Path("/nowhere"))):
        decides = cell.config.system in ("fedfomo", "subfedavg")
        assert cell.config.validation_fraction == (0.1 if decides else 0)


@pytest.mark.parametrize(
    "path", in_test(PATHS, MATRICES / "dispfl_beside.yaml", MATRICES / "dispfl_scarce.yaml"), ids=lambda path: path.stem
)
def test_every_matrix_of_dispfl_has_rows_that_grow_at_random_as_the_papers(path):
    configs = [cell.config for cell in read_matrix(path).cells(RunInputs(out=Path("/nowhere")))]
    beside_others = {f"dispfl_{name}": {"random"} for name in ("500", "classes", "densities", "dropping")}
    beside_others["dispfl_beside"] = set()  # its rows of Dis-PFL are those of dispfl_scarce.yaml
    expected = beside_others.get(path.stem, {"gradient", "random"})
    assert {config.dispfl.growth for config in configs if config.system == "dispfl"} == expected


@pytest.mark.parametrize("name", ["papers/dispfl_figure6", "dispfl_small_robustness"])
def test_clients_that_drop_out_of_figure_6_train_alone(name):
    cells = read_matrix(MATRICES / f"{name}.yaml").cells(RunInputs(out=Path("/nowhere")))
    assert {c.config.dispfl.dropped for c in cells if c.config.drop_probability} == {"trains-alone"}


def tera_flops(setting, density=1.0, allocation=erk_densities, search=True):
    """What a client counts in a round: training under its masks, and one dense gradient for the mask search."""
    layers = layers_of(setting)
    kept = kept_counts(setting, density, allocation)
    masks = {}
    for weight in prunable_names(network(setting)):
        size = tensors_of(setting)[weight].numel()
        masks[weight] = torch.arange(size) < kept[weight]  # how many are kept is what counts
    config, num_examples = shipped(setting)
    flops = training_flops(layers, config.local_epochs * num_examples[0], masks)
    return (flops + training_flops(layers, config.batch_size) * search) / 1e12


FLOPS = [  # Tables 1, 3 and 4, in 1e12, as printed
    (CIFAR10, {"search": False}, "8.3"),
    full(CIFAR100, {"search": False}, "8.3"),
    full(TINY_IMAGENET, {"search": False}, "66.6"),
    full(CIFAR10, {"density": 0.2}, "4.6"),
    full(CIFAR10, {"density": 0.4}, "6.5"),
    full(CIFAR10, {"density": 0.5}, "7.0"),
    full(CIFAR10, {"density": 0.5}, "7.04"),
    full(CIFAR10, {"density": 0.6}, "7.5"),
    full(CIFAR10, {"density": 0.8}, "8.2"),
    full(CIFAR100, {"density": 0.5}, "7.0"),
    full(TINY_IMAGENET, {"density": 0.5}, "54.5"),
    full(VGG11, {"density": 0.5}, "1.73"),
    full(CIFAR10, {"density": 0.2, "allocation": uniform_densities}, "2.09"),  # of D-PSGD under a fixed mask
    full(CIFAR10, {"density": 0.5, "allocation": uniform_densities}, "4.58"),
    full(VGG11, {"density": 0.2, "allocation": uniform_densities}, "0.57"),
    full(VGG11, {"density": 0.5, "allocation": uniform_densities}, "1.26"),
]


@pytest.mark.parametrize(("setting", "how", "paper"), FLOPS)
def test_a_client_spends_the_papers_flops(setting, how, paper):
    """To 0.3 %, or where that is less to the last digit, which the paper cuts off: ours are nearly always above.

    Left over are their averages over trained models, where a few weights are zero by chance. The paper charges D-PSGD
    under a fixed mask with a search that it does not make; the product does not.
    """
    last_digit = 10 ** -len(paper.partition(".")[2])
    assert tera_flops(setting, **how) == pytest.approx(float(paper), rel=3e-3, abs=last_digit)


@pytest.mark.parametrize(("setting", "paper"), [(CIFAR10, 7.13), (VGG11, 1.80)])
def test_clients_of_all_densities_spend_the_flops_of_table_3_on_average(setting, paper):
    mean = sum(tera_flops(setting, float(density)) for density in IN_TURN.split()) / 5
    assert mean == pytest.approx(paper, rel=3e-3)
