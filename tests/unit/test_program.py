"""The program: its golden text, its meaning under any number of ranks, and what lowering makes of it."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from ckdist.errors import LayoutError
from ckdist.layout import SINGLE, TENSOR, TOKEN
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.models.training_loss import loss
from ckdist.program.lower import ServingLowering, stored_dims
from ckdist.program.step import ValueIndex
from ckdist.program.tracer import trace
from ckdist.program.training_tracer import trace_loss
from tests.support.cases import cases
from tests.support.interpreter import Interpreter
from tests.support.pairs import paired
from tests.support.paths import GOLDEN as GOLDEN_FILES
from tests.support.specs import FAMILIES, LINEAR, PIECES, spec, weights_of

GOLDEN = GOLDEN_FILES / "programs"
STEPS = ((np.arange(9), None), ([3], None), ([4, 5], [1]))  # token ids and outputs: a prompt, then more from the cache


@pytest.mark.parametrize("family, layout", [*((family, TENSOR) for family in FAMILIES), ("qwen2", TOKEN)])
def test_golden_text(family, layout):
    """What a review sees when a forward, a layout or the lowering changes.

    Delete the file and run again to make it anew.
    """
    s, mesh = spec(**FAMILIES[family]), Mesh({"tp": 2})
    program = trace(forward, s, layout, mesh)
    stored = stored_dims(program, trace(forward, s, TENSOR, mesh)) if layout is TOKEN else None
    lowered = ServingLowering(
        program, mesh, formats=lambda name: 0, block_columns=lambda name: 1, max_tokens=8, stored=stored
    ).run()
    text = f"{program}\nlowered for rank 0\n{lowered}"
    path = GOLDEN / f"{family}{'' if layout is TENSOR else '_token'}.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path.name} did not exist and was written: look at it and commit it")
    assert text == path.read_text()


@functools.cache
def alone(family):
    """The weights of a family's model, and what one rank computes of `STEPS`."""
    s = spec(**{**FAMILIES, **LINEAR}[family])
    program = trace(forward, s, SINGLE, Mesh({"tp": 1}))
    weights = weights_of(program)
    interpreter = Interpreter(program, s, Mesh({"tp": 1}), weights.get)
    return s, weights, [interpreter.run(*step) for step in STEPS]


@cases(*paired({"family": [*FAMILIES, *LINEAR], "ranks": [2, 3, 4, 7, 13], "layout": [TENSOR, TOKEN]}))
def test_any_number_of_ranks_means_the_same(family, ranks, layout):
    (s, weights, expected), mesh = alone(family), Mesh({"tp": ranks})
    many = Interpreter(trace(forward, s, layout, mesh), s, mesh, weights.get)
    for step, logits in zip(STEPS, expected, strict=True):
        np.testing.assert_allclose(many.run(*step), logits, atol=2e-6)


def test_one_rank_has_no_collectives():
    text = str(trace(forward, spec(), SINGLE, Mesh({"tp": 1})))
    assert "all_reduce" not in text and "all_gather" not in text and "partial" not in text


def test_ranks_share_one_text_and_digest():
    programs = {trace(forward, spec(), TENSOR, Mesh({"tp": 3}, rank)).digest() for rank in range(3)}
    assert len(programs) == 1


@pytest.mark.parametrize("ranks, layout", [(1, SINGLE), (2, TENSOR), (5, TENSOR), (2, TOKEN), (5, TOKEN)])
def test_buffers_that_live_together_do_not_overlap(ranks, layout):
    s = spec(**FAMILIES["gemma2"])
    for rank in range(ranks):
        mesh = Mesh({"tp": ranks}, rank)
        program = trace(forward, s, layout, mesh)
        lowered = ServingLowering(
            program,
            mesh,
            formats=lambda name: 2,
            block_columns=lambda name: 32,
            max_tokens=8,
            stored=stored_dims(program, trace(forward, s, TENSOR, mesh)) if layout is TOKEN else None,
        ).run()
        phase, life = 0, {}
        for step in lowered.steps:
            for b in step.operands(ValueIndex):
                life[b] = (life.get(b, (phase,))[0], phase)
            phase += step.kind != "norm_quantize"
        arena = [b for b in life if lowered.buffers[b].place == "arena" and lowered.buffers[b].width]
        for i, a in enumerate(arena):
            for b in arena[:i]:
                if life[a][0] <= life[b][1] and life[b][0] <= life[a][1]:
                    (begin, end), (first, last) = [
                        (o.offset, o.offset + 4 * (o.rows or 8) * o.width)
                        for o in (lowered.buffers[a], lowered.buffers[b])
                    ]
                    assert end <= first or last <= begin
        assert all(lowered.buffers[b].offset < lowered.arena_bytes for b in arena)


def test_experts_without_gates_read_one_matrix_once():
    """Also where a rank reads the shards of all ranks."""
    s, mesh = spec(**PIECES["experts"]), Mesh({"tp": 2})
    s = replace(s, layers=[replace(one, ffn=replace(one.ffn, activation="relu2", gated=False)) for one in s.layers])
    program = trace(forward, s, TOKEN, mesh)
    stored = stored_dims(program, trace(forward, s, TENSOR, mesh))
    lowered = ServingLowering(program, mesh, lambda name: 0, lambda name: 1, 8, stored).run()
    for step in (step for step in lowered.steps if step.kind == "experts"):
        assert step.fields["sets"][0]["gate"] == step.fields["sets"][0]["up"]
    assert len(lowered.matrices) == len(set(lowered.matrices))


def test_what_has_no_step_is_an_error_of_the_layout():
    """A loss is lowered by `lower_training`, and what generates has no step for it."""
    mesh = Mesh({"tp": 1})
    program = trace_loss(loss, spec(), SINGLE, mesh)
    with pytest.raises(LayoutError, match="cannot lower rope"):
        ServingLowering(program, mesh, formats=lambda name: 0, block_columns=lambda name: 1, max_tokens=8).run()
