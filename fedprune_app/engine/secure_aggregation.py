"""Secure aggregation: members send addends under masks, and the server learns the sum of those that stay.

A sum takes five exchanges. Each member sends fresh public keys (*keys*), then for every member a share of the seed of
its own mask and one of its secret mask key, sealed for that member alone (*shares*), then its masked addend (*input*).
It signs which members' addends it is told have come (*agree*). At last it opens, for each member, one of the two shares
that it holds (*open*): that of the own mask of a member whose addend has come, or that of the mask key of one whose
addend has not. It never opens both.

A member signs and opens once, and only where at least the threshold of members is in the sum and has signed the same.
The threshold is more than half of the members. So a server cannot tell some members that an addend has come, and others
that it has not. A member writes down which members' sum its addend went into. It refuses to open a sum of the same
addend, or of the same message, with other members: the difference of two such sums is a single addend.

Members that compute their addends by other terms, or of another model, have other masks between them, which stay in the
sum. Else a server could have some send a large addend, and the others small or known ones.

Where nodes have a registered key, each signs its fresh keys, and sums with the nodes that its operator trusts alone.

Source: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", 2017, figure 4,
with its consistency check. Digests of shares, which are ours, name those who send wrong ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedprune_app.core.bounds import threshold_of
from fedprune_app.core.secure_sums import SHARE_BYTES, Words, add_masks, derived_key, recovered, shares
from fedprune_app.engine.exchange import TooFewReplies
from fedprune_app.files import append_lines, make_private_folder, replace_file

Body = dict[str, Any]
KEYS, SHARES, INPUT, AGREE, OPEN = STAGES = ("keys", "shares", "input", "agree", "open")
STAGE, BODY = "sum/stage", "sum/body"  # fields of a message
MASKED = "masked"  # the tensor of a masked addend
_NONCE = bytes(12)  # a key seals one text
_PROBE = X25519PrivateKey.from_private_bytes(b"\1" * 32)
_ECDSA = ec.ECDSA(hashes.SHA256())


def packed(stage: str, body: Body) -> dict[str, Any]:
    """Return the fields of a message or reply of the protocol."""
    return {STAGE: stage, BODY: json.dumps(body)}


def body_of(fields: Mapping[str, object], stage: str) -> Body:
    """Return what a message or reply of this stage says. Raises ``ValueError`` for another one."""
    if fields.get(STAGE) != stage:
        raise ValueError(f"field '{STAGE}' is {str(fields.get(STAGE))[:20]!r}, allowed: {stage!r}")
    with _reading():
        body = json.loads(str(fields[BODY]))
        return dict(body)


@contextmanager
def _reading() -> Iterator[None]:
    """Make one line of whatever goes wrong while the text of another party is read."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, RecursionError, UnsupportedAlgorithm) as error:
        raise ValueError(f"field '{BODY}' lacks {error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Advert:
    """The fresh public keys of a member, the digest of its own mask's seed, and who signed them."""

    share_key: str
    mask_key: str
    sign_key: str
    own_digest: str
    noise: str = ""  # what each member adds of it: all have to add alike
    signer: str = ""  # a public key, as OpenSSH writes it
    signature: str = ""

    @classmethod
    def read(cls, body: Body) -> Advert:
        """Return the advert in a body. Raises ``ValueError`` for what is none."""
        with _reading():
            advert = cls(**body)
            for key in (advert.share_key, advert.mask_key):
                _pair_key(_PROBE, key, "")  # raises ValueError for a key with which no secret can be agreed on
            return advert

    def text(self, session: str, client: int) -> bytes:
        """Return what is signed."""
        return (
            f"secure sum {session} {client} {self.share_key} {self.mask_key} {self.sign_key} {self.own_digest} "
            f"{self.noise}".encode()
        )

    def check_agreement(self, client: int, agreed: bytes, signature: str) -> None:
        """Raise ``ValueError`` unless the member signed ``agreed``."""
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.sign_key)).verify(bytes.fromhex(signature), agreed)
        except InvalidSignature:
            raise ValueError(f"client {client} does not agree on the members whose addends have come") from None

    def check(self, session: str, client: int) -> None:
        """Raise ``ValueError`` unless the signature is that of the signer, if there is one."""
        if not self.signer:
            return
        key: Any = load_ssh_public_key(self.signer.encode())
        try:
            key.verify(bytes.fromhex(self.signature), self.text(session, client), _ECDSA)
        except InvalidSignature:
            raise ValueError(f"the keys of client {client} are not signed by the key that they name") from None


@dataclass(frozen=True)
class Identity:
    """The node's registered key, if it has one, and the public keys of the nodes that it sums with."""

    key: ec.EllipticCurvePrivateKey | None = None
    trusted: frozenset[str] | None = None  # None trusts whom the server names, and an empty file nobody

    @classmethod
    def read(cls, key: str, trusted: str) -> Identity:
        """Read the files of an operator: a private key as OpenSSH writes it, and a public key on each line.

        Raises ``ValueError`` for a file that holds something else.
        """
        private: Any = load_ssh_private_key(Path(key).read_bytes(), password=None) if key else None
        if not trusted:
            return cls(private)
        lines = Path(trusted).read_text().splitlines()
        return cls(private, frozenset(" ".join(line.split()[:2]) for line in lines if line.strip()))


def _exchange_key(seed: bytes, name: str) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(derived_key(seed, name))


def _public(private: X25519PrivateKey) -> str:
    return private.public_key().public_bytes_raw().hex()


def _sign_key(seed: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(derived_key(seed, "sign key"))


def _agreed(session: str, survivors: Sequence[int]) -> bytes:
    return f"{session} {list(survivors)}".encode()


def _mask_name(session: str, terms: Mapping[str, object], model: str) -> str:
    return f"{session} mask {sorted(terms.items())} {model}"


def _pair_key(private: X25519PrivateKey, public: str, purpose: str) -> bytes:
    other = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    return derived_key(private.exchange(other), purpose)


# --- a member -----------------------------------------------------------------------------------------------------


class Member:
    """The client's half of the protocol, for one sum at a time.

    ``file`` holds the secrets of the sum at work, since each message may be answered by a fresh process. ``journal``
    says which members' sums the client's addends went into, and stays. ``noise`` says what all members have to add
    alike.
    """

    noise = ""

    def __init__(self, file: Path, journal: Path, client: int, threshold: int, identity: Identity) -> None:
        self.file, self.journal = file, journal
        self.client, self.threshold, self.identity = client, threshold, identity
        self.state: Body = {}

    def answer(self, fields: Mapping[str, object]) -> dict[str, Any]:
        """Answer a message of a stage beside the input. Raises ``ValueError`` for one that must not be answered."""
        stage = str(fields.get(STAGE))
        answers = {KEYS: self._keys, SHARES: self._shares, AGREE: self._agreed, OPEN: self._opened}
        if stage not in answers:
            raise ValueError(f"field '{STAGE}' is {stage[:20]!r}, allowed: {', '.join(STAGES)}")
        with _reading():
            return packed(stage, answers[stage](body_of(fields, stage)))

    def masked(
        self, fields: Mapping[str, object], words: Words, message: str, model: str = "", update: str = ""
    ) -> tuple[Words, list[str]]:
        """Return the addend (n,) under all masks, which overwrites ``words``, and notes on what peers did wrong.

        ``message`` is the digest of what the server asked for, and ``model`` of what all members must have received.
        ``update`` is that of which the addend is made, by default itself.
        """
        self._advance(SHARES, INPUT)
        state, roster = self.state, self._roster()
        seed, session = bytes.fromhex(state["seed"]), state["session"]
        with _reading():
            body = body_of(fields, INPUT)
            dealt = {int(dealer): part for dealer, part in body["dealt"].items()}
            name = _mask_name(session, body["terms"], model)
        self._require(dealt, roster, "members that dealt shares")
        held, notes, private = {}, [], _exchange_key(seed, "share key")
        for dealer, (sealed, *digests) in dealt.items():
            key = _pair_key(private, roster[dealer].share_key, f"{session} shares {dealer} to {self.client}")
            try:
                opened = AESGCM(key).decrypt(_NONCE, bytes.fromhex(sealed), None)
            except (InvalidTag, ValueError):
                opened = b""
            parts = [opened[:SHARE_BYTES], opened[SHARE_BYTES:]]
            if list(map(_digest, parts)) == digests:
                held[dealer] = [part.hex() for part in parts]
            else:
                notes.append(f"the shares of client {dealer} do not open, or are not those that it announced")
        state |= {"held": held, "members": sorted(dealt), "addends": [update or _digest(words.tobytes()), message]}
        subtracts = {derived_key(derived_key(seed, "own mask"), "mask"): False}
        private = _exchange_key(seed, "mask key")
        for peer in dealt.keys() - {self.client}:
            subtracts[_pair_key(private, roster[peer].mask_key, name)] = self.client > peer
        add_masks(words, subtracts)
        self._save()
        return words, notes

    def _keys(self, body: Body) -> Body:
        """Draw fresh secrets, whatever sum was at work before."""
        seed, session = os.urandom(32), str(body["session"])
        self.state = {"session": session, "stage": KEYS, "seed": seed.hex()}
        own = derived_key(seed, "own mask")
        share_key, mask_key = (_public(_exchange_key(seed, name)) for name in ("share key", "mask key"))
        sign_key = _sign_key(seed).public_key().public_bytes_raw().hex()
        advert = Advert(share_key, mask_key, sign_key, _digest(own), self.noise)
        if (key := self.identity.key) is not None:
            signer = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
            signature = key.sign(advert.text(session, self.client), _ECDSA).hex()
            advert = replace(advert, signer=signer, signature=signature)
        self.state["advert"] = vars(advert)
        self._save()
        return vars(advert)

    def _shares(self, body: Body) -> Body:
        self._advance(KEYS, SHARES)
        roster = {int(client): Advert.read(advert) for client, advert in body["roster"].items()}
        self.state["roster"] = body["roster"]
        threshold = self._require(roster, roster, "members of the sum")
        self._check(roster)
        seed, session = bytes.fromhex(self.state["seed"]), self.state["session"]
        own, mask = (shares(derived_key(seed, name), threshold, roster) for name in ("own mask", "mask key"))
        dealt, private = {}, _exchange_key(seed, "share key")
        for holder, advert in roster.items():
            key = _pair_key(private, advert.share_key, f"{session} shares {self.client} to {holder}")
            sealed = AESGCM(key).encrypt(_NONCE, own[holder] + mask[holder], None)
            dealt[holder] = [sealed.hex(), _digest(own[holder]), _digest(mask[holder])]
        self._save()
        return {"dealt": dealt}

    def _agreed(self, body: Body) -> Body:
        """Sign whose addends have come, once."""
        self._advance(INPUT, AGREE)
        survivors = sorted(int(client) for client in body["survivors"])
        self._require(survivors, self.state["members"], "members whose addends have come")
        self.state["survivors"] = survivors
        self._save()
        key = _sign_key(bytes.fromhex(self.state["seed"]))
        return {"signature": key.sign(_agreed(self.state["session"], survivors)).hex()}

    def _opened(self, body: Body) -> Body:
        """Open a share of each member, once; from then on the secrets of this sum are gone."""
        self._advance(AGREE, OPEN)
        state, roster = self.state, self._roster()
        survivors = state["survivors"]
        signatures = {int(client): signature for client, signature in body["signatures"].items()}
        self._require(signatures, survivors, "members that agree on whose addends have come")
        for client, signature in signatures.items():
            roster[client].check_agreement(client, _agreed(state["session"], survivors), signature)
        names = _digest(" ".join(sorted(roster[client].signer or str(client) for client in survivors)).encode())
        text = self.journal.read_text() if self.journal.exists() else ""
        earlier = dict(line.split() for line in text.splitlines() if " " in line)
        for addend in state["addends"]:
            if earlier.get(addend, names) != names:
                raise ValueError(
                    "the same addend, or one for the same message, was in a sum of other members before, "
                    "allowed: the same members, since the difference of two sums is a single addend"
                )
        make_private_folder(self.journal.parent)
        lines = (f"\n{addend} {names}\n" for addend in state["addends"])  # a line before may lack its end
        append_lines(self.journal, "".join(lines).encode(), 0o600)
        opened = {dealer: held[int(dealer) not in survivors] for dealer, held in state["held"].items()}
        self.state = {"session": state["session"], "stage": OPEN}
        self._save()
        return {"opened": opened}

    def _advance(self, stage: str, next_stage: str) -> None:
        """Enter a stage, which each follows one other. Raises ``ValueError`` where that is not the one before."""
        self.state = json.loads(self.file.read_text()) if self.file.exists() else {"stage": "none"}
        if (found := self.state["stage"]) != stage:
            raise ValueError(f"stage '{next_stage}' of a secure sum follows {found!r}, allowed: {stage!r}")
        self.state["stage"] = next_stage

    def _save(self) -> None:
        replace_file(self.file, json.dumps(self.state).encode(), mode=0o600, private=True)

    def _roster(self) -> dict[int, Advert]:
        """Return the adverts of the members, which were read and checked when shares were dealt."""
        return {int(client): Advert(**advert) for client, advert in self.state["roster"].items()}

    def _require(self, some: Collection[int], members: Collection[int], what: str) -> int:
        """Return the threshold. Raises ``ValueError`` unless these are as many of the members, this one among them."""
        size = len(self.state["roster"])
        threshold = threshold_of(self.threshold, size)
        if 2 * threshold <= size:  # both shares of a member could be opened
            raise ValueError(f"secure-sums-threshold is {threshold}, allowed: more than half of a sum's {size} members")
        if self.client not in some or not set(some) <= set(members) or len(some) < threshold:
            raise ValueError(
                f"the {what} are {sorted(some)[:20]}, allowed: {threshold} or more of the sum's, client "
                f"{self.client} among them"
            )
        return threshold

    def _check(self, roster: Mapping[int, Advert]) -> None:
        """Raise ``ValueError`` for a roster with a key that is not its member's, is another's, or is not listed."""
        if vars(roster[self.client]) != self.state["advert"]:
            raise ValueError(f"the keys of client {self.client} are not those that it sent")
        keys = [key for advert in roster.values() for key in (advert.share_key, advert.mask_key)]
        signers = [advert.signer for advert in roster.values() if advert.signer]
        if len({*keys}) < len(keys) or len({*signers}) < len(signers):
            raise ValueError("two members have one key, allowed: each its own")
        for client, advert in roster.items():
            if self.identity.trusted is not None and advert.signer not in self.identity.trusted:
                raise ValueError(f"client {client} is none of those that the node's operator trusts")
            if advert.noise != self.noise:
                raise ValueError(
                    f"client {client} adds {advert.noise[:80]!r}, allowed: {self.noise!r} as client {self.client}"
                )
            advert.check(self.state["session"], client)


# --- the server ---------------------------------------------------------------------------------------------------


@dataclass
class SecureSum:
    """The server's half of the protocol, for one sum; ``name`` says which, in errors."""

    name: str
    threshold: int
    members: list[int]  # those that have answered all stages so far
    terms: Mapping[str, int] = field(default_factory=dict)  # by which members compute their addends
    model: str = ""  # the digest of what they receive for it
    least: int = 0  # how many addends have to come, if that is more than the threshold
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    answered: list[int] = field(default_factory=list)  # the stage at work
    roster: dict[int, Advert] = field(default_factory=dict)
    dealt: dict[int, dict[int, list[str]]] = field(default_factory=dict)  # by dealer and holder: sealed, two digests
    survivors: list[int] = field(default_factory=list)  # the members whose addends have come
    signatures: dict[int, str] = field(default_factory=dict)  # by which they agree on that
    total: Words = field(init=False)  # of the masked addends
    opened: dict[int, dict[int, bytes]] = field(default_factory=dict)  # shares by dealer and holder

    def message(self, stage: str, client: int) -> dict[str, Any]:
        """Return the fields that a member is sent in a stage."""
        bodies: dict[str, Body] = {
            KEYS: {"session": self.session},
            SHARES: {"roster": {member: vars(advert) for member, advert in self.roster.items()}},
            INPUT: {
                "dealt": {dealer: parts[client] for dealer, parts in self.dealt.items()},
                "terms": dict(self.terms),
            },
            AGREE: {"survivors": self.survivors},
            OPEN: {"signatures": self.signatures},
        }
        return packed(stage, bodies[stage])

    def take(self, stage: str, client: int, body: Body) -> None:
        """Take in a member's answer. Raises ``ValueError`` for one that is left out."""
        with _reading():
            takes = {SHARES: self._take_shares, AGREE: self._take_agreed, OPEN: self._take_opened}
            takes.get(stage, self._take_keys)(client, body)
        self.answered.append(client)

    def _take_keys(self, client: int, body: Body) -> None:
        advert = Advert.read(body)
        advert.check(self.session, client)
        self.roster[client] = advert

    def _take_shares(self, client: int, body: Body) -> None:
        dealt = {
            int(holder): [str(sealed), str(own), str(mask)] for holder, (sealed, own, mask) in body["dealt"].items()
        }
        if dealt.keys() != self.roster.keys():
            raise ValueError("it deals shares to others than the members of the sum")
        self.dealt[client] = dealt

    def add(self, client: int, words: Words) -> None:
        """Add a member's masked addend (n,)."""
        if self.answered:
            self.total += words
        else:
            self.total = words.copy()
        self.answered.append(client)

    def _take_agreed(self, client: int, body: Body) -> None:
        signature = str(body["signature"])
        self.roster[client].check_agreement(client, _agreed(self.session, self.survivors), signature)
        self.signatures[client] = signature

    def _take_opened(self, client: int, body: Body) -> None:
        share_of = {int(dealer): bytes.fromhex(share) for dealer, share in body["opened"].items()}
        for dealer, share in share_of.items():
            if _digest(share) != self.dealt[dealer][client][1 + (dealer not in self.survivors)]:
                raise ValueError(f"its share of client {dealer} is not the one that client {dealer} dealt")
        for dealer, share in share_of.items():
            self.opened.setdefault(dealer, {})[client] = share

    def close(self, stage: str, failures: Sequence[str]) -> None:
        """End a stage. Raises :class:`TooFewReplies` where fewer members than the threshold have answered it."""
        self.threshold = threshold_of(self.threshold, len(self.roster))
        least = self.threshold if stage in (AGREE, OPEN) else max(self.threshold, self.least)
        if len(self.answered) < least:
            raise TooFewReplies(
                f"{self.name}: {len(self.answered)} clients are left after stage '{stage}' of the secure sum, "
                f"allowed: {least} or more; first failure: {failures[0] if failures else 'none'}"
            )
        self.members, self.answered = sorted(self.answered), []
        if stage == INPUT:
            self.survivors = self.members

    def unmasked(self) -> Words:
        """Return the sum of the survivors' addends. Raises :class:`TooFewReplies` where a mask cannot be removed."""
        subtracts = {}
        for dealer, advert in self.roster.items():
            if dealer not in self.dealt:
                continue
            has_come, share_of = dealer in self.survivors, self.opened.get(dealer, {})
            try:
                secret = recovered(dict(list(share_of.items())[: self.threshold]))
                if has_come:
                    fits = _digest(secret) == advert.own_digest
                else:
                    private = X25519PrivateKey.from_private_bytes(secret)
                    fits = _public(private) == advert.mask_key
            except ValueError:
                fits = False
            if not fits:
                raise TooFewReplies(
                    f"{self.name}: {len(share_of)} shares of client {dealer} are opened and do not give its secret, "
                    f"allowed: {self.threshold} or more that fit together"
                )
            if has_come:
                subtracts[derived_key(secret, "mask")] = True
                continue
            for member in self.survivors:
                key = _pair_key(private, self.roster[member].mask_key, _mask_name(self.session, self.terms, self.model))
                subtracts[key] = member < dealer
        add_masks(self.total, subtracts)
        return self.total
