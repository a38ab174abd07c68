"""The papers' image networks: building and initialising them, and names of their tensors."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from fedprune_app.core.modules import tensors_of
from fedprune_app.core.named import ImageShape, TensorDict, Tensors, ValueDict
from fedprune_app.core.rng import global_draws_of
from fedprune_app.core.texts import error_text
from fedprune_app.core.torchvision_shim import prepare_torchvision
from fedprune_app.models.names import BUILDERS, MODELS
from fedprune_app.models.variational import LATENT, Prior, Variational

_LENET5: ValueDict = {"channels": (6, 16), "hidden": (120, 84)}
_CNN5: ValueDict = {"channels": (10, 20), "hidden": (50,)}
_CNN_SMALL: ValueDict = {"channels": (16, 32), "kernel_size": 3, "padding": 1}
_VGG11: ValueDict = {
    "channels": (64, 128, 256, 256, 512, 512, 512, 512),
    "pooled": (True, True, False, True, False, True, False, True),
    "kernel_size": 3,
    "padding": 1,
    "global_pool": True,
}
_CONV_NETS: dict[str, ValueDict] = {  # arguments of conv_net
    "lenet5": _LENET5,
    "lenet5-bn": {**_LENET5, "norm": "bn"},
    "cnn5": _CNN5,
    "cnn5-bn": {**_CNN5, "norm": "bn"},
    "cnn-small": _CNN_SMALL,
    "cnn-small-bn": {**_CNN_SMALL, "norm": "bn"},
    "cnn-gn": {
        "channels": (16, 32, 64),
        "strides": (2, 1, 1),
        "pooled": (False, True, True),
        "pool_first": True,  # norms see a quarter of the elements: steps take 7 % less time, and accuracy is no worse
        "kernel_size": 3,
        "padding": 1,
        "norm": "gn",
        "num_groups": 4,
    },
    "cnn-fedp3": {"channels": (64, 64), "hidden": (1024, 1024)},
    "cnn-fedp3-fmnist": {"channels": (4, 12), "hidden": (1024, 1024)},
    "cnn-fedltp-mnist": {"channels": (10, 20), "hidden": (320,)},
    "cnn-fedltp-fmnist": {"channels": (32, 64), "hidden": (512,), "kernel_size": 3},
    "mlp-small": {"channels": (), "hidden": (64, 64)},
    "mlp3": {"channels": (), "hidden": (1024, 1024)},
    "mlp4": {"channels": (), "hidden": (1024, 1024, 1024)},
    "vgg11-gn": {**_VGG11, "norm": "gn"},
    "vgg11-bn": {**_VGG11, "norm": "bn"},
}
_VARIATIONAL = ("cnn-fedp3", "cnn-fedp3-fmnist", "mlp4", "cnn-small")  # those with a variational version, -cr
PROBED = 16  # logits that identify a network
_KAIMING = ("vgg11-gn", "vgg11-bn")  # only the released VGG-11 draws its own initial weights


def conv_net(
    image_shape: ImageShape,
    num_classes: int,
    *,
    channels: Sequence[int],
    hidden: Sequence[int] = (),
    kernel_size: int = 5,
    padding: int = 0,
    norm: Literal["bn", "gn"] | None = None,
    num_groups: int = 32,
    strides: Sequence[int] | None = None,
    pooled: Sequence[bool] | None = None,
    pool_first: bool = False,
    global_pool: bool = False,
) -> nn.Sequential:
    """Return a network of blocks of conv, [norm], [max pool 2], ReLU; then linear layers with ReLU between them.

    The network maps images (N, *image_shape) to logits (N, num_classes). Layers are named ``conv1, bn1, ..., fc1,
    ...``. Pooling precedes the ReLU: max and ReLU commute, so values and gradients are the same, and the ReLU processes
    a quarter of the elements.

    * ``channels`` and ``hidden`` are the widths of the convolutions and of the hidden linear layers. A network with
      channels removed is one of smaller ``channels``.
    * ``norm`` is batch normalisation, or group normalisation in ``num_groups`` groups.
    * ``strides`` are those of the convolutions (default: 1).
    * ``pooled`` selects the blocks that pool (default: all), with ``pool_first`` before the norm.
    * With ``global_pool`` the linear layers see each channel's mean, for any size of image.

    The weights are PyTorch's, from the global RNG; :func:`build_model` draws weights from a generator. Raises
    ``ValueError`` for an image too small.
    """
    strides = [1] * len(channels) if strides is None else strides
    pooled = [True] * len(channels) if pooled is None else pooled
    min_side = _smallest_side(strides, pooled, kernel_size, padding)
    depth, height, width = image_shape
    if min(height, width) < min_side:
        shape_text, model_name = "x".join(map(str, image_shape)), "mlp-small" if height == width == 1 else "cnn-small"
        raise ValueError(
            f"image shape {shape_text} is too small for this model, allowed: sides >= {min_side}, or another "
            f"model such as {model_name}"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (out_channels, stride, pools) in enumerate(zip(channels, strides, pooled, strict=True), start=1):
        layers[f"conv{i}"] = nn.Conv2d(depth, out_channels, kernel_size, stride, padding)
        block: list[tuple[str, nn.Module]] = []
        if norm == "bn":
            block.append((f"bn{i}", nn.BatchNorm2d(out_channels)))
        elif norm == "gn":
            block.append((f"gn{i}", nn.GroupNorm(num_groups, out_channels)))
        if pools:
            block.append((f"pool{i}", nn.MaxPool2d(2)))
        layers.update(reversed(block) if pool_first else block)
        layers[f"relu{i}"] = nn.ReLU()
        depth = out_channels
        height, width = (((n + 2 * padding - kernel_size) // stride + 1) // (1 + pools) for n in (height, width))
    if global_pool:
        layers["global_pool"] = nn.AdaptiveAvgPool2d(1)
        height = width = 1
    layers["flatten"] = nn.Flatten()
    widths = [depth * height * width, *hidden, num_classes]
    for i, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        if i > 1:
            layers[f"fc_relu{i - 1}"] = nn.ReLU()
        layers[f"fc{i}"] = nn.Linear(fan_in, fan_out)
    return nn.Sequential(layers)


def _smallest_side(strides: Sequence[int], pooled: Sequence[bool], kernel_size: int, padding: int) -> int:
    side = 1
    for stride, pools in zip(reversed(strides), reversed(pooled), strict=True):
        side = ((1 + pools) * side - 1) * stride + kernel_size - 2 * padding
    return side


def _resnet18(image_shape: ImageShape, num_classes: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return torchvision's ResNet-18 with the given norm, and a stem for small images: 3x3, stride 1, no pooling.

    Its last pooling is adaptive, so images of any size fit. Source: Dis-PFL's released code (its text says "PyTorch's
    implementation", whose 7x7 stem is for ImageNet). No operation overwrites its input, because private training
    differentiates by the outputs of layers. Values and gradients are torchvision's.
    """
    prepare_torchvision()
    from torchvision.models.resnet import BasicBlock, ResNet

    class Block(BasicBlock):  # type: ignore[misc]  # torchvision has no types
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.relu(self.bn1(self.conv1(x)))
            shortcut = x if self.downsample is None else self.downsample(x)
            output: Tensor = self.relu(self.bn2(self.conv2(hidden)) + shortcut)
            return output

    model: nn.Module = ResNet(Block, [2, 2, 2, 2], num_classes=num_classes, norm_layer=norm)
    model.conv1 = nn.Conv2d(image_shape[0], 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


# A plug-in's function that builds a network for images of a shape and a number of classes.
Build = Callable[[ImageShape, int], nn.Module]


def build_model(
    name: str, image_shape: ImageShape, num_classes: int, *, rng: torch.Generator, init: str = "default"
) -> nn.Module:
    """Return a network of :data:`MODELS` on the CPU, initialised from ``rng`` alone; the global RNG is not used.

    ``init="default"`` is PyTorch's own initialisation; for VGG-11 that of the released code, ``"kaiming"``; for a
    plug-in's network that of its function. ``image_shape`` is (channels, height, width). Raises ``ValueError`` for an
    unknown name or initialisation, fewer than two classes, or an image too small for the network.
    """
    seed = builder_seed(name, init, rng)
    model = architecture(name, image_shape, num_classes, seed=seed)
    if name in BUILDERS:
        _check_repeated(name, model, architecture(name, image_shape, num_classes, seed=seed), image_shape)
    if name in BUILDERS and init == "default":
        return model
    initialise(model, "kaiming" if init == "default" and name in _KAIMING else init, rng)
    return model


def builder_seed(name: str, init: str, rng: torch.Generator) -> int:
    """Return the seed with which a plug-in's function builds the network of :func:`build_model`, else 0."""
    return int(torch.randint(2**62, (1,), generator=rng)) if name in BUILDERS and init == "default" else 0


def _check_repeated(name: str, model: nn.Module, again: nn.Module, image_shape: ImageShape) -> None:
    """Raise ``ValueError`` for a network that differs each time, because every process builds it by itself."""
    images = torch.rand(2, *image_shape, generator=torch.Generator().manual_seed(0))
    outcomes = [[*each.state_dict().values(), outputs(each, images)] for each in (model, again)]
    if not all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True)):
        raise ValueError(
            f"model '{name}' is another network each time that it is made, allowed: one that draws by the global "
            "generators of torch, numpy and random alone, which have a seed here"
        )


@torch.no_grad()
def outputs(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of a copy of ``model`` in evaluation mode, for a copy of ``images``."""
    with global_draws_of(0):
        logits: Tensor = deepcopy(model).eval()(images.clone())
    return logits


def probe(model: nn.Module, image_shape: ImageShape) -> tuple[float, ...]:
    """Return some logits of a network for four images of noise, to five digits, which identify the network."""
    images = torch.rand(4, *image_shape, generator=torch.Generator().manual_seed(0))
    logits = outputs(model, images).t().flatten()[:PROBED].nan_to_num()
    return tuple(float(f"{logit:.5g}") for logit in logits.tolist())


def computes(model: nn.Module, image_shape: ImageShape, logits: Sequence[float]) -> bool:
    """Return whether a network has these logits of :func:`probe`, but for the last digits of another machine."""
    expected, actual = torch.tensor(logits), torch.tensor(probe(model, image_shape))
    return torch.allclose(actual, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def architecture(
    name: str, image_shape: ImageShape, num_classes: int, build: Build | None = None, *, seed: int = 0
) -> nn.Module:
    """Return a network of :data:`MODELS` on the CPU, as PyTorch or a plug-in's function initialises it.

    It is drawn from the global generators of torch, NumPy and Python with this ``seed``. They are restored afterwards.
    With ``build`` the network is what that function makes. Raises ``ValueError`` as :func:`build_model`.
    """
    build = build or BUILDERS.get(name)
    if name not in MODELS and build is None:
        raise ValueError(f"model '{name}' is unknown, allowed: {', '.join(MODELS)}")
    if num_classes < 2:
        raise ValueError(f"model '{name}' with {num_classes} classes, allowed: at least 2")
    if build is not None:
        with global_draws_of(seed):
            return _check_network(name, _build_plugged(build, name, image_shape, num_classes), image_shape, num_classes)
    with global_draws_of(seed):
        if name == "resnet18-gn":
            return _resnet18(image_shape, num_classes, partial(nn.GroupNorm, 32))
        if name == "resnet18-bn":
            return _resnet18(image_shape, num_classes, nn.BatchNorm2d)
        try:
            if (base_name := name.removesuffix("-cr")) in _VARIATIONAL and base_name != name:
                encoder = conv_net(image_shape, 2 * LATENT, **_CONV_NETS[base_name])
                return Variational(OrderedDict(encoder.named_children()), num_classes, LATENT)
            return conv_net(image_shape, num_classes, **_CONV_NETS[name])
        except ValueError as error:
            raise ValueError(f"model is {name!r}: {error}") from None


def _build_plugged(build: Build, name: str, image_shape: ImageShape, num_classes: int) -> nn.Module:
    try:
        model = build(image_shape, num_classes)
        deepcopy(model)  # each client has a copy
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise ValueError(
            f"model '{name}' cannot be made for images of {_sizes(image_shape)} and {num_classes} classes: "
            f"{error_text(error)}"
        ) from error
    if not isinstance(model, nn.Module) or any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise ValueError(f"model '{name}' is of type {type(model).__name__}, allowed: torch.nn.Module, no TorchScript")
    return _unwrap(model).to("cpu")


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside ``torch.compile``, recursively: compiled code ignores new weights."""
    model.__dict__.pop("_compiled_call_impl", None)
    for key, part in model.named_children():
        setattr(model, key, _unwrap(part))
    return model._modules.get("_orig_mod") or model


def _check_network(name: str, model: nn.Module, image_shape: ImageShape, num_classes: int) -> nn.Module:
    for key, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"model '{name}' has the lazy parameter '{key}', allowed: layers that know their sizes")
        if parameter.dtype != torch.float32:
            raise ValueError(f"model '{name}' has the parameter '{key}' of type {parameter.dtype}, allowed: float32")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"model '{name}' has a hook on '{key}', which copies lose, allowed: hooks on layers")
    if not prunable_names(model):
        raise ValueError(f"model '{name}' has no layer that can be pruned, allowed: one with nn.Conv2d or nn.Linear")
    for count, images in ((2, "two images"), (1, "one image")):
        try:
            logits = outputs(model, torch.zeros(count, *image_shape))
        except Exception as error:  # a user's network may raise anything
            raise ValueError(f"model '{name}' fails on images of {_sizes(image_shape)}: {error_text(error)}") from error
        if not isinstance(logits, Tensor) or tuple(logits.shape) != (count, num_classes):
            shape = _sizes(getattr(logits, "shape", ())) or type(logits).__name__
            raise ValueError(
                f"model '{name}' returns {shape} for {images}, allowed: logits of shape {count}x{num_classes}"
            )
    copy, values = deepcopy(model), [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
        of_copy = outputs(copy, torch.zeros(1, *image_shape))
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)
    if not torch.allclose(of_copy, logits, rtol=0, atol=0, equal_nan=True):
        raise ValueError(
            f"model '{name}' has a function that computes with the network it was made in, also in copies, allowed: "
            "methods, and no lambda that holds self"
        )
    return model.train()


@torch.no_grad()
def initialise(model: nn.Module, init: str, rng: torch.Generator) -> None:
    """Redraw every parameter from ``rng``, layer by layer in the model's order, and reset batch statistics.

    * ``default`` is PyTorch's own: weights and biases uniform in +-1/sqrt(fan_in), norm scale 1 and shift 0.
    * ``subfedavg`` is that of Sub-FedAvg's released code: Xavier-normal weights and N(0, 1) biases. A model
      with batch normalisation (its hybrid variant) has conv N(0, sqrt(2 / (k^2 out_channels))), linear N(0, 0.01),
      scale 0.5, biases and shifts 0.
    * ``kaiming`` is that of Dis-PFL's released VGG-11, which is torchvision's: conv Kaiming-normal by fan-out, linear
      N(0, 0.01), scale 1, biases and shifts 0.

    Raises ``ValueError`` for a layer without a rule.
    """
    hybrid = init == "subfedavg" and any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()  # constants and running statistics, no random numbers
            if hybrid:
                nn.init.constant_(module.weight, 0.5)
        elif isinstance(module, nn.GroupNorm | Prior):
            module.reset_parameters()  # scale 1, shift 0; N(0, 1)
        elif isinstance(module, nn.Conv2d | nn.Linear):
            if init == "default":
                _default_(module, rng)
            elif hybrid or init == "kaiming":
                _kaiming_(module, rng)
            else:
                _subfedavg_(module, rng)
        elif any(True for _ in module.parameters(recurse=False)):
            raise ValueError(f"layer '{name}' of type {type(module).__name__} has no initialisation rule")


def _default_(layer: nn.Conv2d | nn.Linear, rng: torch.Generator) -> None:
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=rng)
    if layer.bias is not None:
        bound = 1 / math.sqrt(layer.weight[0].numel())  # fan in
        nn.init.uniform_(layer.bias, -bound, bound, generator=rng)


def _subfedavg_(layer: nn.Conv2d | nn.Linear, rng: torch.Generator) -> None:
    nn.init.xavier_normal_(layer.weight, generator=rng)
    if layer.bias is not None:
        nn.init.normal_(layer.bias, generator=rng)


def _kaiming_(layer: nn.Conv2d | nn.Linear, rng: torch.Generator) -> None:
    if isinstance(layer, nn.Conv2d):
        std = math.sqrt(2 / (math.prod(layer.kernel_size) * layer.out_channels))  # fan out
    else:
        std = 0.01
    nn.init.normal_(layer.weight, std=std, generator=rng)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def prunable_names(model: nn.Module) -> list[str]:
    """Return the names of the weight tensors of convolutions and linear layers, in order: no bias, no norm.

    A weight shared by layers is listed under its first name. A weight computed from parameters is not listed.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    names = {name for name, _ in model.named_parameters()}
    return [weight for name in layers if (weight := f"{name}.weight" if name else "weight") in names]


def parameter_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def buffer_names(model: nn.Module) -> list[str]:
    """Return the names of the floating-point buffers (running means and variances), in order.

    Step counters are left out: averaging them is meaningless.
    """
    return [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]


def named_tensors(model: nn.Module) -> TensorDict:
    """Return all parameters by name, in order, then the running statistics; not copied."""
    tensors = tensors_of(model)
    return {name: tensors[name] for name in parameter_names(model) + buffer_names(model)}


def state_tensors(model: nn.Module, include_buffers: bool = False) -> TensorDict:
    """Return contiguous CPU copies of all parameters by name, in order.

    With ``include_buffers`` the running statistics follow.
    """
    tensors = named_tensors(model) if include_buffers else dict(model.named_parameters())
    layout = torch.contiguous_format
    return {name: tensor.detach().to("cpu", copy=True, memory_format=layout) for name, tensor in tensors.items()}


@torch.no_grad()
def load_state_tensors(model: nn.Module, tensors: Tensors) -> None:
    """Copy tensors into the parameters and buffers of their names; others are not changed.

    Raises ``ValueError`` for a name that the model lacks, or another shape; the model is then unchanged.
    """
    own_tensors = tensors_of(model)
    for name, tensor in tensors.items():
        if name not in own_tensors:
            raise ValueError(f"tensor '{name}' is not in the model, allowed: {', '.join(own_tensors)}")
        if tensor.shape != own_tensors[name].shape:
            raise ValueError(
                f"tensor '{name}' has shape {tuple(tensor.shape)}, allowed: {tuple(own_tensors[name].shape)}"
            )
    for name, tensor in tensors.items():
        own_tensors[name].copy_(tensor)
