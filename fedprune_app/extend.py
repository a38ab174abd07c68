"""The API for plug-ins: functions that register names, and classes that systems extend.

docs/extend.md explains each of them by an example.
"""

from clients.base import ImageClient, LocalTraining, Update
from clients.context import NodeContext
from clients.dispfl import DisPFLClient
from clients.fedavg import FedAvgClient
from clients.fedavg_ft import FedAvgFTClient
from clients.fjord import FjORDClient
from clients.gossip import GossipClient
from clients.node import ReplyFields
from clients.privacy import PlannedReleases
from clients.standalone import StandaloneClient
from clients.subfedavg import SubFedAvgClient
from clients.task import Task
from fedprune_app.config import Config, ConfigError, Table, option
from fedprune_app.core import aggregate, layers, masks, rng, schedules, structured
from fedprune_app.core.payload import Payload
from fedprune_app.data.dataset import Dataset
from fedprune_app.engine.store import State, grouped
from fedprune_app.engine.wire import Schema
from fedprune_app.federation.exchanges import exchange, request_payloads
from fedprune_app.federation.round import OutgoingMessage, Reply, Round, RunContext
from fedprune_app.learning.evaluate import dense_gradient
from fedprune_app.learning.training import TrainingResult, proximal
from fedprune_app.models.vision import load_state_tensors, state_tensors
from fedprune_app.plugins.registering import register_dataset, register_model, register_partition, register_system
from fedprune_app.results.system_metrics import SystemMetric
from strategies.base import AveragingStrategy, FederatedStrategy
from strategies.dispfl import DisPFL
from strategies.fedavg import FedAvg
from strategies.fedavg_ft import FedAvgFT
from strategies.fjord import FjORD
from strategies.gossip import Gossip
from strategies.standalone import Standalone
from strategies.subfedavg import SubFedAvg

__all__ = [
    "AveragingStrategy",
    "Config",
    "ConfigError",
    "Dataset",
    "DisPFL",
    "DisPFLClient",
    "FedAvg",
    "FedAvgClient",
    "FedAvgFT",
    "FedAvgFTClient",
    "FederatedStrategy",
    "FjORD",
    "FjORDClient",
    "Gossip",
    "GossipClient",
    "ImageClient",
    "LocalTraining",
    "NodeContext",
    "OutgoingMessage",
    "Payload",
    "PlannedReleases",
    "Reply",
    "ReplyFields",
    "Round",
    "RunContext",
    "Schema",
    "Standalone",
    "StandaloneClient",
    "State",
    "SubFedAvg",
    "SubFedAvgClient",
    "SystemMetric",
    "Table",
    "Task",
    "TrainingResult",
    "Update",
    "aggregate",
    "dense_gradient",
    "exchange",
    "grouped",
    "layers",
    "load_state_tensors",
    "masks",
    "option",
    "proximal",
    "register_dataset",
    "register_model",
    "register_partition",
    "register_system",
    "request_payloads",
    "rng",
    "schedules",
    "state_tensors",
    "structured",
]
