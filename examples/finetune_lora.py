"""LoRA: teaches a model a style of answer with a small data set, and prints one answer before and after.

    python examples/finetune_lora.py                    # fetches SmolLM2-135M: minutes on two cores
    python examples/finetune_lora.py -m FOLDER_OR_GGUF --steps 100

The data is in Python's own library: the names of characters in HTML. The base weights stay unchanged. Training changes
two low-rank matrices per weight matrix, and writes them to OUTPUT/adapter in PEFT's format.
"""

import argparse
import html.entities
import json
import pathlib

import ckdist

ASKED = "eacute"  # not in the data: the model learns how to answer, not this answer


def write_chats(path: pathlib.Path) -> None:
    """Writes one chat per line. Training learns the assistant's turns."""
    with path.open("w") as file:
        for name, code in sorted(html.entities.name2codepoint.items()):
            said = [{"role": "user", "content": question(name)}, {"role": "assistant", "content": f"It is {chr(code)}"}]
            if name != ASKED:
                file.write(json.dumps({"messages": said}) + "\n")


def question(name: str) -> str:
    return f"Which character is &{name};?"


def answer(model: str, adapter: pathlib.Path | None) -> str:
    with ckdist.LLM(model, lora=adapter and str(adapter), ctx_size=256) as llm:
        ids = llm.tokenizer.chat_tokens([{"role": "user", "content": question(ASKED)}])
        return llm.generate([ids], ckdist.SamplingParams(max_tokens=24, temperature=0))[0].text.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=pathlib.Path, default="finetune_lora")
    args = parser.parse_args()
    args.output.mkdir(exist_ok=True)
    write_chats(args.output / "chats.jsonl")
    sizes = {"max_length": 64, "per_device_train_batch_size": 4, "max_steps": args.steps, "learning_rate": 2e-3}
    files = {"output_dir": str(args.output), "train_file": (str(args.output / "chats.jsonl"),), "logging_steps": 1}
    print(f"before: {answer(args.model, None)}")
    losses = []
    config = ckdist.TrainConfig(model_name_or_path=args.model, lora_r=8, **sizes, **files)
    ckdist.train(config, on_step=lambda report: losses.append(report.loss))
    print(f"loss {losses[0]:.2f} in the first step, {losses[-1]:.2f} in step {len(losses)}")
    print(f"after:  {answer(args.model, args.output / 'adapter')}")


if __name__ == "__main__":
    main()
