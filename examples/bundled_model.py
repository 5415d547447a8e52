"""Trains the bundled model: a small Llama on the text of Python's own standard library, written as a Hugging Face folder.

    pip install ckdist[golden]
    python examples/bundled_model.py --out ckdist/models/bundled --state bundled_state --minutes 75 --threads 2

It makes the tokenizer and a first model at once, saves both every few minutes, and picks up from `--state` when started again,
so what lies in `--out` is a usable model at any moment. It is a recipe for one small model, not a trainer: `ckdist train` is that.
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from bundled_corpus import END, END_OF_TEXT, SPECIAL_TOKENS, Corpus, train_tokenizer
from bundled_folder import write_folder
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn


@dataclass(frozen=True)
class Shape:
    """The model in numbers; names as in `config.json`."""

    vocab_size: int = 4096
    hidden_size: int = 512
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):  # (batch, tokens, hidden)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x, cos, sin):  # x (batch, tokens, hidden); cos, sin (tokens, head_dim)
        heads = lambda y: y.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)  # (batch, heads, tokens, head_dim)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin).repeat_interleave(group, dim=1)
        o = F.scaled_dot_product_attention(q, k, v.repeat_interleave(group, dim=1), is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Parameters carry Hugging Face's names without the leading `model.`; the head is the embedding."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.num_hidden_layers) if residual else 0.02)

    def forward(self, ids):  # (batch, tokens) -> logits (batch, tokens, vocab)
        cos, sin = rotation(self.shape, ids.shape[1])
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def rotation(shape: Shape, tokens: int):
    """cos and sin of the rotary embedding (arXiv:2104.09864), each (tokens, head_dim), the two halves alike."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(tokens).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):  # x (batch, heads, tokens, head_dim)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


@dataclass
class Progress:
    """Where training stands; kept with the state so that a run can go on."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    validation_loss: float = float("nan")


class Training:
    """The optimizer, its schedule over wall time, and the state on disk."""

    def __init__(self, args, model: Llama):
        self.args, self.model, self.progress = args, model, Progress()
        hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and not n.startswith("embed_tokens")]
        rest = [p for n, p in model.named_parameters() if p.ndim == 1 or n.startswith("embed_tokens")]
        # Muon learns the hidden matrices from far fewer tokens; its steps are scaled to AdamW's, so both share one learning rate.
        self.optimizers = [
            torch.optim.Muon(hidden, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-8, fused=True),
        ]
        self.cross_entropy = torch.compile(self.eager_cross_entropy, dynamic=False) if args.compile else self.eager_cross_entropy

    def fraction(self) -> float:
        return min(1.0, self.progress.seconds / (60.0 * self.args.minutes))

    def learning_rate(self) -> float:
        """Linear warm-up over steps, then a cosine over wall time down to a twentieth."""
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * self.fraction()))
        return self.args.lr * cosine * min(1.0, (self.progress.step + 1) / self.args.warmup)

    def sequence_length(self) -> int:
        """Short sequences first; the last fifth of the time goes to the model's whole context."""
        return self.args.sequence if self.fraction() < 0.8 else self.model.shape.max_position_embeddings

    def take_step(self, windows: np.ndarray) -> None:  # (batch, tokens + 1)
        started = time.monotonic()
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self.learning_rate()
        loss = self.loss(windows)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        now, p = float(loss.detach()), self.progress
        p.loss = now if math.isnan(p.loss) else 0.98 * p.loss + 0.02 * now
        p.step, p.tokens, p.seconds = p.step + 1, p.tokens + windows[:, 1:].size, p.seconds + time.monotonic() - started

    def loss(self, windows: np.ndarray):
        ids = torch.from_numpy(windows.astype(np.int64))
        return self.cross_entropy(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    def eager_cross_entropy(self, ids, targets):  # both (batch, tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(ids)  # (batch, tokens, vocab)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def validate(self, windows: np.ndarray) -> float:
        self.progress.validation_loss = float(np.mean([float(self.loss(batch)) for batch in np.split(windows, len(windows) // 4)]))
        return self.progress.validation_loss

    def save_state(self, path: Path) -> None:
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[name] = parameter.detach()
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"{key}:{name}"] = value
        save_file(tensors, path.with_suffix(".tmp"), metadata={k: repr(v) for k, v in vars(self.progress).items()})
        path.with_suffix(".tmp").replace(path)

    def load_state(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(file.get_tensor(name))
                for optimizer in self.optimizers:
                    if any(parameter is p for p in optimizer.param_groups[0]["params"]):
                        saved = {key.removesuffix(f":{name}"): file.get_tensor(key) for key in file.keys() if key.endswith(f":{name}")}
                        optimizer.state[parameter] = saved
            for key, value in file.metadata().items():
                setattr(self.progress, key, type(getattr(self.progress, key))(value))


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    args.state.mkdir(parents=True, exist_ok=True)

    shape = Shape()
    corpus = Corpus.from_stdlib(args.seed)
    tokenizer_path = args.state / "tokenizer.json"
    if not tokenizer_path.exists():
        train_tokenizer(corpus, shape.vocab_size).save(str(tokenizer_path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    data = corpus.encode(tokenizer)
    print(f"{len(corpus.train)} documents, {corpus.characters} characters, {data.tokens_per_epoch} tokens in the first epoch", flush=True)

    training = Training(args, Llama(shape))
    state_path = args.state / "state.safetensors"
    if state_path.exists():
        training.load_state(state_path)
    progress = training.progress
    data.seek(progress.tokens)

    def save():
        training.validate(data.validation(shape.max_position_embeddings))
        print(f"step {progress.step} validation loss {progress.validation_loss:.4f}", flush=True)
        training.save_state(state_path)
        write_folder(args.out, shape, training.model, tokenizer, SPECIAL_TOKENS, (END_OF_TEXT, END), corpus, data, progress, args)

    saved = time.monotonic()
    while training.fraction() < 1.0:
        tokens = training.sequence_length()
        training.take_step(data.windows(args.batch_tokens // tokens, tokens))
        if progress.step % args.log_every == 0:
            rate = progress.tokens / progress.seconds
            print(
                f"step {progress.step} loss {progress.loss:.4f} lr {training.learning_rate():.2e} "
                f"tokens {progress.tokens} epoch {data.epoch} {rate:.0f} tokens/s {progress.seconds / 60:.1f} min",
                flush=True,
            )
        if time.monotonic() - saved > 60 * args.save_minutes:
            save()
            saved = time.monotonic()
    save()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished model")
    parser.add_argument("--state", type=Path, required=True, help="folder of the optimizer's state, from which a stopped run goes on")
    parser.add_argument("--minutes", type=float, default=75.0, help="training time; the learning rate's cosine ends there")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in one step")
    parser.add_argument("--sequence", type=int, default=512, help="sequence length of the first four fifths; 1024 after that")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps of warm-up")
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--compile", action="store_true", help="fuse with torch.compile: a third faster, needs a C++ compiler")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
