"""The tests of `under_mpirun`, which are the ranks' own code, on several ranks; on one rank they run by themselves.

Two ranks of mpirun have an eighth of the whole models, and two or three ranks that are threads the others: a process of
each rank takes a second to start, and twice the time for a model.
"""

import pytest

from tests.ranks.under_mpirun import test_encoder_decoders as encoder_decoders
from tests.ranks.under_mpirun import test_encoders as encoders
from tests.ranks.under_mpirun import test_golden as golden
from tests.support.launcher import run_ranks
from tests.support.taken_in_turns import on_threads
from tests.support.thread_ranks import run_threads

FOLDER = "tests/ranks/under_mpirun"
WHOLE_MODELS = tuple(f"--ignore={FOLDER}/test_{name}.py" for name in ("golden", "encoders", "encoder_decoders"))
ON_THREADS = [  # what `skip_most` leaves to them
    (check, model, ranks)
    for check, models in (
        (golden.test_every_type, golden.FILES),
        (golden.test_every_family, golden.DISTINCT),
        (encoders.test_every_encoder, encoders.ENCODERS),
        (encoders.test_every_cross_encoder, encoders.SCORERS),
        (encoder_decoders.test_golden_texts_and_logits, encoder_decoders.MODELS),
        (encoder_decoders.test_other_caches_and_preemption, encoder_decoders.CACHES),
    )
    for model, ranks in on_threads(models)
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks, without", [(2, ()), (3, WHOLE_MODELS)])
def test_the_ranks_own_code(ranks, without):
    done = run_ranks(ranks, "-m", "tests.support.mpi_pytest", FOLDER, *without, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("check, model, ranks", ON_THREADS, ids=lambda value: getattr(value, "stem", None))
def test_a_whole_model_on_ranks_that_are_threads(check, model, ranks):
    run_threads(ranks, lambda world: check(world, model))


@pytest.mark.parametrize("form", [form for form in golden.FORMS if not form.endswith("-order")])
def test_a_published_form_on_three_ranks(tmp_path, form):
    run_threads(3, lambda world: golden.test_every_published_form(world, tmp_path, form))
