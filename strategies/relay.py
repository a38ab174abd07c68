"""A server that passes its clients' models on: it keeps the latest letter of each, and no model of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedprune_app.config import Config
from fedprune_app.core.payload import Payload
from fedprune_app.engine import wire
from fedprune_app.engine.mailbox import Mailbox
from fedprune_app.engine.rounds import Peer
from fedprune_app.engine.store import ResumePoint, State
from strategies.base import FederatedStrategy, state_rounds_of

_NOTHING = Payload({})


class Relay(FederatedStrategy):
    """Replies go to the mailbox as they came; :meth:`letter` gives them out again in the rounds that follow."""

    has_global_model = False
    reads_letters = True  # whether the server checks what it passes on

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.mailbox = self._mailbox(self.recorder.folder, self.run_key)
        self.letter_rounds: dict[int, int] = {}  # whose letter of which round may be passed on in this round
        self.letter_bytes: dict[int, int] = {}  # what those weigh in a message
        self._next_letter_bytes: dict[int, int] = {}

    def open_round(self, round: int, participants: list[int]) -> None:
        self.open_letters()

    def open_letters(self) -> None:
        """From now on the letters are those received so far; replies of a round are for the next."""
        self.letter_rounds = dict(self.state_rounds)
        self.letter_bytes = dict(self._next_letter_bytes)

    def letter(self, partition: int) -> wire.EncodedArrays:
        """The last model that this client published before this round."""
        try:
            letter = self.mailbox.get(partition, self.letter_rounds[partition])
        except ValueError as error:
            self.lose(partition, f"its letter is lost: {error}")
            raise
        letter.know(wire.letter_name(partition), self.letter_bytes[partition])
        return letter

    def letters(self, partitions: Iterable[int]) -> dict[int, wire.EncodedArrays]:
        """The letters of those clients that have one, all in memory; what is damaged on disk is noted and left out."""
        found = {}
        for partition in partitions:
            if partition in self.letter_rounds:
                try:
                    found[partition] = self.letter(partition)
                except ValueError as error:
                    self.note(partition, f"its letter is lost: {error}")
        return found

    def receive(self, peer: Peer, round: int, content: RecordDict) -> None:
        schema = self.reply_schema(peer.partition)
        letter = wire.arrays_of(content)
        if letter is None:
            raise ValueError(f"the message has no record '{wire.PAYLOAD}'")
        if self.reads_letters:
            schema.check(wire.from_arrays(letter, schema.max_bytes))
        self.mailbox.put(peer.partition, round, letter, schema.max_bytes)
        self._next_letter_bytes[peer.partition] = wire.item_bytes(wire.letter_name(peer.partition), letter)

    def accept(self, peer: Peer, update: Payload) -> None:
        """Nothing: letters are kept as they came."""

    def plan(self, round: int, participants: list[int]) -> dict[int, Payload]:
        return dict.fromkeys(participants, _NOTHING)

    def evaluation_payload(self) -> Payload:
        return _NOTHING

    @staticmethod
    def _mailbox(folder: Path, run_key: str) -> Mailbox:
        return Mailbox(folder / "mailbox", run_key=run_key)

    @classmethod
    def resume_points(
        cls, folder: Path, run_key: str, round: int, meta: Mapping[str, Any], config: Config
    ) -> Iterator[ResumePoint]:
        letters = state_rounds_of(meta)
        yield ResumePoint(round, letters, tuple(cls._mailbox(folder, run_key).lost(letters)))

    def state(self) -> State:
        letter_bytes = {str(k): size for k, size in sorted(self._next_letter_bytes.items())}
        return State({}, {**super().state().meta, "letter-bytes": letter_bytes})

    def restore(self, state: State) -> None:
        super().restore(State(self.model, state.meta))
        self._next_letter_bytes = {int(k): int(size) for k, size in state.meta["letter-bytes"].items()}
        self.mailbox.drop_after(max([0, *self.state_rounds.values()]))
