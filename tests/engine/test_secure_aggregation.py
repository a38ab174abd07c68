"""The protocol of secure sums, message by message: servers that lie, members that cheat, and who is harmed."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedprune_app.core.bounds import threshold_of
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.engine.secure_aggregation import (
    AGREE,
    BODY,
    INPUT,
    KEYS,
    OPEN,
    SHARES,
    STAGES,
    Identity,
    Member,
    SecureSum,
    body_of,
    packed,
)
from fedprune_app.launching.credentials import make_node_key

REQUEST = "c0" * 32
ADVERT = {"share_key": "09" * 32, "mask_key": "11" * 32, "sign_key": "33" * 32, "own_digest": "22" * 32}
ADDENDS = {k: np.array([k + 1, 2**63 + k, 0], dtype=np.uint64) for k in range(6)}


class Federation:
    """Members with folders of their own, and an honest server, whose messages a test may change on their way."""

    def __init__(self, folder: Path, size: int = 5, threshold: int = 0, identities=None) -> None:
        self.members = {
            k: Member(
                folder / f"{k}.json",
                folder / "ledgers" / f"{k}.txt",
                k,
                threshold,
                (identities or {}).get(k, Identity()),
            )
            for k in range(size)
        }
        self.threshold, self.update = threshold, ""
        self.server = self.new_sum()

    def new_sum(self) -> SecureSum:
        self.server = SecureSum("round 1", self.threshold, list(self.members))
        return self.server

    def ask(self, stage, clients, change=lambda client, body: body, reply=lambda client, body: body):
        """Take these clients through a stage; return why some were left out, by client."""
        failures = {}
        for client in clients:
            body = change(client, body_of(self.server.message(stage, client), stage))
            fields = json.loads(json.dumps(packed(stage, body)))
            try:
                if stage == INPUT:
                    words, notes = self.members[client].masked(
                        fields, ADDENDS[client].copy(), REQUEST, update=self.update
                    )
                    self.server.add(client, words)
                    if notes:
                        failures[client] = "; ".join(notes)
                else:
                    answer = body_of(self.members[client].answer(fields), stage)
                    self.server.take(stage, client, reply(client, json.loads(json.dumps(answer))))
            except ValueError as error:
                failures[client] = str(error)
        assert not any("\n" in failure for failure in failures.values())
        if stage != OPEN and len(self.server.answered) >= 3:
            self.server.close(stage, [])
        return failures

    def up_to(self, last, gone=()):
        for stage in STAGES:
            clients = [client for client in self.server.members if client not in gone]
            assert not self.ask(stage, clients)
            if stage == last:
                return


@pytest.fixture
def federation(tmp_path):
    return Federation(tmp_path)


def total_of(clients):
    return sum((ADDENDS[client] for client in clients), np.zeros(3, dtype=np.uint64)).tolist()


# --- whoever is lost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost_before", STAGES)
@pytest.mark.parametrize("lost", [(), (2,), (0, 4)])
def test_the_sum_is_that_of_the_members_whose_addends_came(federation, lost_before, lost):
    stages = [*STAGES]
    for number, stage in enumerate(stages):
        gone = lost if number >= stages.index(lost_before) else ()
        assert not federation.ask(stage, [k for k in federation.server.members if k not in gone])
    added = [k for k in range(5) if lost_before in (AGREE, OPEN) or k not in lost]
    assert federation.server.survivors == added
    assert federation.server.unmasked().tolist() == total_of(added)


def test_no_upload_is_the_addend_nor_the_same_twice(federation):
    federation.up_to(SHARES)
    message = federation.server.message(INPUT, 0)
    first, _ = federation.members[0].masked(message, ADDENDS[0].copy(), REQUEST)
    federation.new_sum()
    federation.up_to(SHARES)
    second, _ = federation.members[0].masked(federation.server.message(INPUT, 0), ADDENDS[0].copy(), REQUEST)
    assert len({*first.tolist(), *second.tolist(), *ADDENDS[0].tolist()}) == 9


def test_below_the_threshold_nothing_is_opened(federation):
    federation.up_to(AGREE, gone=(3,))
    assert federation.server.survivors == [0, 1, 2, 4]
    masked_sum = federation.server.total.copy()
    assert not federation.ask(OPEN, [0, 1])
    with pytest.raises(TooFewReplies, match="2 shares of client 0 are opened and do not give its secret"):
        federation.server.unmasked()
    assert (federation.server.total == masked_sum).all()


def test_nobody_else_reads_into_which_sums_addends_went(federation, tmp_path):
    federation.up_to(OPEN)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "ledgers").iterdir()]
    assert modes == [0o600] * 5


def test_the_secrets_of_a_sum_are_gone_once_it_is_opened(federation, tmp_path):
    federation.up_to(OPEN)
    assert json.loads((tmp_path / "0.json").read_text()).keys() == {"session", "stage"}


@pytest.mark.parametrize(("asked", "members", "threshold"), [(0, 3, 3), (0, 5, 3), (0, 6, 4), (2, 3, 2), (0, 64, 33)])
def test_a_threshold_is_more_than_half_of_the_members(asked, members, threshold):
    assert threshold_of(asked, members) == threshold


@pytest.mark.parametrize(("asked", "members"), [(2, 4), (3, 6)])
def test_a_threshold_with_which_both_shares_could_be_opened_is_refused_by_each_member(tmp_path, asked, members):
    federation = Federation(tmp_path, members, asked)
    federation.up_to(KEYS)
    failures = federation.ask(SHARES, range(members))
    line = f"secure-sums-threshold is {asked}, allowed: more than half of a sum's {members} members"
    assert failures == dict.fromkeys(range(members), line)


# --- a server that lies ---------------------------------------------------------------------------------------------


def test_a_server_that_tells_members_different_survivors_gets_no_share_of_either_kind(federation):
    """It says to some that client 0 has come, and to others that it has not: to get both its shares."""
    federation.up_to(INPUT)
    signatures = {}

    def told(client, body):
        return {"survivors": [0, 1, 2, 3, 4] if client < 3 else [1, 2, 3, 4]}

    def reply(client, body):
        signatures[client] = body["signature"]
        return body

    failures = federation.ask(AGREE, range(5), told, reply)
    assert failures == {k: f"client {k} does not agree on the members whose addends have come" for k in (3, 4)}
    failures = federation.ask(OPEN, range(5), lambda client, body: {"signatures": signatures})
    assert set(failures) == {0, 1, 2, 3, 4}
    assert all("does not agree" in line or "members that agree" in line for line in failures.values())
    assert federation.server.opened == {}
    again = federation.ask(AGREE, range(5), lambda client, body: {"survivors": [1, 2, 3, 4]})
    assert all("follows 'agree', allowed: 'input'" in line for line in again.values())
    assert set(again) == set(range(5)), "nobody signs twice"


def test_nobody_opens_with_fewer_signatures_than_the_threshold_or_forged_ones(federation):
    federation.up_to(AGREE)
    few = dict(list(federation.server.signatures.items())[:2])
    failures = federation.ask(OPEN, [0], lambda client, body: {"signatures": few})
    assert "members that agree on whose addends have come are [0, 1], allowed: 3 or more" in failures[0]
    forged = {**federation.server.signatures, 4: "00" * 64}
    failures = federation.ask(OPEN, [1], lambda client, body: {"signatures": forged})
    assert failures[1] == "client 4 does not agree on the members whose addends have come"


def test_nobody_agrees_to_a_sum_without_its_own_addend_or_of_too_few(federation):
    federation.up_to(INPUT)
    failures = federation.ask(AGREE, [0, 1], lambda client, body: {"survivors": [1, 2]})
    assert "members whose addends have come are [1, 2], allowed: 3 or more" in failures[0]
    assert "allowed: 3 or more of the sum's, client 1 among them" in failures[1]
    failures = federation.ask(AGREE, [2], lambda client, body: {"survivors": [1, 2, 3, 9]})
    assert "are [1, 2, 3, 9]" in failures[2], "a member that never was"


@pytest.mark.parametrize("same", ["addend", "message", "update"])
def test_a_sum_of_the_same_addend_message_or_update_is_not_opened_with_other_members(federation, same):
    federation.update = "5e" * 32 if same == "update" else ""  # what the addends are made of
    federation.up_to(OPEN)
    federation.new_sum()
    federation.up_to(SHARES)
    addend = ADDENDS[1] + np.uint64(same != "addend")
    fields, message = federation.server.message(INPUT, 1), REQUEST if same == "message" else "another"
    federation.members[1].masked(fields, addend.copy(), message, update=federation.update)
    others = {k: federation.members[k] for k in (0, 2, 3, 4)}
    for k, member in others.items():
        member.masked(federation.server.message(INPUT, k), ADDENDS[k] + np.uint64(5), f"{k}")
    files = [member.file for member in federation.members.values()]
    states = [file.read_bytes() for file in files]
    for survivors, is_refused in (([0, 1, 2], True), ([0, 1, 2, 3, 4], False)):
        federation.server.survivors = survivors
        assert not federation.ask(AGREE, survivors)
        failures = federation.ask(OPEN, [1], reply=lambda client, body: {"opened": {}})
        assert ("was in a sum of other members before" in failures.get(1, "")) == is_refused
        for file, state in zip(files, states, strict=True):
            file.write_bytes(state)
        federation.server.signatures, federation.server.answered = {}, []


def test_a_stage_is_not_answered_twice_or_before_its_turn(federation):
    federation.up_to(KEYS)
    assert "follows 'keys', allowed: 'agree'" in federation.ask(OPEN, [0])[0]
    assert not federation.ask(SHARES, range(5))
    assert "follows 'shares', allowed: 'keys'" in federation.ask(SHARES, [0])[0]
    assert not federation.ask(INPUT, range(5))
    with pytest.raises(ValueError, match="stage 'input' of a secure sum follows 'input', allowed: 'shares'"):
        federation.members[0].masked(federation.server.message(INPUT, 0), ADDENDS[0], REQUEST)


def swapped(client, body):
    """A server in the middle: the mask key of client 1 is the server's, which is that of client 2, too."""
    roster = {int(member): advert for member, advert in body["roster"].items()}
    return {"roster": roster | {1: {**roster[1], "mask_key": roster[2]["mask_key"]}}}


def test_a_member_whose_own_keys_were_swapped_takes_no_part(federation):
    federation.up_to(KEYS)
    failures = federation.ask(SHARES, [1], swapped)
    assert failures[1] == "the keys of client 1 are not those that it sent"


def test_two_members_with_one_key_are_refused(federation):
    federation.up_to(KEYS)
    failures = federation.ask(SHARES, [0], swapped)
    assert failures[0] == "two members have one key, allowed: each its own"


@pytest.fixture
def registered(tmp_path):
    """Five nodes with registered keys, and the file of all public ones."""
    lines = []
    for k in range(5):
        lines.append(make_node_key(tmp_path / f"node-{k}.key").read_text())
    (tmp_path / "peers").write_text("".join(line.strip() + f" node {k}\n" for k, line in enumerate(lines)))
    return {k: Identity.read(str(tmp_path / f"node-{k}.key"), str(tmp_path / "peers")) for k in range(5)}


def test_nodes_with_registered_keys_sum_with_their_peers(tmp_path, registered):
    federation = Federation(tmp_path, identities=registered)
    federation.up_to(OPEN)
    assert federation.server.unmasked().tolist() == total_of(range(5))


def test_keys_that_no_peer_signed_are_refused_by_every_node_that_lists_its_peers(tmp_path, registered):
    """An invented peer, and a server in the middle: both need a signature that they cannot make."""
    federation = Federation(tmp_path, identities={**registered, 3: Identity()})
    assert not federation.ask(KEYS, range(5))
    failures = federation.ask(SHARES, [0, 1, 2, 4])
    assert {*failures.values()} == {"client 3 is none of those that the node's operator trusts"}


def test_an_operator_whose_list_is_empty_trusts_nobody(tmp_path, registered):
    (tmp_path / "nobody").write_text("\n")
    alone = Identity.read(str(tmp_path / "node-0.key"), str(tmp_path / "nobody"))
    federation = Federation(tmp_path, identities={**registered, 0: alone})
    assert not federation.ask(KEYS, range(5))
    assert "is none of those that the node's operator trusts" in federation.ask(SHARES, [0])[0]


@pytest.mark.parametrize("has_keys", [False, True])
def test_members_that_would_add_other_noise_are_refused_before_anything_is_dealt(tmp_path, registered, has_keys):
    """A server that tells the others to add less noise would see more of one."""
    federation = Federation(tmp_path, identities=registered if has_keys else None)
    for client, member in federation.members.items():
        member.noise = "noise of 0.1" if client == 3 else "noise of 0.7"
    assert not federation.ask(KEYS, federation.members)
    failures = federation.ask(SHARES, federation.members)
    assert failures == {
        client: "client 0 adds 'noise of 0.7', allowed: 'noise of 0.1' as client 3"
        if client == 3
        else f"client 3 adds 'noise of 0.1', allowed: 'noise of 0.7' as client {client}"
        for client in range(5)
    }


def test_a_node_signs_what_it_adds(tmp_path, registered):
    federation = Federation(tmp_path, identities=registered)
    for client, member in federation.members.items():
        member.noise = "noise of 0.1" if client == 3 else "noise of 0.7"
    assert not federation.ask(KEYS, federation.members)
    federation.server.roster[3] = replace(federation.server.roster[3], noise="noise of 0.7")
    failures = federation.ask(SHARES, [0])
    assert failures == {0: "the keys of client 3 are not signed by the key that they name"}


def test_a_signature_is_for_one_sum_and_one_member(tmp_path, registered):
    """The keys of an earlier sum, whose secrets the server may know, do not come again."""
    federation = Federation(tmp_path, identities=registered)
    federation.up_to(KEYS)
    earlier = federation.server.roster[3]
    federation.new_sum()
    federation.up_to(KEYS)
    failures = federation.ask(SHARES, [0], lambda c, body: {"roster": {**body["roster"], "3": vars(earlier)}})
    assert failures[0] == "the keys of client 3 are not signed by the key that they name"


def test_a_server_finds_keys_with_a_wrong_signature(tmp_path, registered):
    federation = Federation(tmp_path, identities=registered)
    failures = federation.ask(
        KEYS, range(5), reply=lambda k, body: {**body, "own_digest": "00" * 32} if k == 2 else body
    )
    assert failures == {2: "the keys of client 2 are not signed by the key that they name"}


# --- a member that cheats -------------------------------------------------------------------------------------------


def wrong_share(client, body):
    return {"opened": body["opened"] | {"2": "11" * 33}} if client == 4 else body


def test_a_member_that_opens_a_wrong_share_is_named_and_the_others_do(federation):
    federation.up_to(SHARES)
    assert not federation.ask(INPUT, [0, 1, 3, 4])
    assert not federation.ask(AGREE, [0, 1, 3, 4])
    failures = federation.ask(OPEN, [0, 1, 3, 4], reply=wrong_share)
    assert failures == {4: "its share of client 2 is not the one that client 2 dealt"}
    assert federation.server.unmasked().tolist() == total_of([0, 1, 3, 4])


def test_a_member_whose_shares_do_not_open_is_named_by_those_that_got_them(federation):
    def broken(client, body):
        if client == 3:
            body["dealt"]["0"][0] = "00" * len(bytes.fromhex(body["dealt"]["0"][0]))
        return body

    assert not federation.ask(KEYS, range(5))
    assert not federation.ask(SHARES, range(5), reply=broken)
    notes = federation.ask(INPUT, range(5))
    assert notes == {0: "the shares of client 3 do not open, or are not those that it announced"}
    assert not federation.ask(AGREE, range(5))
    assert not federation.ask(OPEN, range(5))
    assert federation.server.unmasked().tolist() == total_of(range(5)), "four shares of client 3 are enough"


def test_shares_that_nobody_can_open_end_the_sum_with_the_name_of_their_dealer(federation):
    def garbage(client, body):
        return {"dealt": {key: ["zz", 1, None] for key in body["dealt"]}} if client == 2 else body

    assert not federation.ask(KEYS, range(5))
    assert not federation.ask(SHARES, range(5), reply=garbage)
    line = "the shares of client 2 do not open, or are not those that it announced"
    assert federation.ask(INPUT, range(5)) == dict.fromkeys(range(5), line)
    assert not federation.ask(AGREE, range(5))
    assert not federation.ask(OPEN, range(5))
    with pytest.raises(TooFewReplies, match="0 shares of client 2 are opened and do not give its secret"):
        federation.server.unmasked()


def test_shares_of_no_secret_end_the_sum_with_the_name_of_their_dealer(federation, monkeypatch):
    from fedprune_app.core import secure_sums
    from fedprune_app.engine import secure_aggregation as protocol

    honest = protocol.shares
    assert not federation.ask(KEYS, range(5))
    monkeypatch.setattr(protocol, "shares", lambda secret, *more: honest(bytes(32), *more))
    assert not federation.ask(SHARES, [1])
    monkeypatch.setattr(protocol, "shares", secure_sums.shares)
    assert not federation.ask(SHARES, [0, 2, 3, 4])
    assert not federation.ask(INPUT, range(5))
    assert not federation.ask(AGREE, range(5))
    assert not federation.ask(OPEN, range(5))
    with pytest.raises(TooFewReplies, match="round 1: 5 shares of client 1 are opened and do not give its secret"):
        federation.server.unmasked()


@pytest.mark.parametrize(
    ("stage", "body"),
    [
        (KEYS, {}),
        (KEYS, {**ADVERT, "share_key": "00" * 32}),  # with this key no secret can be agreed on
        (KEYS, {**ADVERT, "share_key": 7, "mask_key": [], "own_digest": None}),
        (KEYS, {**ADVERT, "share_key": "xy"}),
        (KEYS, {**ADVERT, "signer": "?"}),
        (SHARES, {}),
        (SHARES, {"dealt": {}}),
        (SHARES, {"dealt": {str(k): ["00", "00"] for k in range(5)}}),
        (SHARES, {"dealt": {str(k): 7 for k in range(5)}}),
        (SHARES, {"dealt": [1, 2]}),
        (AGREE, {}),
        (AGREE, {"signature": "00" * 64}),
        (AGREE, {"signature": 7}),
        (OPEN, {"opened": {"77": "00" * 33}}),
        (OPEN, {"opened": {"0": "00"}}),
        (OPEN, {"opened": 3}),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused_and_the_sum_goes_on_without(federation, stage, body):
    def cheating(client, honest):
        return body if client == 2 else honest

    for each in STAGES:
        reply = cheating if each == stage else lambda client, honest: honest
        failures = federation.ask(each, federation.server.members, reply=reply)
        assert failures.keys() == ({2} if each == stage else set())
    added = [k for k in range(5) if stage in (AGREE, OPEN) or k != 2]
    assert federation.server.unmasked().tolist() == total_of(added)


@pytest.mark.parametrize("text", ["", "[1]", "3", '"x"', "{", "[" * 10**5])
def test_a_body_that_is_no_object_is_one_line(text):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        body_of({**packed(KEYS, {}), BODY: text}, KEYS)


def test_a_server_that_sends_anything_gets_one_line(federation):
    federation.up_to(SHARES)
    for dealt in (3, {"0": []}, {"0": "ab"}):
        state = federation.members[0].file.read_bytes()
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            federation.members[0].masked(packed(INPUT, {"dealt": dealt}), ADDENDS[0].copy(), REQUEST)
        federation.members[0].file.write_bytes(state)
