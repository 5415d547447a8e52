"""Fusion: groups neighbouring instructions that one inference step computes, by named patterns.

A pattern starts at an instruction whose op has a step. It finds the neighbours that the same step computes; these get
no step of their own. Matching depends only on which instruction makes or reads a value. Buffers, ranks and formats
are chosen later, by each op's `lower`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckdist.errors import LayoutError
from ckdist.program.program import Instr, Program, Value

SAME = ("all_reduce", "select_rows")  # ops whose result is read in place of their operand, without a copy


@dataclass(frozen=True)
class Group:
    """An instruction that has a step. `parts` maps a role to another instruction that the same step computes."""

    instr: Instr
    parts: Mapping[str, Instr] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Instr | None:
        return self.parts.get(name)

    def part(self, name: str) -> Instr:
        """The instruction of a role. Raises LayoutError if the forward lacks it."""
        if name not in self.parts:
            raise LayoutError(f"cannot lower a {self.instr.op} without its {name}: {self.instr}")
        return self.parts[name]

    def before(self, value: Value, *names: str) -> Value:
        """The input of the first part in `names` that the group has; `value` if it has none."""
        return next((self.parts[name].inputs[0] for name in names if name in self.parts), value)


class Graph:
    """The maker and the readers of each value of a program."""

    def __init__(self, program: Program):
        self.makers = {v.name: instr for instr in program.instrs for v in instr.outputs}
        self.all_readers: dict[str, list[Instr]] = {}
        for instr in program.instrs:
            for v in dict.fromkeys(instr.inputs):
                self.all_readers.setdefault(v.name, []).append(instr)

    def readers(self, value: Value) -> list[Instr]:
        """The instructions that read a value, in program order."""
        return self.all_readers.get(value.name, [])

    def reader(self, value: Value) -> Instr | None:
        """The first reader of a value, or None."""
        return next(iter(self.readers(value)), None)

    def maker(self, value: Value, *ops: str) -> Instr | None:
        """The instruction that makes a value, or None if its op is not one of `ops`."""
        maker = self.makers.get(value.name)
        return maker if maker is not None and maker.op in ops else None

    def source(self, value: Value) -> Value:
        """Follows ops that need no step (`SAME`) back to the value that is in memory."""
        while maker := self.maker(value, *SAME):
            value = maker.inputs[0]
        return value


def scaled_embedding(graph: Graph, embed: Instr) -> dict[str, Instr]:
    """The scale after an embedding. It may run before the all_reduce: only one rank's part of a row is not zero."""
    reader = graph.reader(embed.outputs[0])
    if reader is not None and reader.op == "all_reduce":
        reader = graph.reader(reader.outputs[0])
    return {"scale": reader} if reader is not None and reader.op == "scale" else {}


def linear_with_what_follows(graph: Graph, linear: Instr) -> dict[str, Instr]:
    """The norm and residual that make a linear's input, its low-rank addition, and its gate, cap or activation."""
    parts = normed(graph, linear.inputs[0])
    value = linear.outputs[0]
    for reader in (r for v in linear.outputs for r in graph.readers(v) if r.op == "low_rank"):
        parts["low_rank"] = reader
        adapted = dict(zip((v.name for v in reader.inputs[1:]), reader.outputs, strict=True))
        value = adapted.get(value.name, value)
    reader = graph.reader(value)
    if reader is not None and reader.op == "gated" and len(linear.outputs) == 1:
        return parts  # `up` is made elsewhere: the step that reads the result computes it
    if reader is not None and reader.op in ("gated", "soft_cap", "activate"):
        parts[reader.op] = reader
    return parts


def output_with_its_norm(graph: Graph, output: Instr) -> dict[str, Instr]:
    """The norm and residual that make the output rows of the program, or the input of experts."""
    return normed(graph, output.inputs[0])


def normed(graph: Graph, value: Value) -> dict[str, Instr]:
    """`value` = factor * norm(scalar * (x + post_factor * rms_norm(y))), or y * f(gate). Each part is optional."""
    parts = {}
    gate = graph.maker(graph.source(value), "gated", "gated_heads")
    made = gate and [graph.maker(graph.source(operand), "layer_inputs", "recv", "cut_rows") for operand in gate.inputs]
    if gate and made and (any(made) or gate.attrs["function"] in ("sigmoid", "softplus")):
        return {"out_gate": gate}
    scale = graph.maker(graph.source(value), "scale")
    if norm := graph.maker(graph.source(scale.inputs[0] if scale else value), "rms_norm", "layer_norm"):
        parts["norm"] = norm
        if scale:
            parts["factor"] = scale
        value = norm.inputs[0]
    return parts | residual(graph, value)


def residual(graph: Graph, value: Value) -> dict[str, Instr]:
    """`value` = scalar * (x + post_factor * rms_norm(y)). The factors and the norm are optional; without an add it is y
    alone.
    """
    parts = {}
    if by := graph.maker(graph.source(value), "scale_by"):
        parts["scalar"] = by
        value = by.inputs[0]
    if add := graph.maker(graph.source(value), "add"):
        parts["add"] = add
        value = add.inputs[1]
        scale = graph.maker(graph.source(value), "scale")
        # the scale of an embedding belongs to the step of the embedding
        if scale is not None and graph.maker(graph.source(scale.inputs[0]), "embed") is None:
            parts["post_factor"] = scale
            value = scale.inputs[0]
        if post_norm := graph.maker(graph.source(value), "rms_norm"):
            parts["post_norm"] = post_norm
    return parts


def gathered_rows(graph: Graph, gather: Instr) -> dict[str, Instr]:
    """The residual that makes the gathered rows, if tokens are sharded."""
    return residual(graph, gather.inputs[0]) if gather.inputs[0].dims[0].axis else {}


def rotated_attention(
    graph: Graph, attend: Instr, norms: tuple[str, ...] = ("rms_norm", "norm_latent", "l2_norm")
) -> dict[str, Instr]:
    """The norms and rotations of an attention's queries and keys, in any order, then the scale of queries.

    Each is optional. Latent keys are normed in part.
    """
    parts = {}
    for name, operand in zip(("q", "k"), attend.inputs, strict=False):
        value = operand
        for part, ops in (("scale", ("scale_queries",)), ("norm", norms), ("rope", ("rope",)), ("norm", norms)):
            if f"{name}_{part}" not in parts and (made := graph.maker(value, *ops)):
                parts[f"{name}_{part}"] = made
                value = made.inputs[0]
    if len(attend.inputs) > 2 and (made := graph.maker(attend.inputs[2], "l2_norm")):
        parts["v_norm"] = made
    return parts


def normed_windows(graph: Graph, select: Instr) -> dict[str, Instr]:
    """The layer norm of the keys that make entries, and the norm of queries."""
    found = ("q_norm", select.inputs[0], "rms_norm"), ("key_norm", select.inputs[-2], "layer_norm")
    return {name: norm for name, value, op in found if (norm := graph.maker(value, op))}


def delta_rule_with_its_parts(graph: Graph, rule: Instr) -> dict[str, Instr]:
    """The short convolution, the norms of queries and keys, the gates, and the gated norm of the output."""
    parts = {}
    for name, operand in zip(("q_norm", "k_norm"), rule.inputs, strict=False):
        if norm := graph.maker(operand, "l2_norm"):
            parts[name] = norm
            if conv := graph.maker(norm.inputs[0], "short_conv"):
                parts["conv"] = conv
    if gates := graph.maker(rule.inputs[3], "delta_gates"):
        parts["gates"] = gates
    reader = graph.reader(rule.outputs[0])
    if reader is not None and reader.op == "gated_norm":
        parts["norm"] = reader
    return parts


def norm_over_heads(graph: Graph, value: Value) -> Instr | None:
    """The rms_norm_heads that made `value`, directly or before an all_to_all."""
    if exchange := graph.maker(value, "all_to_all"):
        value = exchange.inputs[[v.name for v in exchange.outputs].index(value.name)]
    return graph.maker(value, "rms_norm_heads")


PATTERNS: dict[str, Callable[[Graph, Instr], dict[str, Instr]]] = {
    "embed": scaled_embedding,
    "linear": linear_with_what_follows,
    "experts": output_with_its_norm,
    "output_rows": output_with_its_norm,
    "mean_rows": output_with_its_norm,
    "all_gather": gathered_rows,
    "attend": rotated_attention,
    "delta_rule": delta_rule_with_its_parts,
    "attend_latent": rotated_attention,
    "select_blocks": rotated_attention,
    "select_entries": normed_windows,
    "select_positions": lambda graph, select: rotated_attention(graph, select, ("layer_norm",)),
    "send": lambda graph, send: residual(graph, send.inputs[0]),
}


def fuse(program: Program, graph: Graph) -> list[Group | None]:
    """Returns the group of each instruction, or None if it is part of another's group."""
    found = [Group(i, PATTERNS[i.op](graph, i)) if i.op in PATTERNS else Group(i) for i in program.instrs]
    taken = {id(part) for group in found for part in group.parts.values()}
    return [None if id(group.instr) in taken else group for group in found]
