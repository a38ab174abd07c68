"""Names of the networks, each with a one-line description; quick to import."""

from collections.abc import Callable
from typing import Any

from fedprune_app.core.named import ImageShape

MODELS: dict[str, str] = {
    "lenet5": "LeNet-5 of Sub-FedAvg: conv 6, 16 (5x5), fc 120, 84; 62,006 parameters on 3x32x32, 10 classes",
    "lenet5-bn": "LeNet-5 with batch normalisation after each convolution (Sub-FedAvg hybrid)",
    "cnn5": "CNN of Sub-FedAvg: conv 10, 20 (5x5), fc 50; 21,840 parameters on 1x28x28, 10 classes",
    "cnn5-bn": "cnn5 with batch normalisation after each convolution",
    "cnn-small": "conv 16, 32 (3x3, padded), one linear layer; 6,090 parameters on 1x8x8, 10 classes",
    "cnn-small-bn": "cnn-small with batch normalisation after each convolution",
    "cnn-gn": "conv 16 (stride 2), 32, 64 (3x3) with group normalisation; 34,058 parameters on 3x32x32, 10 classes",
    "cnn-fedp3": "CNN of FedP3: conv 64, 64 (5x5), fc 1024, 1024; 2,806,602 parameters on 3x32x32, 10 classes",
    "cnn-fedp3-fmnist": "CNN of FedP3's code: conv 4, 12 (5x5), fc 1024, 1024; 1,258,798 parameters on 1x28x28",
    "cnn-fedltp-mnist": "model 1 of Fed-LTP: conv 10, 20 (5x5), fc 320; 111,210 parameters on 1x28x28, 10 classes",
    "cnn-fedltp-fmnist": "model 2 of Fed-LTP: conv 32, 64 (3x3), fc 512; 843,658 parameters on 1x28x28, 10 classes",
    "mlp-small": "MLP for tables: fc 64, 64",
    "mlp3": "MLP of FedP3's code: fc 1024, 1024; 1,863,690 parameters on 1x28x28, 10 classes",
    "mlp4": "MLP of FedP3: fc 1024, 1024, 1024; 2,913,290 parameters on 1x28x28, 10 classes",
    "cnn-fedp3-cr": "cnn-fedp3 for FedCR: a Gaussian code of 256 before the last layer; 3,323,722 parameters",
    "cnn-fedp3-fmnist-cr": "cnn-fedp3-fmnist for FedCR",
    "mlp4-cr": "mlp4 for FedCR",
    "cnn-small-cr": "cnn-small for FedCR",
    "resnet18-gn": "ResNet-18 of Dis-PFL: 3x3 stem, group normalisation; 11,173,962 parameters on 3x32x32, 10 classes",
    "resnet18-bn": "the same with batch normalisation (Sub-FedAvg hybrid)",
    "vgg11-gn": "VGG-11 of Dis-PFL: group normalisation, one linear layer; 9,231,114 parameters on 3x32x32, 10 classes",
    "vgg11-bn": "the same with batch normalisation (Sub-FedAvg hybrid)",
}

# The network of ``model = "auto"``, by dataset: the papers' network where they name one.
AUTO = {
    "digits": "cnn-small",
    "mnist": "cnn5",
    "fashion-mnist": "cnn5",
    "emnist-letters": "cnn5",
    "emnist-letters-10": "cnn5",
    "emnist-digits": "cnn5",
    "cifar10": "lenet5",
    "cifar100": "lenet5",
    "tiny-imagenet": "lenet5",
    "image-folder": "lenet5",
    "table": "mlp-small",
    "huggingface": "lenet5",
}

# A plug-in's networks: name → function of an image's shape (C, H, W) and the number of classes.
BUILDERS: dict[str, Callable[[ImageShape, int], Any]] = {}


def chosen_name(name: str, dataset: str) -> str:
    """Return the name of the network that the key ``model`` means; 'auto-bn' is the dataset's with BatchNorm."""
    auto = AUTO.get(dataset, "lenet5")
    if name == "auto-bn":
        return f"{auto}-bn" if f"{auto}-bn" in MODELS else auto
    return auto if name == "auto" else name
