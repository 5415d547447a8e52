"""Guest program, a rank under mpirun: loads a small model and prints the placement map."""

from ckdist.comm.world import start_world
from ckdist.config import PerplexityConfig
from ckdist.engine.launch import load_model

world = start_world()
model = load_model(PerplexityConfig(model="tests/golden/llama3", threads=2, token_ids=(1, 2)), world)
text = model.placement_map()
if world.rank == 0:
    print(text, flush=True)
else:
    model.executable.work()
model.close()
world.close()
