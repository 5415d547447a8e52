"""Measures what drafts cost where they gain nothing: free chat at temperature 0.8, CPU seconds of one thread.

    python benchmarks/draft_cost.py --model smollm2 --pairs 24 --tokens 160

Each round decodes the same text with drafts, without them, and without them once more as a control, in changing order.
Beside the ratios it counts two costs that noise does not hide: the seconds of the drafts' own code, and the seconds
that verified drafts saved or lost by the engine's measurements.
"""

import argparse
import os
import statistics
import time
from dataclasses import replace

# Steps are measured by CPU seconds too, since other processes disturb the clock.
time.monotonic_ns = time.process_time_ns
CHATS = (
    "Tell me about the history of the city of Rome and why people like to travel there.",
    "How do I cook a good soup with what is in the garden in autumn?",
    "Write a short story about a dog that finds a key.",
    "What should I know about buying a used car?",
)


class Stopwatch:
    """CPU seconds within some methods of an object."""

    def __init__(self, owner: object, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function):
        def timed(*args):
            begin = time.process_time_ns()
            result = function(*args)
            self.seconds += (time.process_time_ns() - begin) * 1e-9
            return result

        return timed


def decode(engine, prompt: list[int], params) -> tuple[list[int], float]:
    """Returns the tokens of an answer and the CPU seconds after its first token."""
    from ckdist.engine.tenant import ONE_TENANT

    engine.add("chat", prompt, params, ONE_TENANT)
    tokens, begin = list[int](), 0.0
    while engine.has_work:
        for output in engine.step():
            tokens += output.tokens
        begin = begin or (time.process_time() if tokens else 0.0)
    return tokens, time.process_time() - begin


def engines(model: str):
    """Returns engines with and without drafts over one loaded model, and its tokenizer."""
    from ckdist.comm.world import SingleWorld
    from ckdist.config.engine_config import EngineConfig
    from ckdist.engine.load_model import load_model
    from ckdist.engine.model_engine import make_engine
    from ckdist.hub.resolve import resolve

    world = SingleWorld()
    config = EngineConfig(
        model=resolve(model, world), ctx_size=2048, parallel=4, threads=1, pipeline_parallel_size=1, repack="off"
    )
    loaded = load_model(config, world)
    drafted, tokenizer = make_engine(loaded, config)
    plain, _ = make_engine(loaded, replace(config, spec="off"))
    return drafted, plain, tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    from ckdist.engine.sampling_params import SamplingParams

    drafted, plain, tokenizer = engines(args.model)
    for engine in drafted, plain:
        decode(engine, tokenizer.chat_tokens([{"role": "user", "content": "Hello"}]), SamplingParams(64, seed=1))
    gain, watch = drafted.drafting.gain, Stopwatch(drafted.drafting, "add", "end", "archive")
    saved, total, ratios, controls = gain.measured, 0.0, [], []
    order = [("auto", drafted), ("off", plain), ("again", plain)]
    for number in range(args.pairs):
        prompt = tokenizer.chat_tokens([{"role": "user", "content": CHATS[number % len(CHATS)]}])
        params = SamplingParams(args.tokens, temperature=args.temperature, seed=number, ignore_eos=True)
        took = {name: decode(engine, prompt, params) for name, engine in order}
        order.append(order.pop(0))
        assert took["auto"][0] == took["off"][0], "drafts changed a text"
        ratios.append(took["off"][1] / took["auto"][1])
        controls.append(took["again"][1] / took["off"][1])
        total += took["off"][1]
    for name, values in ("off / auto", ratios), ("off / off", controls):
        quarters = statistics.quantiles(values)
        print(f"{name}: median {quarters[1]:.4f}, quartiles {quarters[0]:.3f} and {quarters[2]:.3f}")
    steps = args.pairs * args.tokens
    share, each = watch.seconds / total, watch.seconds / steps * 1e6
    print(f"own code: {share:.4f} of the time without drafts, {each:.1f} us a token")
    print(f"verified drafts saved {(gain.measured - saved) / total:+.4f}; {gain.accepted} of {gain.drafted} were right")
    os._exit(0)  # the threads of two engines over one model


if __name__ == "__main__":
    main()
