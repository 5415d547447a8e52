"""Guest program: what `ckdist doctor` says of two nodes and of RDMA, with the time that an emulated machine needs."""

from ckdist.cli.capabilities import capabilities
from ckdist.cli.doctor import capability_lines, measure, speed_lines
from ckdist.topology import this_machine

machine = this_machine()
found = capabilities(machine, timeout=150)
print("\n".join(capability_lines([one for one in found if one.group == "transport"], 160)))
assert next(one for one in found if one.name == "verbs").works
lines = speed_lines(machine, measure(seconds=200, limit=300))
print("\n".join(lines))
assert sum(line.count("node ") == 2 for line in lines) == 2, "one row for each pair of nodes"
