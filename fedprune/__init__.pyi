"""What editors know of ``import fedprune``; `make settings` writes it from the declarations."""

from collections.abc import Callable
from typing import TypedDict, Unpack, overload

from fedprune_app import __version__ as __version__
from fedprune_app.api import AnyPath, Settings
from fedprune_app.api import ConfigError as ConfigError
from fedprune_app.api import LaunchError as LaunchError
from fedprune_app.api import Run as Run
from fedprune_app.api import RunsFailed as RunsFailed
from fedprune_app.api import export as export
from fedprune_app.api import load_model as load_model
from fedprune_app.api import load_packed as load_packed
from fedprune_app.api import load_run as load_run
from fedprune_app.api import masks as masks
from fedprune_app.api import model as model
from fedprune_app.api import predict as predict
from fedprune_app.api import report as report
from fedprune_app.api import sweep as sweep
from fedprune_app.core.named import Values

class _Subfedavg(TypedDict, total=False):
    accuracy_threshold: float
    channel_distance: float
    fc_mask_distance: float
    gate_split: str
    mask_distance: float
    prune_step: float
    target_rate: float

class _Dispfl(TypedDict, total=False):
    annealing_rounds: int
    densities: str
    dropped: str
    gossip: str
    growth: str
    neighbours: int
    prune_rate: float
    topology: str

class _Dpsgd(TypedDict, total=False):
    density: float
    gossip: str
    neighbours: int
    topology: str

class _Ditto(TypedDict, total=False):
    global_epochs: int
    personal_epochs: int
    pull: float

class _Fedfomo(TypedDict, total=False):
    candidates: int

class _Fedprox(TypedDict, total=False):
    mu: float

class _Lgfedavg(TypedDict, total=False):
    global_layers: int
    pretrain_rounds: int

class _Mtl(TypedDict, total=False):
    strength: float

class _Fedp3(TypedDict, total=False):
    aggregation: str
    assignment: str
    capacities: str
    layer_set: str
    layers: str
    local: str
    local_density: float
    personal_head: bool

class _Fedcr(TypedDict, total=False):
    beta: float
    layer_set: str

class _Fjord(TypedDict, total=False):
    widths: str

class _Fedltp(TypedDict, total=False):
    average: str
    further_pruned: float
    pruning: str
    public_data_dir: str
    public_dataset: str
    public_samples: int
    rule: str
    start: str
    ticket_iterations: int
    tickets: int
    validators: str

class _Fedspa(TypedDict, total=False):
    acceleration: str
    server_learning_rate: float
    share: float

class _Dp(TypedDict, total=False):
    accountant: str
    accuracies: str
    clip_norm: float
    count_scale: float
    delta: float
    enabled: bool
    epsilon_budget: float
    grad_sample: str
    group_limit: int
    ledger_dir: str
    noise_multiplier: float
    noise_shared_by: int
    planned_rounds: int
    second_delta: float
    secure_rng: bool
    target_epsilon: float
    unit: str

class _Fedspallm(TypedDict, total=False):
    bits: int
    block_size: int
    deal: str
    dtype: str
    evaluation_texts: str
    hessian_form: str
    keep_sums: bool
    layer_shares: str
    layers_per_exchange: int
    merge: str
    pattern: str
    pruner: str
    recovery_learning_rate: float
    recovery_rounds: int
    recovery_segments: int
    recovery_steps: int
    refine: bool
    segment_length: int
    segments: int
    start_token: bool
    test_windows: int
    unsampled: str
    window: int

class _Keys(TypedDict, total=False):
    accept_loss: bool
    augmentation: str
    batch_norm: str
    batch_size: int
    class_assignment: str
    classes: str
    classes_per_client: int
    cohort: int
    cuda_graphs: bool
    data_dir: str
    dataset: str
    deadline_seconds: float
    density: float
    deterministic: bool
    device: str
    dirichlet_alpha: float
    dirichlet_groups: int
    dispfl: _Dispfl
    ditto: _Ditto
    download: bool
    dp: _Dp
    dpsgd: _Dpsgd
    drop_probability: float
    evaluate_clients: int
    evaluate_every: int
    fedcr: _Fedcr
    fedfomo: _Fedfomo
    fedltp: _Fedltp
    fedp3: _Fedp3
    fedprox: _Fedprox
    fedspa: _Fedspa
    fedspallm: _Fedspallm
    fjord: _Fjord
    fraction_train: float
    group_column: str
    holdout_clients: int
    ignore_columns: str
    image_column: str
    image_fit: str
    image_size: int
    init: str
    label_column: str
    last_phase: bool
    learning_rate: float
    lgfedavg: _Lgfedavg
    local_epochs: int
    lr_decay: float
    max_grad_norm: float
    min_clients: int
    min_holders: int
    min_replies: int
    model: str
    momentum: float
    mtl: _Mtl
    num_server_rounds: int
    num_threads: int
    only_clients: str
    out_dir: str
    owner_column: str
    partition: str
    plugin_options: str
    plugins: str
    precision: str
    public_fraction: float
    resume_from: str
    samples_per_client: int
    secure_sums: bool
    secure_sums_threshold: int
    seed: int
    shard_size: int
    shards_per_client: int
    startup_seconds: float
    state_dir: str
    steps_per_epoch: int
    subfedavg: _Subfedavg
    system: str
    test_fraction: float
    test_samples: int
    test_split: str
    tracking: str
    training_form: str
    validation_fraction: float
    weight_decay: float

@overload
def run(
    config: AnyPath | Settings | None = ...,
    /,
    *,
    out: AnyPath | None = ...,
    clients: int | None = ...,
    workers: int | None = ...,
    engine: str = ...,
    ray_address: str = ...,
    resume: bool = ...,
    progress: bool = ...,
    on_round: Callable[[Values], object] | None = ...,
    **settings: Unpack[_Keys],
) -> Run: ...
@overload
def run(
    config: AnyPath | Settings | None = ...,
    /,
    *,
    out: AnyPath | None = ...,
    clients: int | None = ...,
    workers: int | None = ...,
    engine: str = ...,
    ray_address: str = ...,
    resume: bool = ...,
    progress: bool = ...,
    on_round: Callable[[Values], object] | None = ...,
    **settings: object,
) -> Run: ...
