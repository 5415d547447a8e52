"""Many prompts in batches without a server: JSONL in, JSONL out. A stopped run continues where it stopped.

    python examples/offline_batch.py prompts.jsonl answers.jsonl [-m MODEL]
    ckdist launch -n 2 python examples/offline_batch.py prompts.jsonl answers.jsonl

A line of the input is {"id": ..., "prompt": ...}. A line of the output has the id, the text and the finish reason. Ids
that are already in the output are skipped, and an incomplete last line is removed.
"""

import argparse
import json
import pathlib

from ckdist import LLM, SamplingParams

CHUNK = 32  # prompts between two writes: a stop loses at most these


def answered(output: pathlib.Path) -> set[str]:
    """Returns the ids in the output, after removing an incomplete last line."""
    data = output.read_bytes() if output.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        output.write_bytes(whole)
    return {str(json.loads(line)["id"]) for line in whole.splitlines()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("-m", "--model", help="default: the bundled model")
    parser.add_argument("-n", "--max-tokens", type=int, default=64)
    parser.add_argument("-t", "--threads", type=int, default=0, help="default: all cores")
    args = parser.parse_args()
    with LLM(args.model, threads=args.threads, parallel=CHUNK) as llm:  # only rank 0 enters the block
        done = answered(args.output)
        rows = [json.loads(line) for line in args.input.read_text().splitlines() if line.strip()]
        rest = [row for row in rows if str(row["id"]) not in done]
        print(f"{len(rows)} prompts, {len(rows) - len(rest)} done before", flush=True)
        with args.output.open("a") as out:
            for begin in range(0, len(rest), CHUNK):
                chunk = rest[begin : begin + CHUNK]
                sampling = SamplingParams(max_tokens=args.max_tokens, temperature=0)
                for row, c in zip(chunk, llm.generate([row["prompt"] for row in chunk], sampling), strict=True):
                    result = {"id": row["id"], "text": c.text, "finish_reason": c.finish_reason}
                    out.write(json.dumps(result, ensure_ascii=False) + "\n")
                out.flush()
    print(f"{len(rest)} answered in {args.output}")


if __name__ == "__main__":
    main()
