"""Perplexity of a model in quantised types beside that of the same quantised weights in float32: what the arithmetic
alone costs.

    python benchmarks/quantisation_loss.py [-m FOLDER] [-f TEXT] [--types Q8_0,Q6_K,Q4_K]

Needs the `peers` extra: llama.cpp quantises, the gguf package dequantises into a second file with float32 weights. Both
files go through `ckdist perplexity`. Nothing of ckdist's own packing stands between the quantised and the float32
weights.
"""

import argparse
import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent


def ckdist(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "ckdist.cli.main", *arguments], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout


def quantise(source: pathlib.Path, target: pathlib.Path, kind: str) -> None:
    """All matrices in `kind`, the output matrix and the embedding too."""
    import llama_cpp as ll

    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    settings = ll.llama_model_quantize_default_params()
    settings.ftype = {
        "Q8_0": ll.LLAMA_FTYPE_MOSTLY_Q8_0,
        "Q6_K": ll.LLAMA_FTYPE_MOSTLY_Q6_K,
        "Q4_K": ll.LLAMA_FTYPE_MOSTLY_Q4_K_S,
    }[kind]
    settings.pure = True
    settings.nthread = 2
    if ll.llama_model_quantize(str(source).encode(), str(target).encode(), settings):
        sys.exit(f"llama.cpp does not quantise {source} to {kind}")


def dequantise(source: pathlib.Path, target: pathlib.Path) -> None:
    """The same file with every tensor in float32."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, quants

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(
            name, field.contents(), kind, sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "-m",
        "--model",
        default=str(ROOT / "ckdist/models/bundled"),
        help="folder with safetensors (default: the bundled model)",
    )
    parser.add_argument(
        "-f", "--file", default=argparse.__file__, help="text to score (default: a source of Python's library)"
    )
    parser.add_argument("--types", default="Q8_0,Q6_K,Q4_K")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = pathlib.Path(folder, "f32.gguf")
        ckdist("export", "--gguf", "--type", "f32", arguments.model, str(whole))

        def perplexity(model: pathlib.Path, cache: str) -> float:
            return json.loads(
                ckdist("perplexity", "-m", str(model), "-f", arguments.file, "-ctk", cache, "-ctv", cache, "--json")
            )["perplexity"]

        print(f"{whole.name}: perplexity {perplexity(whole, 'f32'):.4f}")
        print("| type | quantised, i16 cache | its weights in float32, f32 cache | difference |\n|---|---|---|---|")
        for kind in arguments.types.split(","):
            packed, plain = pathlib.Path(folder, f"{kind}.gguf"), pathlib.Path(folder, f"{kind}-f32.gguf")
            quantise(whole, packed, kind)
            dequantise(packed, plain)
            ours, exact = perplexity(packed, "i16"), perplexity(plain, "f32")
            print(f"| {kind} | {ours:.4f} | {exact:.4f} | {100 * (ours / exact - 1):+.3f} % |", flush=True)


if __name__ == "__main__":
    main()
