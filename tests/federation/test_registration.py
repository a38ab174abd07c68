"""Who is let into a run, and who is left out with which reason."""

from __future__ import annotations

import math
import time

import pytest
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity

from fedprune_app import client_app
from fedprune_app.config import DEFAULTS
from fedprune_app.data import splits
from fedprune_app.engine import simulated_grid
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.simulated_grid import InProcessGrid
from fedprune_app.federation import registration
from fedprune_app.federation.clients import TextClientInfo
from fedprune_app.federation.registration import register_clients
from tests.conftest import tampered_app
from tests.examples import full
from tests.refusing import refuses

KEY = "0123456789abcdef"
NO_SCALE = {"normalisation-mean": [], "normalisation-std": []}


@pytest.fixture(autouse=True)
def _task() -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1


def test_the_roster_is_in_partition_order_whatever_the_node_ids():
    grid = InProcessGrid(client_app.app, 5, DEFAULTS)
    roster, left_out = register_clients(grid, 30, KEY)
    assert left_out == []
    assert list(roster) == [0, 1, 2, 3, 4]
    assert [info.node_id for info in roster.values()] != sorted(info.node_id for info in roster.values())
    assert sum(info.num_examples for info in roster.values()) + sum(
        sum(info.label_counts["validation"]) for info in roster.values()
    ) == sum(sum(info.label_counts[part]) for info in roster.values() for part in ("train", "validation"))
    assert roster[0].image_shape == (1, 8, 8)


def test_a_node_that_cannot_start_is_left_out_with_its_reason():
    grid = InProcessGrid(client_app.app, 3, DEFAULTS)
    lost = next(node for node, context in grid._contexts.items() if context.node_config["partition-id"] == 1)
    grid._contexts[lost].run_config = {**grid._contexts[lost].run_config, "dataset": "mnist"}
    roster, left_out = register_clients(grid, 30, KEY)
    assert list(roster) == [0, 2]
    assert len(left_out) == 1
    assert "data-dir" in left_out[0]


def introduced(*said: tuple[int, dict[str, object]], clients: int = 4, **more):
    """The roster, and who is left out of it, where these partitions say this of themselves."""

    def lie(request, reply, partition):
        reply.content["fields"].update(dict(said).get(partition, {}))
        return reply

    return register_clients(InProcessGrid(tampered_app(query=lie), clients, DEFAULTS), 30, KEY, **more)


def test_two_nodes_of_one_partition_are_both_left_out_and_the_others_go_on():
    roster, left_out = introduced((3, {"partition": 1}))
    assert list(roster) == [0, 2]
    assert len(left_out) == 2
    assert all("and another claim partition-id 1, allowed: one each" in reason for reason in left_out)


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (
            {"image-shape": [3, 32, 32], **NO_SCALE},
            " 3x32x32, allowed: the same on all nodes",
        ),
        ({"image-shape": [4096, 4096, 4096]}, "field 'image-shape' is"),
        ({"image-shape": [1, 4096, 4096], "num-classes": 10**6, "labels-train": []}, "field 'image-shape' is"),
        ({"num-classes": 10**5}, "field 'labels-train' is"),
        ({"labels-train": [1] * 2_000_000}, "field 'labels-train' is"),
        ({"labels-test": ["\x1b[2J" * 10**5] * 10}, "field 'labels-test' is"),
        full({"labels-test": ["\x1b[2J" * 10**6] * 10}, "its reply is refused: it has 1 records and 40000"),
        full({"classes": ["x"] * 10**6}, "field 'classes' is"),
        full({"features": ["x"] * 63}, "field 'features' is"),
        full({"features": [1] * 64}, "field 'features' is"),
        full({"normalisation-mean": [0.1, 0.2]}, "is [0.1, 0.2], allowed: 1 numbers, one per channel"),
        full({"normalisation-mean": [math.nan]}, "field 'normalisation-mean' is [nan], allowed: 1 numbers"),
        full({"normalisation-mean": [1e101]}, "field 'normalisation-mean' is"),
        full({"normalisation-mean": ["\x1b[2J" * 10**5]}, "field 'normalisation-mean' is"),
        full(
            {"normalisation-std": [0.0]}, "field 'normalisation-std' is [0.0], allowed: a number above 0 for each mean"
        ),
        full({"normalisation-std": []}, "field 'normalisation-std' is [], allowed: a number above 0 for each mean"),
        full({"num-examples": 0}, "field 'num-examples' is 0"),
        full({"num-examples": "9" * 10**6}, "field 'num-examples' is '999"),
        full({"partition": 2**40}, "field 'partition' is"),
        full({"partition": 2**30}, "says that it is 1073741824, allowed: below 4"),
        full({"capacity": math.nan}, "field 'capacity' is nan"),
        full({"own-data": True, "partition": 99}, "says that it is 99, allowed: its"),
        full({"num-partitions": 0}, "field 'num-partitions' is 0"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_who_says_of_itself_what_cannot_be_is_left_out_alone(lie, says):
    roster, left_out = introduced((0, lie))
    assert list(roster) == [1, 2, 3]
    (reason,) = left_out
    assert says in reason
    assert len(reason) < 600
    assert reason.isprintable()


COLUMNS = [f"x{k}" for k in range(64)]


@pytest.mark.parametrize(
    ("usual", "other"),
    [({"features": COLUMNS}, {"features": COLUMNS[::-1]}), ({"features-digest": "a"}, {"features-digest": "b"})],
    ids=["names", "digests"],
)
def test_whose_table_has_its_columns_in_another_order_is_left_out(usual, other):
    """A network tells columns apart by their place, so that the average of both would be of no use to anybody."""
    roster, (reason,) = introduced((0, other), *((partition, usual) for partition in (1, 2)))
    assert list(roster) == [1, 2, 3]  # client 3 tells no columns
    assert "client 0 is unlike most: node " in reason
    assert reason.endswith("allowed: the same columns in the same order in all tables")


def test_who_has_another_copy_of_the_data_that_are_dealt_is_left_out():
    """Partition ids name rows of the one that most have: two clients would train on the same ones."""
    roster, (reason,) = introduced((0, {"data-sha256": "f" * 64}))
    assert list(roster) == [1, 2, 3]
    assert "has data-sha256" in reason


def test_in_a_tie_of_own_tables_the_run_stops_and_names_both():
    own = {"own-data": True, "classes": [], **NO_SCALE}
    said = [(k, {**own, "data-dir": f"/{k}", "features-digest": str(k % 2)}) for k in range(2)]
    grid = InProcessGrid(client_app.app, 2, DEFAULTS)
    numbers = {node: context.node_config["partition-id"] for node, context in grid._contexts.items()}
    with pytest.raises(ValueError, match="allowed: the same columns in the same order in all tables") as error:
        introduced(*said, clients=2, numbers=numbers)
    assert "'/0'" in str(error.value)
    assert "'/1'" in str(error.value)


def test_who_divides_the_data_among_another_number_of_clients_is_left_out():
    roster, (reason,) = introduced((0, {"num-partitions": 5}))
    assert list(roster) == [1, 2, 3]
    assert "has num-partitions 4 and node " in reason
    assert reason.endswith(" 5, allowed: the same on all nodes")
    with pytest.raises(ValueError, match=r"^node \d+ has num-partitions 2 and node \d+ 3, allowed: the same on all"):
        introduced((1, {"num-partitions": 3}), clients=2)


def text_client(partition: int, **said) -> TextClientInfo:
    fields = {"partition": partition, "num-examples": 5, "shell-digest": "s", "layer-digests": ["a", "b"]}
    return TextClientInfo.read(partition, {**fields, **{key.replace("_", "-"): value for key, value in said.items()}})


def test_what_clients_of_text_say_is_bounded():
    assert (
        text_client(1).difference(text_client(2, layer_digests=["c"], shell_digest="t")) == ""
    )  # not theirs to decide
    with pytest.raises(ValueError, match=r"field 'documents' is .*, allowed: at most 64 texts"):
        text_client(0, documents=["x"] * 10**6)
    with pytest.raises(ValueError, match=r"field 'layer-digests' is .*, allowed: at most 1024 texts"):
        text_client(0, layer_digests=["x"] * 10**6)


@pytest.mark.parametrize("partition", [None, "1", -1, 2])
def test_a_node_without_a_proper_partition_is_told_so(partition):
    grid = InProcessGrid(client_app.app, 2, DEFAULTS)
    for context in grid._contexts.values():
        context.node_config["partition-id"] = partition
    with pytest.raises(TooFewReplies, match="node-config: partition-id is "):
        register_clients(grid, 30, KEY)


@pytest.mark.parametrize("key", ["", "../../etc", "0123456789abcdeg", "0" * 17])
def test_a_client_writes_nowhere_on_a_key_that_is_none(key):
    grid = InProcessGrid(client_app.app, 2, DEFAULTS)
    with pytest.raises(TooFewReplies, match="run-key is"):
        register_clients(grid, 30, key)


# --- a window of messages ---------------------------------------------------------------------------------------------


class Arriving(InProcessGrid):
    """One more node is connected each time it is asked which there are."""

    asked = 0

    def get_node_ids(self):
        self.asked += 1
        return list(super().get_node_ids())[: self.asked]


def test_a_run_begins_when_enough_clients_are_there_and_says_how_many_are():
    said = []
    roster, left_out = register_clients(
        Arriving(client_app.app, 5, DEFAULTS), 30, KEY, min_clients=3, notify=said.append
    )
    assert len(roster) == 3
    assert left_out == []
    assert said == ["waiting for clients: 1 of 3 connected", "waiting for clients: 2 of 3 connected"]


def test_too_few_clients_are_waited_for_no_longer_than_allowed():
    started = time.monotonic()
    grid = InProcessGrid(client_app.app, 2, DEFAULTS)
    with pytest.raises(
        TooFewReplies,
        match=r"^2 of the 3 clients that the run waits for connected within startup-seconds = 0.5$",
    ):
        register_clients(grid, 0.5, KEY, min_clients=3)
    assert 0.5 <= time.monotonic() - started < 5


class Silent(InProcessGrid):
    """Its clients never answer, as where Ray's processes do not start."""

    def pull_messages(self, message_ids):
        return []


def test_clients_that_do_not_answer_in_time_are_an_error_that_names_the_setting():
    with pytest.raises(TooFewReplies, match=r"^no client could start: node \d+: no reply in 0.2 s \(startup"):
        register_clients(Silent(client_app.app, 2, DEFAULTS), 0.2, KEY)


def with_a_bad_first(grid: InProcessGrid) -> InProcessGrid:
    first = next(iter(grid._contexts.values()))
    first.run_config = {**first.run_config, "dataset": "mnist"}
    return grid


def test_clients_that_cannot_take_part_do_not_count_as_there():
    grid = with_a_bad_first(InProcessGrid(client_app.app, 3, DEFAULTS))
    with pytest.raises(TooFewReplies, match=r"^2 of the 3 clients that .* can take part; first reason: .*data-dir"):
        register_clients(grid, 600, KEY, min_clients=3)  # in a simulation nobody comes later


def test_who_comes_later_is_asked_until_enough_can_take_part():
    said = []
    grid = with_a_bad_first(Arriving(client_app.app, 6, DEFAULTS))
    roster, left_out = register_clients(grid, 600, KEY, min_clients=4, notify=said.append)
    assert list(roster) == [1, 2, 3, 4]
    assert len(left_out) == 1
    assert "data-dir" in left_out[0]
    assert said[-1] == "waiting for clients: 3 of 4 can take part"


def test_a_run_that_no_node_can_start_waits_for_no_other():
    grid = with_a_bad_first(Arriving(client_app.app, 2, DEFAULTS))
    with pytest.raises(TooFewReplies, match=r"^no client could start: .*data-dir"):
        register_clients(grid, 600, KEY)


class Mending(InProcessGrid):
    """A deployment: nobody knows how many nodes will come. Its operator acts while the server asks which are there."""

    def __init__(self, *arguments, mend):
        super().__init__(*arguments)
        del self.num_nodes
        self.there, self.mend, self.asked = list(super().get_node_ids()), mend, 0

    def get_node_ids(self):
        self.asked += 1
        if self.asked == 3:
            self.mend(self)
        return self.there


def test_a_node_that_its_operator_mends_while_the_run_waits_takes_part(monkeypatch, caplog):
    monkeypatch.setattr(registration, "_AGAIN_SECONDS", 0.01)

    def mend(grid: InProcessGrid) -> None:
        first, second, *_ = grid._contexts.values()
        first.run_config = second.run_config

    said = []
    grid = with_a_bad_first(Mending(client_app.app, 3, DEFAULTS, mend=mend))
    roster, left_out = register_clients(grid, 600, KEY, min_clients=3, notify=said.append)
    assert list(roster) == [0, 1, 2]
    assert left_out == []
    assert said == ["waiting for clients: 2 of 3 can take part"]
    assert len([record for record in caplog.records if "left out" in record.message]) == 1


def test_a_node_that_is_started_anew_under_another_id_takes_the_place_of_the_old_one(monkeypatch):
    monkeypatch.setattr(registration, "_AGAIN_SECONDS", 0.01)

    def mend(grid: Mending) -> None:
        grid.there = grid.there[1:]

    grid = Mending(client_app.app, 4, DEFAULTS, mend=mend)
    contexts = list(grid._contexts.values())
    contexts[1].node_config["partition-id"] = 0
    roster, left_out = register_clients(grid, 600, KEY, min_clients=3)
    assert {number: info.node_id for number, info in roster.items()} == {
        number: contexts[place].node_id for number, place in ((0, 1), (2, 2), (3, 3))
    }
    assert left_out == []


def test_two_nodes_of_one_partition_are_both_left_out_even_where_one_comes_later():
    grid = with_a_bad_first(Arriving(client_app.app, 5, DEFAULTS))
    contexts = list(grid._contexts.values())
    contexts[3].node_config["partition-id"] = 1
    with pytest.raises(TooFewReplies, match=r"^2 of the 3 clients that the run waits for can take part"):
        register_clients(grid, 600, KEY, min_clients=3)


# --- a run that is resumed --------------------------------------------------------------------------------------------


class Part(InProcessGrid):
    """Nodes of these partitions are connected."""

    partitions: tuple[int, ...] = ()

    def get_node_ids(self):
        nodes = list(super().get_node_ids())
        return [nodes[k] for k in self.partitions]


def test_a_node_that_is_no_part_of_a_run_does_not_stop_its_resumption(federate, monkeypatch, tmp_path):
    monkeypatch.setattr(simulated_grid, "InProcessGrid", Part)
    monkeypatch.setattr(Part, "partitions", (0, 1, 3))
    settings = {"clients": 4, "system": "fedavg", "evaluate_every": 0}
    whole = federate(name="whole", num_server_rounds=2, **settings)
    federate(name="part", num_server_rounds=1, **settings)
    monkeypatch.setattr(Part, "partitions", (2, 0, 1, 3))
    resumed = federate(name="part", num_server_rounds=2, resume_from=str(tmp_path / "part"), **settings)
    assert [row["partition"] for row in resumed.info["partition"]] == [0, 1, 3]
    assert resumed.info["clients_left_out"] == [
        "client 2 is no part of the run, allowed: only-clients, or when resuming run.json's"
    ]
    assert resumed.sha256 == whole.sha256


def test_a_run_goes_on_with_the_data_that_it_began_with_alone(federate, tmp_path):
    """A test example may change without a change of labels, or of what normalises the training examples."""
    folder = tmp_path / "data"
    folder.mkdir()

    def write(first: float) -> None:
        for name, value in (("train", 0.0), ("test", first)):
            rows = [(value, 0), *((k / 40, int(k >= 20)) for k in range(1, 40))]
            (folder / f"{name}.csv").write_text("x,label\n" + "".join(f"{x},{label}\n" for x, label in rows))
        splits.clear_cache()

    settings = {"clients": 2, "system": "standalone", "dataset": "table", "data_dir": str(folder)}
    settings |= {"model": "mlp-small", "partition": "iid", "num_server_rounds": 1}
    write(0.0)
    federate(**settings)
    more = settings | {"num_server_rounds": 2, "resume_from": str(tmp_path / "run")}
    write(0.001)
    with refuses("the clients' data", condition="when resuming", hint="digest"):
        federate(**more)
    write(0.0)
    assert federate(**more).info["status"] == "completed"


def test_a_resumed_run_is_asked_for_no_more_clients_than_it_has(federate, tmp_path):
    federate(clients=2, system="fedavg", num_server_rounds=1)
    again = {"system": "fedavg", "num_server_rounds": 2, "resume_from": str(tmp_path / "run"), "min_clients": 3}
    with refuses("min-clients", 3):
        federate(clients=3, **again)
