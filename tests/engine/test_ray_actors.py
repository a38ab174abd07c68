"""Messages of Flower's simulation are dealt to the threads that wait for actors in cohorts of equal size."""

from __future__ import annotations

import threading
import time
from queue import Queue

import pytest

from fedprune_app.engine import ray_actors
from fedprune_app.engine.ray_actors import Dealer


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
