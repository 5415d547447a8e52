"""Snapshots of states: conversations of agents begin again close to where their prompts differ."""

import numpy as np

from ckdist.engine.block_pool import BlockPool
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.scheduler import Scheduler
from ckdist.engine.sequence import Sequence
from ckdist.engine.sequence_state import turn_ends
from ckdist.engine.state_pool import StatePool
from ckdist.program.step_batch import BLOCK_TOKENS

END = 1  # the token that ends a turn


class Conversations:
    """A scheduler without a model, whose answers are random tokens."""

    def __init__(self, slots: int) -> None:
        self.rng = np.random.default_rng(0)
        self.scheduler = Scheduler(BlockPool(2000, StatePool(slots)), 64, 2, 64, 8)

    def turn(self, tokens: int) -> list[int]:
        return [*self.rng.integers(2, 1000, tokens - 1).tolist(), END]

    def answer(self, prompt: list[int], tokens: int = 40) -> tuple[int, list[int]]:
        """Runs a request alone. Returns the prompt's computed tokens, and prompt and answer."""
        ends = turn_ends(np.array(prompt), {END})
        params = SamplingParams(max_tokens=tokens)
        sequence = Sequence(0, prompt, params, 0, len(prompt) + tokens, 0.0, turn_ends=ends)
        self.scheduler.add(sequence)
        while sequence.length < len(prompt) + tokens:
            step = self.scheduler.schedule()
            self.scheduler.commit(step)
            if step.chunks[0].samples:
                sequence.append(int(self.rng.integers(2, 1000)))
        self.scheduler.remove(sequence)
        return len(prompt) - sequence.cached_tokens, sequence.tokens[: sequence.length].tolist()


def test_a_second_conversation_begins_after_the_system_prompt_of_the_first():
    made = Conversations(slots=8)
    system = made.turn(300)
    first, _ = made.answer(system + made.turn(150))
    second, _ = made.answer(system + made.turn(150))
    again, _ = made.answer(system + made.turn(150))
    assert first == 450 and second == again == 150 + 300 % BLOCK_TOKENS


def test_a_prompt_whose_system_prompt_was_saved_leaves_its_own_end_too():
    made = Conversations(slots=8)
    prompt = made.turn(300) + made.turn(150)
    made.answer(prompt)
    computed, _ = made.answer(prompt)
    assert computed <= BLOCK_TOKENS


def test_a_prompt_can_go_on_without_the_beginning_of_its_answer():
    made = Conversations(slots=8)
    begin, text = [7, 8, 9, 10, 11], made.turn(200)  # the next prompt has none of the beginning
    made.answer(text + begin)
    for _ in range(16):  # the beginning crosses a block's boundary at some of these lengths
        text += made.turn(101)
        computed, _ = made.answer(text + begin)
        assert computed <= 101 + len(begin) + BLOCK_TOKENS


def test_many_turns_of_an_agent_leave_the_state_before_its_reasoning():
    made = Conversations(slots=12)
    question = made.turn(300) + made.turn(200)
    _, text = made.answer(question)
    for _ in range(8):  # calls of tools: the reasoning stays in the prompt
        computed, text = made.answer(text + made.turn(90))
        assert computed <= 90 + BLOCK_TOKENS
    computed, _ = made.answer(question + made.turn(60))  # the next question: the reasoning is dropped
    assert computed <= 60 + BLOCK_TOKENS


def test_two_conversations_in_turns_keep_their_ends_beside_an_old_one():
    made = Conversations(slots=16)
    text = made.turn(300)
    for _ in range(20):
        _, text = made.answer(text + made.turn(90))
    texts = [made.turn(200), made.turn(200)]
    for _ in range(8):
        for index in range(2):
            computed, texts[index] = made.answer(texts[index] + made.turn(90))
            assert computed <= 90 + BLOCK_TOKENS or computed == 290


def test_a_snapshot_that_goes_makes_the_next_one_worth_more():
    pool = StatePool(4)
    for blocks in (10, 12, 30):
        slot = pool.allocate()
        assert pool.keep(slot, blocks, list(range(blocks)))
    taken = [pool.allocate(), pool.allocate()]  # the second evicts block 12's, two blocks after block 10's
    assert pool.latest([10, 12, 30]) != (2, taken[1]) and pool.latest([10, 12])[0] == 1
    taken.append(pool.allocate())  # block 10's: 11 blocks against 20
    assert pool.latest([10, 12, 30])[0] == 3 and pool.latest([10, 12])[0] == 0
