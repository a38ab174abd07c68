from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprune_app.core.rng import numpy_generator
from fedprune_app.core.topology import TOPOLOGIES, links, neighbours
from tests.examples import examples


@st.composite
def federations(draw):
    """Partition ids in any order, some of them active (in another order), a limit and a seed."""
    clients = draw(st.lists(st.integers(0, 500), unique=True, max_size=25))
    active = [client for client in draw(st.permutations(clients)) if draw(st.booleans())]
    return clients, active, draw(st.integers(0, 30)), draw(st.integers(0, 2**31))


def draw(topology, clients, active=None, limit=10, seed=0):
    active = clients if active is None else active
    return neighbours(topology, clients, active, limit, numpy_generator(seed, "topology"))


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(sorted(TOPOLOGIES)), federations())
def test_every_active_client_receives_from_other_active_clients_only(topology, federation):
    clients, active, limit, seed = federation
    received = draw(topology, clients, active, limit, seed)
    assert received.keys() == set(active)
    for client, senders in received.items():
        assert list(senders) == sorted(set(senders) - {client})
        assert set(senders) <= set(active)
        assert all(type(sender) is int for sender in senders)  # not numpy's: they end up in JSON


@settings(deadline=None)
@given(federations())
def test_in_the_random_topology_everybody_sends_as_often_as_it_receives(federation):
    clients, active, limit, seed = federation
    degree = min(limit, len(active) - 1)
    received, sent = links(draw("random", clients, active, limit, seed))
    assert received == sent == dict.fromkeys(active, degree)


@settings(deadline=None)
@given(federations())
def test_in_the_released_codes_topology_only_what_is_received_is_bounded(federation):
    clients, active, limit, seed = federation
    received, sent = links(draw("random-in", clients, active, limit, seed))
    assert received == dict.fromkeys(active, min(limit, len(active) - 1))
    assert sum(sent.values()) == sum(received.values())


def test_in_the_released_codes_topology_the_busiest_sender_passes_the_limit():
    _, sent = links(draw("random-in", range(100), limit=10))
    assert max(sent.values()) > 10


@pytest.mark.parametrize("topology", ["random", "random-in"])
def test_every_pair_is_linked_equally_often_over_the_rounds(topology):
    clients, rng, num_rounds = [3, 1, 4, 15, 9, 2], numpy_generator(0, "rounds"), 3000
    counts = Counter()
    for _ in range(num_rounds):
        received = neighbours(topology, clients, clients, 2, rng)
        counts.update((client, sender) for client, senders in received.items() for sender in senders)
    probability = 2 / 5
    five_sigma = 5 * (num_rounds * probability * (1 - probability)) ** 0.5
    assert len(counts) == 30
    assert all(abs(count - num_rounds * probability) < five_sigma for count in counts.values())


def test_in_the_random_topology_neither_the_places_nor_the_shifts_are_always_the_same():
    rounds = [draw("random", range(5), limit=2, seed=seed) for seed in range(50)]
    mutual = [any(0 in received[sender] for sender in received[0]) for received in rounds]
    assert 0 < sum(mutual) < 50  # two shifts of five places make mutual links only if they are s and 5 - s
    offsets = [{tuple(sorted((j - k) % 5 for j in js)) for k, js in received.items()} for received in rounds]
    assert any(len(kinds) > 1 for kinds in offsets)  # a ring of the clients' own order would have one kind


@pytest.mark.parametrize("topology", ["random", "random-in"])
def test_a_draw_depends_on_the_generator_and_not_on_the_order_of_arrival(topology):
    clients = list(range(30))
    first = draw(topology, clients, clients[:20], limit=3)
    assert first == draw(topology, clients, clients[19::-1], limit=3)
    assert first != draw(topology, clients, clients[:20], limit=3, seed=1)


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        ([7], {7: ()}),
        ([7, 2], {7: (2,), 2: (7,)}),
        ([7, 2, 5], {7: (2, 5), 2: (5, 7), 5: (2, 7)}),
        ([7, 2, 5, 1], {7: (1, 2), 2: (5, 7), 5: (1, 2), 1: (5, 7)}),
    ],
)
def test_a_ring_links_the_two_next_to_each_in_the_order_of_the_clients(clients, expected):
    assert draw("ring", clients) == expected


def test_an_inactive_client_leaves_a_gap_in_the_ring():
    assert draw("ring", [0, 1, 2, 3, 4], active=[0, 1, 3]) == {0: (1,), 1: (0,), 3: ()}


def test_the_full_topology_links_all_active_clients_whatever_the_limit():
    assert draw("full", [5, 3, 8, 1], active=[8, 5, 3], limit=1) == {5: (3, 8), 3: (5, 8), 8: (3, 5)}


@pytest.mark.parametrize(
    ("size", "of_the_last"), [(1, ()), (2, (0,)), (3, (0, 1)), (5, (0, 2, 3)), (8, (3, 5, 6)), (9, (0, 4, 6, 7))]
)
def test_the_exponential_graph_receives_from_powers_of_two_before(size, of_the_last):
    assert draw("exponential", range(size))[size - 1] == of_the_last


def test_the_exponential_graph_goes_round_in_the_order_of_the_clients():
    assert draw("exponential", [10, 30, 20, 40])[30] == (10, 40)  # one before, and two before: round the end


def test_what_cannot_be_a_topology_is_refused():
    with pytest.raises(ValueError, match="topology is 'star', allowed: random, random-in, ring, full, exponential"):
        draw("star", [1, 2])


def test_links_count_both_directions_and_name_senders_that_receive_nothing():
    assert links({1: (2, 3), 2: (3,)}) == ({1: 2, 2: 1, 3: 0}, {1: 0, 2: 1, 3: 2})
