"""Train a small GPT twice from the same seed, in bf16 and in FP8, and compare.

    python examples/train_gpt.py --help

The model reads bytes and predicts the next one. It has float32 weights and runs under bf16 autocast, the usual mixed
precision; the FP8 run differs in one argument, the backend::

    torch.compile(model, backend="inductor")
    torch.compile(model, backend="fp8", options={"policy": "all", "recipe": "rowwise"})

Neither the model nor the optimizer knows about FP8: weights stay float32 parameters, and forward and backward are
rewritten by the compiler.

FP8 pays on large matmuls: on an H100 those of this model would get slower, not faster, and the default policy would
leave them in bf16. So the demo asks for ``Policy.all()``, to show what FP8 does to a loss, and says at the end what the
default policy would have done. Without an FP8 GPU the FP8 matmuls run as float32 reference arithmetic on values rounded
to FP8: right in the numbers, and slower than bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import fp8compile
from fp8compile.saved import measure_saved_bytes

VOCABULARY = 256  # one token for each value of a byte
VALIDATION_SHARE = 0.1


# --- The text -------------------------------------------------------------------------------------------------------


def load_text(path: str | Path | None = None) -> Tensor:
    """The bytes of a file, or of the help topics that every Python carries (0.7 MB), as ``uint8 [length]``."""
    if path is not None:
        data = Path(path).read_bytes()
    else:
        from pydoc_data.topics import topics

        data = "\n\n".join(topics.values()).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """The text to train on and, from its end, the text to validate on."""
    held_out = int(len(text) * VALIDATION_SHARE)
    return text[: len(text) - held_out], text[len(text) - held_out :]


def sample_batch(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text and, for every position, the byte that follows: two ``int64 [batch, context]``."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def windows_in_order(text: Tensor, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """All of the text as batches of windows that do not overlap; what does not fill a batch is left out."""
    count = (len(text) - 1) // (batch * context)
    inputs = text[: count * batch * context].long().view(count, batch, context)
    targets = text[1 : count * batch * context + 1].long().view(count, batch, context)
    return list(zip(inputs, targets, strict=True))


# --- The model: plain PyTorch, nothing about FP8 --------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder-only transformer over bytes.

    Called with tokens ``[batch, length]`` it returns logits ``[batch, length, 256]``; called with targets of the same
    shape too, the mean cross-entropy in nats per byte.
    """

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.7 / math.sqrt(width * (2 * depth if into_residual else 1)))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# --- Training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a training run leaves behind. Losses are cross-entropies in nats per byte."""

    backend: str
    losses: list[float]
    """Of the batch of every step, before the step."""
    validation_loss: float
    report: fp8compile.Report
    """What the FP8 backend decided for the training graph; empty for other backends."""
    model: GPT
    optimizer_bytes: int
    seconds: float
    """Compilation, training and validation."""


def train(
    backend: str,
    *,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    steps: int = 500,
    width: int = 128,
    depth: int = 2,
    heads: int = 4,
    context: int = 64,
    batch: int = 16,
    learning_rate: float = 2e-3,
    text: Tensor | None = None,
    device: str | None = None,
    progress: bool = False,
) -> Run:
    """Train a :class:`GPT` with ``torch.compile(model, backend=backend, options=options)``.

    Two calls with the same seed start from the same weights and see the same batches.
    """
    device = device or default_device()
    training_text, validation_text = split(load_text() if text is None else text)
    torch.manual_seed(seed)
    batches = torch.Generator().manual_seed(seed)
    model = GPT(width, depth, heads, context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_then_cosine(step, steps))

    torch._dynamo.reset()  # forget what an earlier run compiled
    compiled = torch.compile(model, backend=backend, options=options)

    started = time.perf_counter()
    losses: list[Tensor] = []
    bar = tqdm(range(steps), desc=f"{backend:>9}", unit="step", disable=not progress, file=sys.stderr)
    with fp8compile.collect_reports(measure_saved_bytes) as report:
        for step in bar:
            inputs, targets = (t.to(device) for t in sample_batch(training_text, batch, context, batches))
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = compiled(inputs, targets)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if step % 10 == 0 or step == steps - 1:
                bar.set_postfix_str(f"loss {loss.item():.3f}")

    # torch.no_grad() would have another graph compiled; this one is there, and computes the same
    held_out = []
    for inputs, targets in windows_in_order(validation_text, batch, context):
        with torch.autocast(device, dtype=torch.bfloat16):
            held_out.append(compiled(inputs.to(device), targets.to(device)).detach())
    return Run(
        backend=backend,
        losses=torch.stack(losses).tolist(),
        validation_loss=torch.stack(held_out).mean().item(),
        report=report,
        model=model,
        optimizer_bytes=state_bytes(optimizer),
        seconds=time.perf_counter() - started,
    )


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def warmup_then_cosine(step: int, steps: int) -> float:
    """The share of the peak learning rate: up over the first 5 % of the steps, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors that the optimizer keeps, each storage once."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@torch.no_grad()
def generate(model: GPT, prompt: str, length: int, seed: int, temperature: float = 0.7) -> str:
    """Continue ``prompt`` by ``length`` bytes. The weights are ordinary parameters: no compiler is needed."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor(list(prompt.encode()), device=device)
    for _ in range(length):
        logits = model(tokens[None, -model.context :])[0, -1]
        following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, following])
    return bytes(tokens.tolist()).decode(errors="replace")


# --- What came out of it --------------------------------------------------------------------------------------------


def explain_quietly(model: GPT, batch: int, policy: str, recipe: str) -> fp8compile.Report:
    """What ``policy`` would do with a training step; nothing is compiled, and ``explain``'s long table not shown."""
    device = next(model.parameters()).device
    tokens = torch.zeros(batch, model.context, dtype=torch.long, device=device)
    quiet = io.StringIO()
    autocast = torch.autocast(device.type, dtype=torch.bfloat16)
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), autocast:
        return fp8compile.explain(model, tokens, tokens, options={"policy": policy, "recipe": recipe})


def results_table(bf16: Run, fp8: Run) -> str:
    """The two runs side by side, and what the FP8 backend did."""
    difference = fp8.validation_loss / bf16.validation_loss - 1
    saved = fp8.report.saved
    rows = [
        ("", "bf16", "fp8", ""),
        ("validation loss", f"{bf16.validation_loss:.4f}", f"{fp8.validation_loss:.4f}", f"{difference:+.2%}"),
        ("training loss, last step", f"{bf16.losses[-1]:.4f}", f"{fp8.losses[-1]:.4f}", ""),
        ("matmuls in FP8", "0", f"{fp8.report.in_fp8}", f"of {len(fp8.report.rows)}"),
        *(("saved for backward", *compared(saved.high_precision, saved.fp8)) for saved in [saved] if saved),
        ("optimizer state", *compared(bf16.optimizer_bytes, fp8.optimizer_bytes)),
        ("seconds, compilation too", f"{bf16.seconds:.0f}", f"{fp8.seconds:.0f}", ""),
    ]
    return "\n".join(f"{name:<26}{left:>12}{right:>12}  {note}".rstrip() for name, left, right, note in rows)


def compared(high: int, low: int) -> tuple[str, str, str]:
    return megabytes(high), megabytes(low), f"{low / high - 1:+.0%}" if high else ""


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def decisions(report: fp8compile.Report) -> str:
    """How many matmuls go to FP8, and how many do not, by reason."""
    lines = [f"{report.in_fp8} of {len(report.rows)} matmuls in FP8"]
    lines += [f"{count} kept: {reason}" for reason, count in report.kept.items()]
    return "\n".join(f"  {line}" for line in lines)


def plot(bf16: Run, fp8: Run, path: Path) -> None:
    """Both training curves, and below them how far apart they are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for run, name, color in ((bf16, "bf16", "tab:blue"), (fp8, "FP8", "tab:orange")):
        upper.plot(run.losses, color=color, alpha=0.2, linewidth=0.8)
        style = "-" if run is bf16 else "--"
        upper.plot(smooth(run.losses), style, color=color, label=f"{name}, validation {run.validation_loss:.4f}")
    upper.set_ylabel("training loss, nats per byte")
    upper.legend()
    upper.grid(alpha=0.3)
    relative = [100 * (b / a - 1) for a, b in zip(smooth(bf16.losses), smooth(fp8.losses), strict=True)]
    lower.plot(relative, color="tab:orange")
    lower.axhline(0, color="tab:blue", linewidth=0.8)
    lower.set_ylabel("FP8 − bf16, %")
    lower.set_xlabel("step")
    lower.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def smooth(losses: list[float], decay: float = 0.9) -> list[float]:
    """An exponential moving average, corrected for its start."""
    smoothed, average = [], 0.0
    for step, loss in enumerate(losses, start=1):
        average = decay * average + (1 - decay) * loss
        smoothed.append(average / (1 - decay**step))
    return smoothed


# --- The command ----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT in bf16 and in FP8 from the same seed, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--width", type=int, default=128, help="features of the residual stream")
    parser.add_argument("--depth", type=int, default=2, help="number of transformer blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads; they divide the width")
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--batch", type=int, default=16, help="windows of text per step")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps of each run")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="AdamW's, at its peak")
    parser.add_argument("--recipe", choices=list(fp8compile.RECIPES), default="rowwise", help="how to quantize")
    parser.add_argument(
        "--policy",
        choices=["all", "default", "none"],
        default="all",
        help="which matmuls go to FP8; 'default' takes those that it makes faster on the target",
    )
    parser.add_argument(
        "--engine",
        choices=["inductor", "eager"],
        default="inductor",
        help="'eager' runs both graphs op by op: slower, but needs no C++ compiler",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and the sample")
    parser.add_argument("--text", type=Path, help="a file to train on instead of Python's help topics")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for loss.png")
    parser.add_argument("--sample", type=int, default=400, help="bytes of text to generate at the end")
    chosen = parser.parse_args(arguments)

    for name in ("width", "depth", "heads", "context", "batch", "steps", "learning_rate"):
        if not getattr(chosen, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, not {getattr(chosen, name)}")
    if chosen.sample < 0:
        parser.error(f"--sample must not be negative, but is {chosen.sample}")
    if chosen.width % chosen.heads:
        parser.error(f"--width {chosen.width} is not a multiple of --heads {chosen.heads}")
    if chosen.out.exists() and not chosen.out.is_dir():
        parser.error(f"--out {chosen.out} is a file; it takes a folder")
    try:
        chosen.data = load_text(chosen.text)
    except OSError as error:
        parser.error(f"--text {chosen.text} cannot be read: {error.strerror}")
    needed = chosen.batch * chosen.context + 1
    if len(split(chosen.data)[1]) < needed:
        parser.error(
            f"the text has {len(chosen.data):,} bytes; its last {VALIDATION_SHARE:.0%} must hold a validation batch "
            f"(--batch {chosen.batch} × --context {chosen.context} + 1 = {needed:,} bytes)"
        )
    return chosen


def main() -> None:
    chosen = parse_arguments()
    options = {"policy": chosen.policy, "recipe": chosen.recipe, "engine": chosen.engine}
    sizes = {key: getattr(chosen, key) for key in ("width", "depth", "heads", "context", "batch")}
    common: dict[str, Any] = {
        **sizes,
        "steps": chosen.steps,
        "learning_rate": chosen.learning_rate,
        "seed": chosen.seed,
        "text": chosen.data,
        "progress": True,
    }
    source = chosen.text or "Python's help topics"
    print(f"Training on {source}, {len(chosen.data):,} bytes, on {default_device()}: once in bf16, once in FP8.")
    bf16 = train("inductor" if chosen.engine == "inductor" else "aot_eager", **common)
    fp8 = train("fp8", options=options, **common)

    print(
        f"\n{sum(p.numel() for p in fp8.model.parameters()):,} parameters, {chosen.steps} steps of "
        f"{chosen.batch * chosen.context:,} bytes, losses in nats per byte, recipe {chosen.recipe}\n"
    )
    print(results_table(bf16, fp8))
    print(f"\nPolicy '{chosen.policy}', one training step:\n{decisions(fp8.report)}")
    if chosen.policy != "default":
        target = fp8compile.hardware.get_chip().name
        usual = explain_quietly(fp8.model, chosen.batch, "default", chosen.recipe)
        print(f"The default policy, for {target}:\n{decisions(usual)}")

    plot(bf16, fp8, chosen.out / "loss.png")
    print(f"\nLoss curves: {chosen.out / 'loss.png'}")
    if chosen.sample:
        text = generate(fp8.model, "The ", chosen.sample, chosen.seed)
        print(f"\nA sample of the model trained in FP8:\n\n{textwrap.indent(text, '  | ', lambda line: True)}")


if __name__ == "__main__":
    main()
