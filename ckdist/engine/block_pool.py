"""The blocks of the KV cache: their holders, the free ones, and those that hold a reusable prefix.

It moves no keys or values. The executable holds these, under the same block numbers.

The key of a full block is its parent and its own tokens, so the known blocks form a tree of prefixes for each tenant.
The parent of a first block is its tenant. Every other parent is named by a serial number that is never used twice. The
dictionary compares the tokens themselves, so a hash collision never gives a wrong answer. A sequence that holds a block
also holds its parents, and blocks are released last first. So a child always comes before its parent among the
unreferenced blocks, and evicting the least recently used never orphans a child.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ckdist.engine.tenant import ONE_TENANT
from ckdist.program.step_batch import BLOCK_TOKENS

if TYPE_CHECKING:
    from ckdist.engine.state_pool import StatePool

ROOT = -1  # the parent of a sequence's first block
TOKEN_BYTES = 4  # of an int32
# (consecutive blocks, the one before the first or ROOT, the tokens of each as bytes, tenant)
OnShare: TypeAlias = Callable[[list[int], int, list[bytes], bytes], None]


def state_pool(slots: int) -> "StatePool | None":
    """Returns a pool of slots for states, or None for a model without states."""
    if not slots:
        return None
    from ckdist.engine.state_pool import StatePool

    return StatePool(slots)


class BlockPool:
    """Blocks of BLOCK_TOKENS positions each, with reference counts.

    Args:
        states: Slots of a model whose layers keep states. A snapshot is dropped with its block.

    Attributes:
        on_share: Called with the blocks that become known.
    """

    def __init__(self, num_blocks: int, states: "StatePool | None" = None) -> None:
        self.num_blocks, self.states = num_blocks, states
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # without reusable content; the last is taken first
        self._idle: OrderedDict[int, None] = OrderedDict()  # shared but unreferenced, least recently used first
        self._shared: dict[tuple[int | bytes, bytes], int] = {}  # (parent's serial or the tenant, tokens) -> block
        self._keys: list[tuple[int | bytes, bytes] | None] = [None] * num_blocks
        self._serials = [0] * num_blocks  # of shared blocks
        self._lengths = [0] * num_blocks  # tokens of the sequence that released the block last
        self._next_serial = 1
        self.on_share: OnShare | None = None

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still return."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks without a holder whose prefix can be reused."""
        return len(self._idle)

    def match(self, tokens: np.ndarray, limit: int, tenant: bytes = ONE_TENANT) -> list[int]:
        """Finds the tenant's blocks that hold the longest known prefix of `tokens`, and does not hold them.

        Args:
            tokens: int32 (length,).
            limit: Most tokens of the prefix.
        """
        blocks: list[int] = []
        data, size = tokens[:limit].tobytes(), BLOCK_TOKENS * TOKEN_BYTES
        serial: int | bytes = tenant
        for begin in range(0, len(data) - size + 1, size):
            block = self._shared.get((serial, data[begin : begin + size]))
            if block is None:
                break
            blocks.append(block)
            serial = self._serials[block]
        return blocks

    def idle_among(self, blocks: list[int]) -> int:
        """Number of `blocks` without a holder. Holding them lowers `available` by this number."""
        return sum(self._references[block] == 0 for block in blocks)

    def held_alone(self, tables: list[list[int]], kept: list[int]) -> int:
        """Number of blocks that releasing all of `tables` would make available, without those in `kept`."""
        if not tables:
            return 0
        holders = Counter(block for table in tables for block in table)
        for block in kept:
            del holders[block]
        return sum(self._references[block] == count for block, count in holders.items())

    def hold(self, blocks: list[int]) -> None:
        """Adds a holder to each of these known blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Returns `count` unshared blocks. Evicts the least recently used prefixes if too few blocks are free.

        Needs `count` blocks `available`.
        """
        free, references, keys = self._free, self._references, self._keys
        blocks = free[: -count - 1 : -1] if count else []
        del free[len(free) - len(blocks) :]
        while len(blocks) < count:
            block, _ = self._idle.popitem(last=False)
            key = keys[block]
            assert key is not None  # every idle block has one
            del self._shared[key]
            keys[block] = None
            if self.states is not None:
                self.states.drop(block)
            blocks.append(block)
        for block in blocks:
            references[block] = 1
            self._lengths[block] = 0
        return blocks

    def share(self, blocks: list[int], parent: int, tokens: bytes, tenant: bytes = ONE_TENANT) -> list[int]:
        """Makes full, consecutive blocks known. If a prefix is known already, its block replaces the caller's.

        A known block gets a holder, and the caller's block is released.

        Args:
            parent: The tenant's shared block before the first, or ROOT.
            tokens: int32 token ids as bytes, BLOCK_TOKENS per block.

        Returns:
            The blocks after replacement.
        """
        shared, serials, keys, size = self._shared, self._serials, self._keys, BLOCK_TOKENS * TOKEN_BYTES
        block_tokens = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
        serial: int | bytes = tenant if parent == ROOT else serials[parent]
        found = list[int]()
        while len(found) < len(blocks) and (known := shared.get((serial, block_tokens[len(found)]))) is not None:
            self.hold([known])
            self.release([blocks[len(found)]])
            found.append(known)
            serial = serials[known]
        new = blocks[len(found) :]  # after a new block all are new
        own = range(self._next_serial, self._next_serial + len(new))
        self._next_serial += len(new)
        added = list(zip((serial, *own), block_tokens[len(found) :], strict=False))
        shared.update(zip(added, new, strict=True))
        for block, key, number in zip(new, added, own, strict=True):
            keys[block] = key
            serials[block] = number
        if self.on_share is not None and new:
            self.on_share(new, found[-1] if found else parent, block_tokens[len(found) :], tenant)
        return found + new

    def is_known(self, block: int) -> bool:
        """True if the block holds a reusable prefix."""
        return self._keys[block] is not None

    def last_length(self, block: int) -> int:
        """Tokens of the last sequence that held the block and has ended; 0 if there was none."""
        return self._lengths[block]

    def release(self, blocks: list[int], length: int = 0) -> None:
        """Removes a holder from each of `blocks`, the table of a sequence of `length` tokens in its order."""
        references, keys = self._references, self._keys
        for block in reversed(blocks):
            if length:
                self._lengths[block] = length
            left = references[block] = references[block] - 1
            assert left >= 0
            if left == 0:
                if keys[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None


def match_end(is_cached: bool, known: int, used: int, limit: int) -> str:
    """Why a match of `known` blocks ended. A sequence begins with `used` of them, at most `limit` tokens."""
    if not is_cached:
        return "not cached"
    if used < known:
        return "no state"
    return "whole prompt" if (known + 1) * BLOCK_TOKENS > limit else "new tokens"
