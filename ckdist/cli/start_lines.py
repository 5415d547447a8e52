"""Lines that `ckdist serve` prints at its start: model, ranks, memory, kernels, and the choice of prefill."""

import logging
import math

from ckdist import native
from ckdist.engine.loaded_model import Model
from ckdist.layouts.memory_sizes import cache_name, gigabytes
from ckdist.program.cache import block_bytes
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.topology import this_machine
from ckdist.weights.dtypes import BY_NUMBER

LONG_CONTEXT = 131072  # tokens for which a start states the size of the cache, if the model has such positions
KERNELS = {
    "amx": "AMX", "avx512_bf16": "AVX-512 (VNNI, BF16)", "avx512_vnni": "AVX-512 (VNNI)", "avx512": "AVX-512",
    "avx2_vnni": "AVX2 (VNNI)", "avx2": "AVX2", "neon_bf16": "NEON (I8MM, BF16)", "neon_i8mm": "NEON (I8MM)",
    "neon_dotprod": "NEON (dot product)", "neon": "NEON",
}  # fmt: skip

log = logging.getLogger(__name__)


def sequence_sizes(model: Model, block: int) -> str:
    """Sizes of a sequence's cache: of the context, and of LONG_CONTEXT tokens. Blocks have `block` bytes."""
    context = model.plan.cache.context_length
    counts = [context] + [LONG_CONTEXT] * (context < LONG_CONTEXT <= model.spec.max_position)
    sizes = (f"{gigabytes(-(-count // BLOCK_TOKENS) * block)} for a sequence of {count}" for count in counts)
    return f" ({', '.join(sizes)})" if block else ""


def start_lines(name: str, model: Model) -> tuple[list[str], list[str]]:
    """Returns three lines on rank 0, and advice on the placement of ranks, one line each. A collective call."""
    plan, world = model.plan, model.world
    quota = plan.placement.quota
    known = quota is not None or plan.placement.note == this_machine().simple  # another line has it
    note = "" if known else plan.placement.note
    unpinned = not plan.placement.cpus and quota is None
    block = block_bytes(model.executable.caches.values(), plan.cache.types)
    rows = world.gather([model.weight_bytes, model.executable.kv_bytes, plan.memory, note, unpinned, block])
    weights, cache, block = (max(row[i] for row in rows) for i in (0, 1, 5))
    advice = [note for note in dict.fromkeys(row[3] for row in rows) if note]
    if any(row[4] for row in rows):
        why = "some ranks have fewer CPUs than threads, so no thread is pinned"
        advice.append(f"{why}: use fewer threads (-t) or ranks, or mpirun --bind-to none")
    hosts = len(set(world.hosts))
    threads = f"{plan.threads} thread{'s' * (plan.threads > 1)}"
    batch = f" ({plan.threads_batch} with prompts)" if plan.threads_batch != plan.threads else ""
    batch += f" of a CPU quota of {quota:.3g} each" if quota is not None else ""
    where = f"1 rank × {threads}{batch}"
    if world.size > 1:
        transport = model.executable.communicator.transport
        stages = model.executable.stages
        divided = f" in {stages.costs.stages} stages" if stages is not None else ""
        where = f"{world.size} ranks × {threads}{batch}{divided} on {hosts} host{'s' * (hosts > 1)} ({transport})"
    isa = native.isa()
    tokens = plan.cache.num_blocks * BLOCK_TOKENS
    states = f" and {plan.cache.state_slots} states of sequences" if plan.cache.state_slots else ""
    lines = [
        f"{name}: {model.spec.family}, {parameters(model)}; {where}",
        (
            f"memory per rank: {gigabytes(weights)} of weights and {gigabytes(cache)} of "
            f"{cache_name(plan.cache.types)} cache for {tokens} tokens{sequence_sizes(model, block)}{states}, of "
            f"{gigabytes(min(row[2] for row in rows))} free"
        ),
        f"{KERNELS.get(isa, isa)} kernels"
        + (f"; prefill: {model.prefill.reason}" if world.size > 1 else "")
        + (f"; {model.decode_threads}" if model.decode_threads else ""),
    ]
    return lines, advice


def log_map(model: Model) -> None:
    """Logs on rank 0 where weights and caches are, if a rank has -v. A collective call."""
    if any(model.world.gather(log.isEnabledFor(logging.DEBUG))):
        from ckdist.engine.placement_map import placement_map

        text = placement_map(model)
        if model.world.rank == 0:
            log.debug("%s", text)


def parameter_facts(model: Model) -> tuple[int, str, int]:
    """Returns the number of parameters, the type that most have, and their bytes. Tied weights count once."""
    sources = {(source.file, source.offset): source for source in model.checkpoint.tensors.values()}.values()
    counts: dict[str, int] = {}
    for source in sources:
        kind = BY_NUMBER[source.type].name
        counts[kind] = counts.get(kind, 0) + math.prod(source.shape)
    size = sum(BY_NUMBER[source.type].row_bytes(math.prod(source.shape)) for source in sources)
    return sum(counts.values()), max(counts, key=lambda kind: counts[kind]), size


def parameters(model: Model) -> str:
    """Formats the number of parameters, and the type that most have."""
    total, most, _ = parameter_facts(model)
    return f"{total / 1e9:.2f} B parameters, {most}" if total >= 1e9 else f"{total / 1e6:.1f} M parameters, {most}"
