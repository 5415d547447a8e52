"""The locations of a model's weights and cache on every rank, as a table for -v."""

import psutil

from ckdist.comm.host_name import machine_name
from ckdist.engine.loaded_model import Model
from ckdist.layouts.memory_sizes import gigabytes
from ckdist.topology.pages import huge_pages, is_bound, sample_pages
from ckdist.topology.tree import format_cpu_list


def placement_map(model: Model) -> str:
    """A table with one line per rank, then one line per setting that could be better. A collective call.

    Columns: host, nodes, CPUs, weights, cache, resident memory, pages, huge pages. "Pages" counts a sample of the
    pages of weights and cache: on the rank's nodes, and elsewhere, according to the kernel. "Huge pages" is their
    share in both.
    """
    p = model.plan.placement
    cpus = format_cpu_list(p.cpus) or "any"
    pages = sample_pages(model.loader.arena, model.loader.planned_bytes, p.nodes) + sample_pages(
        model.executable.kv, model.executable.kv_bytes, p.nodes, touch=True
    )
    blocks = [(model.loader.arena, model.loader.planned_bytes), (model.executable.kv, model.executable.kv_bytes)]
    huge = huge_pages(blocks)
    host = machine_name(model.world.hosts[model.world.rank])
    sizes = [model.weight_bytes, model.executable.kv_bytes, psutil.Process().memory_info().rss]
    row = [
        host,
        format_cpu_list(p.nodes),
        cpus,
        sizes,
        f"{pages!s:<22s} {huge}",
        p.note,
        pages.refused,
        is_bound(model.executable.kv),
        model.loader.filled.fraction,
    ]
    lines = [
        (
            "rank  host              node  cpus            weights    kv cache   resident   "
            "pages here / elsewhere  huge pages"
        )
    ]
    rows = model.world.gather(row)
    for rank, (host, node, cpus, sizes, pages, *_) in enumerate(rows):
        lines.append(
            f"{rank:<5d} {host:<17s} {node:<5s} {cpus:<15s} "
            + " ".join(f"{gigabytes(size):<10s}" for size in sizes)
            + f" {pages}"
        )
    notes = {f"{host}: {note}" for host, *_, note, _, _, _ in rows if note}
    notes |= {f"{host}: where pages lie is unknown ({refused})" for host, *_, refused, _, _ in rows if refused}
    notes |= {
        f"{host}: the kernel refuses to bind memory to nodes here, so pages lie where their rank first touched them"
        for host, *_, bound, _ in rows
        if not bound
    }
    if (packed := min(row[-1] for row in rows)) < 1:
        lines.append(f"{100 * packed:.0f} % of the weights are packed so far; untouched pages are not in the map")
    if not p.cpus:
        lines.append(
            f"{max(model.plan.threads, model.plan.threads_batch)} threads have fewer CPUs here, "
            "so none is pinned; fewer threads (-t), or mpirun --bind-to none, may be faster"
        )
    return "\n".join([*lines, *sorted(notes)])
