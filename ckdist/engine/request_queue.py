"""The waiting sequences, in queues by client and class, and the turns of the clients.

A client is an API key, or an address. Interactive sequences come before batch sequences. Within a class, the clients
with the smallest share of the places and blocks come first, and equal ones take turns by deficit round robin: a client
has its turn until the predicted seconds of its chunks exceed TURN_SECONDS. Within a client and class, sequences are in
order of priority, then of arrival.
"""

import bisect
import itertools
from collections.abc import Collection, Iterable, Iterator

from ckdist.engine.sequence import Sequence

TURN_SECONDS = 0.1  # that a client gains in each round
MOST_DEBT = 2.0  # seconds; a client that decodes much waits no longer for its next turn
LOOK_AHEAD = 16  # sequences of a client and class that are tried in a step


class Client:
    """The sequences of a client, and its seconds.

    Attributes:
        waiting: Interactive and batch sequences, each in order of priority and arrival.
        deficit: Seconds that it may still take in this round. Negative: seconds that it has taken in advance.
        number: Order of activation.
    """

    def __init__(self, number: int) -> None:
        self.waiting: tuple[list[Sequence], list[Sequence]] = ([], [])
        self.running: list[Sequence] = []
        self.deficit = 0.0
        self.number = number


class RequestQueue:
    """The queues of all clients. Iterating gives all waiting sequences, in no particular order.

    Args:
        num_places: Most running sequences.
        num_blocks: Blocks of the pool.
    """

    def __init__(self, num_places: int, num_blocks: int) -> None:
        self._num_places, self._num_blocks = num_places, num_blocks
        self._clients: dict[str, Client] = {}  # that have sequences; the one whose turn it is comes first
        self._count = 0
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for client in self._clients.values():
            for sequences in client.waiting:
                yield from sequences

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. One that has run before keeps its order of arrival."""
        if sequence.number == 0:
            sequence.number = next(self._numbers)
        bisect.insort(self._client(sequence).waiting[sequence.place.batch], sequence, key=_order)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """Removes a waiting sequence."""
        client = self._client(sequence)
        client.waiting[sequence.place.batch].remove(sequence)
        self._count -= 1
        self._drop_idle(sequence.place.client)

    def start(self, sequence: Sequence) -> None:
        """Moves a waiting sequence to the running ones of its client."""
        client = self._client(sequence)
        client.waiting[sequence.place.batch].remove(sequence)
        client.running.append(sequence)
        self._count -= 1

    def stop(self, sequence: Sequence) -> None:
        """Removes a sequence that no longer runs."""
        self._client(sequence).running.remove(sequence)
        self._drop_idle(sequence.place.client)

    def charge(self, sequences: Iterable[Sequence], seconds: Iterable[float]) -> None:
        """Counts the predicted seconds of a step's sequences. A client that has used its turn goes to the end."""
        for sequence, part in zip(sequences, seconds, strict=True):
            name = sequence.place.client
            client = self._client(sequence)
            client.deficit = max(client.deficit - part, -MOST_DEBT)
            if client.deficit <= 0:
                del self._clients[name]
                self._clients[name] = client

    def in_turn(self) -> Iterator[tuple[Sequence, bool]]:
        """Yields waiting sequences in the order in which they may run, and whether each is the first of its client."""
        for batch in (False, True):
            waiting = [client for client in self._clients.values() if client.waiting[batch]]
            turns = self._turns(waiting)
            for client in sorted(turns, key=self._share) if len(turns) > 1 else turns:
                for place, sequence in enumerate(client.waiting[batch][:LOOK_AHEAD]):
                    yield sequence, place == 0

    def order(self, prompts: list[Sequence]) -> list[Sequence]:
        """Returns running prompts in the order in which a step takes their tokens."""
        if len(prompts) < 2:
            return prompts
        clients = {sequence.place.client: self._client(sequence) for sequence in prompts}
        turns = {client: turn for turn, client in enumerate(self._turns(list(clients.values())))}

        def key(sequence: Sequence) -> tuple[bool, int, tuple[int, int]]:
            return sequence.place.batch, turns[clients[sequence.place.client]], _order(sequence)

        return sorted(prompts, key=key)

    def rank(self, running: list[Sequence]) -> None:
        """Sorts running sequences: those that keep their blocks longest come first."""
        shares = {name: (self._share(client), client.number) for name, client in self._clients.items()}
        running.sort(key=lambda s: (s.place.batch, *shares[s.place.client], *_order(s)))

    def yielding(self, sequence: Sequence, running: list[Sequence], gone: Collection[Sequence]) -> Sequence | None:
        """The running sequence that gives way to a waiting one, after those in `gone`. None: nobody does.

        Batch gives way to interactive, and a higher priority number of the same client to a lower one. A sequence of
        another client gives way if its client then still has at least the share that the waiting client would have.

        Args:
            running: In the order of `rank`.
        """
        own = self._client(sequence)
        wanted = self._share(own, plus=sequence)
        for other in reversed(running):
            if other in gone or other.place.batch < sequence.place.batch:
                continue
            client = self._client(other)
            if other.place.batch > sequence.place.batch:
                return other
            if client is own:
                if other.place.priority > sequence.place.priority:
                    return other
            elif self._share(client, minus=(*gone, other)) >= wanted:
                return other
        return None

    def _share(self, client: Client, plus: Sequence | None = None, minus: Collection[Sequence] = ()) -> float:
        """The larger of a client's parts of the places and of the blocks."""
        running = [sequence for sequence in client.running if sequence not in minus] if minus else client.running
        blocks = sum(sequence.num_blocks for sequence in running) + (plus.blocks if plus else 0)
        return max((len(running) + (plus is not None)) / self._num_places, blocks / self._num_blocks)

    def _turns(self, clients: list[Client]) -> list[Client]:
        """The clients in their turns: first those with seconds left in this round. Begins rounds if none has any."""
        if len(clients) > 1:
            best = max(client.deficit for client in clients)
            if best <= 0:
                rounds = int(-best // TURN_SECONDS) + 1
                for client in clients:
                    client.deficit = min(client.deficit + rounds * TURN_SECONDS, TURN_SECONDS)
            clients.sort(key=lambda client: client.deficit <= 0)
        return clients

    def _client(self, sequence: Sequence) -> Client:
        name = sequence.place.client
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(next(self._numbers))
        return client

    def _drop_idle(self, name: str) -> None:
        client = self._clients[name]
        if not (client.running or any(client.waiting)):
            del self._clients[name]


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.place.priority, sequence.number
