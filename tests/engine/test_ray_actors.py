"""Messages of Flower's simulation are dealt to the threads that wait for actors in cohorts of equal size."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
import time
from queue import Queue
from types import SimpleNamespace

import pytest

from fedprune_app.engine import ray_actors, ray_grid
from fedprune_app.engine.ray_actors import Dealer, with_this_python


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A function that sets the patience, which is longer than a test may take until then."""

    def is_now(seconds):
        monkeypatch.setattr(ray_actors, "_PATIENCE_SECONDS", seconds)

    is_now(3600.0)
    return is_now


def share(dealer, queue, workers=2, largest=8):
    return dealer.share(queue, workers, lambda first: largest, threading.Event())


def shares_of(dealer, queue, workers=2, largest=8):
    """The shares of all workers, each of which answers its messages before anybody asks again."""
    found = []
    while not queue.empty() or dealer._waiting:
        given = [share(dealer, queue, workers, largest)]
        given += [share(dealer, queue, workers, largest) for _ in range(workers - 1) if dealer._shares]
        found.append(given)
        for _ in given:
            dealer.done()
    return found


def filled(*messages):
    queue = Queue()
    for message in messages:
        queue.put(message)
    return queue


@pytest.mark.parametrize(
    ("num_messages", "largest", "sizes"),
    [
        (1, 8, [[1]]),
        (10, 8, [[5, 5]]),
        (3, 8, [[2, 1]]),
        (20, 8, [[5, 5], [5, 5]]),
        (4, 1, [[1, 1], [1, 1]]),
        (33, 8, [[6, 6], [6, 6], [5, 4]]),
    ],
)
def test_workers_without_work_get_equal_shares_in_order(num_messages, largest, sizes):
    dealer, messages = Dealer(), list(range(num_messages))
    dealer.announce(num_messages)
    found = shares_of(dealer, filled(*messages), largest=largest)
    assert [[len(each) for each in given] for given in found] == sizes
    assert [message for given in found for each in given for message in each] == messages


def test_nobody_begins_before_all_that_is_announced_is_there():
    dealer, queue = Dealer(), Queue()
    dealer.announce(10)

    def trickle():
        for message in range(10):
            time.sleep(0.01)
            queue.put(message)

    sender = threading.Thread(target=trickle)
    sender.start()
    assert share(dealer, queue) == [0, 1, 2, 3, 4]
    sender.join()
    assert share(dealer, queue) == [5, 6, 7, 8, 9]


@pytest.mark.timeout(60)
@pytest.mark.timeout(60)
def test_a_worker_that_ends_its_work_while_another_waits_gets_an_equal_share():
    dealer, queue, given = Dealer(), filled(0), []
    dealer.announce(1)
    assert share(dealer, queue) == [0]
    waits = threading.Thread(target=lambda: given.append(share(dealer, queue)))
    waits.start()
    while not dealer._lock.locked():
        time.sleep(0.001)
    dealer.done()
    dealer.announce(10)
    for message in range(10):
        queue.put(message)
    waits.join()
    assert (given, share(dealer, queue)) == ([[0, 1, 2, 3, 4]], [5, 6, 7, 8, 9])


def test_messages_that_never_come_are_waited_for_once(patience):
    dealer = Dealer()
    dealer.announce(6)
    queue = filled("a", "b")
    patience(0.1)
    assert (share(dealer, queue), share(dealer, queue)) == (["a"], ["b"])
    patience(3600.0)
    queue.put("c")
    dealer.done()
    dealer.done()
    assert share(dealer, queue) == ["c"]


def test_a_worker_without_work_shares_what_is_left_with_those_at_work():
    dealer = Dealer()
    dealer.announce(2)
    queue = filled(0, 1)
    assert (share(dealer, queue), share(dealer, queue)) == ([0], [1])
    dealer.done()
    dealer.announce(4)
    for message in range(2, 6):
        queue.put(message)
    assert share(dealer, queue) == [2, 3]
    dealer.done()
    assert share(dealer, queue) == [4]


def test_there_is_nothing_to_do_where_nothing_comes_or_the_simulation_has_ended(patience):
    patience(0.1)
    assert share(Dealer(), Queue()) == []
    patience(3600.0)
    ended = threading.Event()
    ended.set()
    assert Dealer().share(filled(1), 2, lambda first: 8, ended) == []


def test_every_message_is_dealt_once_to_many_workers_that_ask_at_once(patience):
    patience(0.1)
    dealer, queue, ended = Dealer(), Queue(), threading.Event()
    given, lock = [], threading.Lock()

    def work():
        while not ended.is_set():
            if messages := dealer.share(queue, 8, lambda first: 4, ended):
                with lock:
                    given.extend(messages)
                dealer.done()

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for start in range(0, 400, 16):
        dealer.announce(16)
        for message in range(start, start + 16):
            queue.put(message)
    while len(given) < 400:
        time.sleep(0.01)
    ended.set()
    for worker in workers:
        worker.join()
    assert sorted(given) == list(range(400))


@pytest.mark.parametrize(
    "path", ["/tmp/my clone/bin/python", "/tmp/clone [x]/bin/python", "/tmp/it's $HOME/bin/python"]
)
def test_a_shell_finds_this_python_whatever_is_in_its_path(monkeypatch, path):
    given = {"env_vars": {"A": "b"}}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert with_this_python(given) == given
    monkeypatch.setattr(sys, "executable", path)
    quoted = with_this_python(given)
    assert shlex.split(quoted.pop("py_executable")) == [path]
    assert quoted == given
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")  # there it has another path
    assert with_this_python(None) == {}


def test_clients_whose_process_has_not_started_are_not_at_work(monkeypatch):
    """Else those in the queue would wait for them, startup-seconds more for each cohort."""
    grid = object.__new__(ray_grid.RayGrid)
    replies = iter([None, (1, "a reply")])
    grid._at_work = {replies: ray_grid._Cohort("worker", ["4", "5"], {"4": "message", "5": "message"})}
    grid._replies, grid._forgotten = {}, {"5"}
    monkeypatch.setattr(ray_grid, "ray", SimpleNamespace(get=lambda each: each))
    assert grid.begun() == {}
    grid._take(replies)
    assert grid.begun().keys() == {"4", "5"}
    grid._take(replies)
    assert grid.begun().keys() == {"4"}


@pytest.mark.timeout(120)
def test_an_engine_that_does_not_start_in_time_ends_with_a_line():
    code = "import time; from fedprune_app.engine.simulation import _in_time\nwith _in_time(0.1): time.sleep(3600)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "Ray did not start within startup-seconds = 0.1\n")
