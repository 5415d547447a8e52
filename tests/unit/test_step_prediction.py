"""A server's late steps are priced when somebody asks, and by what was in them."""

from ckdist.engine.start_up import BUNDLED
from ckdist.engine.step_builder import SequenceChunk, Step
from ckdist.engine.step_prediction import EVERY, StepPrediction
from ckdist.layout import SINGLE
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.planning.cost import CostModel, RankPlace, nominal
from ckdist.planning.step_shape import StepShape
from ckdist.program.tracer import trace
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.packed_type import WeightCost


def step(*chunks) -> Step:
    return Step([SequenceChunk(None, first, tokens, 0, 1) for first, tokens in chunks], False)


def test_the_last_step_of_each_kind_is_priced():
    program = trace(forward, open_checkpoint(BUNDLED).spec, SINGLE, Mesh())
    place = RankPlace("here", 0, 0, 2, {0: 10})
    cost = CostModel(program, Mesh(), [place], nominal("avx2"), lambda name: WeightCost(2.0, 1))
    prediction = StepPrediction(cost)
    assert prediction.stats() == {}
    prediction.note(step((0, 100)), 0.5)
    prediction.note(step((100, 1), (7, 1)), 0.25)
    found = prediction.stats()
    assert found["step_prompt_measured_seconds"] == 0.5 and found["step_decode_measured_seconds"] == 0.25
    assert found["step_prompt_predicted_seconds"] == cost.step(StepShape.prompt(100)).total
    assert found["step_decode_predicted_seconds"] > cost.step(StepShape.decode(1, 100)).total
    for _ in range(EVERY):
        prediction.note(step((200, 1)), 0.125)
    assert prediction.stats()["step_decode_measured_seconds"] == 0.125
    assert prediction.stats()["step_decode_predicted_seconds"] == cost.step(StepShape.decode(1, 200)).total
