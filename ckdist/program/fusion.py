"""Fusion: which neighbouring instructions one step of inference computes, by named patterns.

A pattern finds, around an instruction whose op has a step, what that step computes as well; those instructions have
none of their own. Matching looks at readers and makers alone, and says nothing of places, ranks or formats: the ops'
`lower` do, with the group that was found.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ckdist.program.program import Instr, Program, Value

SAME = ("all_reduce", "select_rows")  # ops whose result is read where their operand lies


@dataclass(frozen=True)
class Group:
    """An instruction that has a step, and by name what else that step computes."""

    instr: Instr
    parts: Mapping[str, Instr] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Instr | None:
        return self.parts.get(name)


class Graph:
    """Who makes and who reads each value of a program."""

    def __init__(self, program: Program):
        self.makers = {v.name: instr for instr in program.instrs for v in instr.outputs}
        self.all_readers: dict[str, list[Instr]] = {}
        for instr in program.instrs:
            for v in dict.fromkeys(instr.inputs):
                self.all_readers.setdefault(v.name, []).append(instr)

    def readers(self, value: Value) -> list[Instr]:
        """Who reads a value, in the program's order."""
        return self.all_readers.get(value.name, [])

    def reader(self, value: Value) -> Instr | None:
        """The first reader of a value, or None."""
        return next(iter(self.readers(value)), None)

    def maker(self, value: Value, *ops: str) -> Instr | None:
        """The instruction that makes a value, where it is of one of `ops`."""
        maker = self.makers.get(value.name)
        return maker if maker is not None and maker.op in ops else None

    def source(self, value: Value) -> Value:
        """The value that stands where `value` is read."""
        while maker := self.maker(value, *SAME):
            value = maker.inputs[0]
        return value


def scaled_embedding(graph: Graph, embed: Instr) -> dict[str, Instr]:
    """The scale behind an embedding. Only one rank's part of a row is not zero, so it may precede the sum."""
    reader = graph.reader(embed.outputs[0])
    if reader is not None and reader.op == "all_reduce":
        reader = graph.reader(reader.outputs[0])
    return {"scale": reader} if reader is not None and reader.op == "scale" else {}


def linear_with_what_follows(graph: Graph, linear: Instr) -> dict[str, Instr]:
    """A linear's low-rank addition, its gate or soft cap, and the norm of its input with the residual behind it."""
    parts = normed(graph, linear.inputs[0])
    value = linear.outputs[0]
    for reader in (r for v in linear.outputs for r in graph.readers(v) if r.op == "low_rank"):
        parts["low_rank"] = reader
        adapted = dict(zip((v.name for v in reader.inputs[1:]), reader.outputs, strict=True))
        value = adapted.get(value.name, value)
    reader = graph.reader(value)
    if reader is not None and reader.op in ("gated", "soft_cap", "activate"):
        parts[reader.op] = reader
    return parts


def output_with_its_norm(graph: Graph, output: Instr) -> dict[str, Instr]:
    """The norm of the rows that leave the program, with the residual behind it."""
    return normed(graph, output.inputs[0])


def normed(graph: Graph, value: Value) -> dict[str, Instr]:
    """`value` = factor * norm(x + post_factor * rms_norm(y)), of which any part may be absent.

    Or y * sigmoid(gate).
    """
    parts = {}
    gate = graph.maker(graph.source(value), "gated")
    if gate is not None and gate.attrs["function"] == "sigmoid":
        return {"out_gate": gate}
    scale = graph.maker(graph.source(value), "scale")
    if norm := graph.maker(graph.source(scale.inputs[0] if scale else value), "rms_norm", "layer_norm"):
        parts["norm"] = norm
        if scale:
            parts["factor"] = scale
        value = norm.inputs[0]
    return parts | residual(graph, value)


def residual(graph: Graph, value: Value) -> dict[str, Instr]:
    """`value` = x + post_factor * rms_norm(y), of which factor and norm, or all but y, may be absent."""
    parts = {}
    if add := graph.maker(graph.source(value), "add"):
        parts["add"] = add
        value = add.inputs[1]
        scale = graph.maker(graph.source(value), "scale")
        if scale is not None and graph.maker(graph.source(scale.inputs[0]), "embed") is None:  # which scales by itself
            parts["post_factor"] = scale
            value = scale.inputs[0]
        if post_norm := graph.maker(graph.source(value), "rms_norm"):
            parts["post_norm"] = post_norm
    return parts


def gathered_rows(graph: Graph, gather: Instr) -> dict[str, Instr]:
    """The residual of the rows that are gathered where tokens are sharded."""
    return residual(graph, gather.inputs[0]) if gather.inputs[0].dims[0].axis else {}


def sent_rows(graph: Graph, send: Instr) -> dict[str, Instr]:
    """The residual that a stage sends."""
    return residual(graph, send.inputs[0])


def rotated_attention(graph: Graph, attend: Instr) -> dict[str, Instr]:
    """The rotation of an attention's queries and keys, and their norms (of latent keys, of a part); either may be
    absent.
    """
    parts = {}
    for name, operand in zip(("q", "k"), attend.inputs, strict=False):
        value = operand
        if rope := graph.maker(value, "rope"):
            parts[f"{name}_rope"] = rope
            value = rope.inputs[0]
        if norm := graph.maker(value, "rms_norm", "norm_latent"):
            parts[f"{name}_norm"] = norm
    return parts


def delta_rule_with_its_parts(graph: Graph, rule: Instr) -> dict[str, Instr]:
    """The convolutions and norms of queries, keys and values, the gates, and the gated norm of what comes out."""
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
    """The norm over all heads of a token that made `value`, which may have been exchanged since."""
    if exchange := graph.maker(value, "all_to_all"):
        value = exchange.inputs[[v.name for v in exchange.outputs].index(value.name)]
    return graph.maker(value, "rms_norm_heads")


PATTERNS: dict[str, Callable[[Graph, Instr], dict[str, Instr]]] = {
    "embed": scaled_embedding,
    "linear": linear_with_what_follows,
    "output_rows": output_with_its_norm,
    "mean_rows": output_with_its_norm,
    "all_gather": gathered_rows,
    "attend": rotated_attention,
    "delta_rule": delta_rule_with_its_parts,
    "attend_latent": rotated_attention,
    "send": sent_rows,
}


def fuse(program: Program, graph: Graph) -> list[Group | None]:
    """For every instruction its group, None where it is part of another's."""
    found = [Group(i, PATTERNS[i.op](graph, i)) if i.op in PATTERNS else Group(i) for i in program.instrs]
    taken = {id(part) for group in found for part in group.parts.values()}
    return [None if id(group.instr) in taken else group for group in found]


__all__ = ["Graph", "Group", "fuse", "norm_over_heads", "normed", "residual"]
