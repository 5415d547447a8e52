"""From a model path to a running executable on every rank: trace, lower, plan, load, bind.

Every function here is called by all ranks of a world together.
"""

import logging
import os
import pathlib
from dataclasses import dataclass

import psutil

from ckdist import __version__, native
from ckdist.comm.group import open_group
from ckdist.comm.world import agree, together
from ckdist.engine.engine import Engine
from ckdist.engine.sampler import Sampler
from ckdist.engine.work import Work, total_work, work_of
from ckdist.errors import ConfigError
from ckdist.models.decoder import forward
from ckdist.models.spec import ModelSpec
from ckdist.planner import Plan, gigabytes, layout_for, make_plan
from ckdist.program.executable import Executable
from ckdist.program.lower import Lowered, lower
from ckdist.program.tracer import trace
from ckdist.tokens.source import tokenizer_of
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.topology import bind_memory, default_threads, huge_pages, sample_pages
from ckdist.topology.tree import format_cpu_list
from ckdist.weights.checkpoint import Checkpoint, open_checkpoint
from ckdist.weights.dtypes import BY_NUMBER
from ckdist.weights.loader import ShardLoader

log = logging.getLogger(__name__)

BUNDLED = pathlib.Path(__file__).parent.parent / "models" / "bundled"


@dataclass
class Model:
    """One rank of a loaded model. `loader` owns the weights and must outlive `executable`."""

    world: object
    checkpoint: Checkpoint
    spec: ModelSpec
    plan: Plan
    loader: ShardLoader
    executable: Executable
    load_seconds: float
    weight_bytes: int  # of this rank
    total_weight_bytes: int  # of all ranks
    work: Work  # of all ranks

    def placement_map(self) -> str:
        """One line per rank: host, nodes, CPUs, weights, cache, resident memory, how many pages of a sample of weights and cache the
        kernel says lie on the rank's nodes and elsewhere, and how much of both is huge pages; then one line per thing that is less than
        it could be. A collective call.
        """
        p = self.plan.placement
        cpus = format_cpu_list(p.cpus) or "any"
        pages = sample_pages(self.loader.arena, self.weight_bytes, p.nodes) + sample_pages(self.executable.kv, self.executable.kv_bytes, p.nodes, touch=True)
        blocks = [(self.loader.arena, self.weight_bytes), (self.executable.kv, self.executable.kv_bytes)]
        huge = huge_pages(blocks)
        host = self.world.hosts[self.world.rank].split("/")[0]
        sizes = [self.weight_bytes, self.executable.kv_bytes, psutil.Process().memory_info().rss]
        row = [host, format_cpu_list(p.nodes), cpus, sizes, f"{str(pages):<22s} {huge}", p.note, pages.refused]
        lines = ["rank  host              node  cpus            weights    kv cache   resident   pages here / elsewhere  huge pages"]
        rows = self.world.gather(row)
        for rank, (host, node, cpus, sizes, pages, _, _) in enumerate(rows):
            lines.append(f"{rank:<5d} {host:<17s} {node:<5s} {cpus:<15s} " + " ".join(f"{gigabytes(size):<10s}" for size in sizes) + f" {pages}")
        notes = {f"{host}: {note}" for host, *_, note, _ in rows if note}
        notes |= {f"{host}: where pages lie is unknown ({refused})" for host, *_, refused in rows if refused}
        if not p.cpus:
            lines.append(f"{max(self.plan.threads, self.plan.threads_batch)} threads have fewer CPUs here, so none is pinned; fewer threads (-t), or mpirun --bind-to none, may be faster")
        return "\n".join([*lines, *sorted(notes)])

    def close(self) -> None:
        """Frees the executable; on rank 0 the other ranks are told to stop first."""
        if self.world.rank == 0:
            self.executable.stop()
        self.executable.close()


def load_model(config, world, progress: bool = False) -> Model:
    """This rank's part of the model at `config.model` (None: the bundled one), ready to run.

    Raises ModelFileError, ArchitectureError, CapacityError or ConfigError for what the user can mend, CommError where ranks disagree.
    """
    checkpoint = together(world, lambda: open_checkpoint(config.model or BUNDLED))
    spec = checkpoint.spec
    layout, mesh = layout_for(world)
    program = trace(forward, spec, layout, mesh)
    settings = [__version__, config.quantize or "", config.ubatch_size, config.batch_size, config.ctx_size, config.parallel, config.cache_type_k]
    agree(world, "program", program.digest())
    agree(world, "set of flags or version", repr(settings))

    loader = ShardLoader(checkpoint, loading_threads(config, world), config.quantize)
    max_tokens = min(config.ubatch_size, config.batch_size)
    lowered = lower(
        program,
        mesh,
        formats=lambda name: native.lib.ckdist_activation_format(native.ffi.NULL, loader.type_of(name)),
        block_columns=lambda name: native.lib.ckdist_type_block_elements(loader.type_of(name)),
        max_tokens=max_tokens,
    )
    matrices, vectors = plan_shard(loader, lowered)
    check_quantize(loader, lowered)
    plan = make_plan(config, spec, world, loader.planned_bytes)
    plan.placement.enter()
    bind_memory(plan.placement)
    report = loader.load(progress=progress)
    group = open_group(world, plan.spins, config.comm_timeout, config.transport)
    executable = Executable(
        lowered,
        spec,
        plan.decode,
        plan.mesh,
        group,
        [m.address for m in matrices],
        [v.address for v in vectors],
        plan.limits,
        plan.threads,
        plan.threads_batch,
        plan.placement.cpus,
        plan.spins,
    )
    log.info("%s", plan)
    total_bytes = sum(world.gather(loader.planned_bytes))
    return Model(world, checkpoint, spec, plan, loader, executable, report.seconds, loader.planned_bytes, total_bytes, total_work(world, work_of(lowered, matrices)))


def make_engine(model: Model, max_waiting: int = 512) -> tuple[Engine, Tokenizer]:
    """Rank 0's engine over a loaded model, and the model's tokenizer."""
    tokenizer = tokenizer_of(model.checkpoint.path)
    return Engine(model.executable, Sampler(model.spec.vocab_size), tokenizer.eos_token_ids, max_waiting=max_waiting), tokenizer


def loading_threads(config, world) -> int:
    """Threads that read and pack weights: those that will run, as far as there are cores for them."""
    return min(max(config.threads or 0, config.threads_batch or 0), os.cpu_count() or 1) or default_threads(world)


def check_quantize(loader: ShardLoader, lowered: Lowered) -> None:
    """ConfigError when --quantize would change no weight: they are quantised already, or no row is made of whole blocks."""
    sources = [loader.checkpoint.tensors[name] for name, _, _ in lowered.matrices]
    if loader.quantize is None or any(loader.type_of(name) != source.type for (name, _, _), source in zip(lowered.matrices, sources)):
        return
    types = ", ".join(sorted({BY_NUMBER[source.type].name for source in sources}))
    raise ConfigError(f"--quantize {loader.quantize} changes nothing in {loader.checkpoint.path}, whose matrices are {types}: it packs rows of F32, F16 or BF16 that its blocks divide; leave it out")


def plan_shard(loader: ShardLoader, lowered: Lowered):
    """Asks the loader for this rank's part of every weight of a lowered program; columns widen to whole blocks."""
    matrices = []
    for name, rows, (begin, end) in lowered.matrices:
        block = native.lib.ckdist_type_block_elements(loader.type_of(name))
        columns = (begin // block * block, -(-end // block) * block) if end > begin else (0, 0)
        matrices.append(loader.add_matrix(name, [rows], columns))
    return matrices, [loader.add_vector(name, *share) for name, share in lowered.vectors]


__all__ = ["BUNDLED", "Model", "load_model", "make_engine"]
