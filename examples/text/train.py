"""Train a small GPT on Python's documentation, on any number of ranks.

    torchrun --nproc-per-node 2 examples/text/train.py

131 tokens and 5 heads are sharded over ranks whose number need not divide them. At the end, the
model writes some text. --check compares the training with one process.
"""

import argparse
import copy
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import corpus
import torch
from picture import draw

import varcomm as vc
from varcomm.models import GPT
from varcomm.tensor_parallel import parallelize, shard_spec

sys.path.append(str(Path(__file__).parents[1]))

from common import (
    Cost,
    Parser,
    Record,
    differences,
    is_first,
    one_answer,
    positive,
    say,
    training,
)

HELD_OUT = 20_000  # tokens at the end of the text


def new_model(options: argparse.Namespace, tokens: int) -> GPT:
    """Return a model with equal weights on all ranks, which draw them from one seed."""
    torch.manual_seed(options.seed)
    hidden = options.heads * options.head_size
    return GPT(tokens, hidden, num_layers=options.layers, num_heads=options.heads)


def over_ranks(model: GPT, options: argparse.Namespace) -> GPT:
    """Shard a model."""
    sequence_sizes = None
    if options.sequence_parallel:
        sequence_sizes = vc.ShardSizes.balanced(options.length, vc.init().size)
    return parallelize(model, model.tensor_parallel_plan(sequence_sizes))


def pieces(ids: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Return sequences of the text, (length, batch), and the next token at each place."""
    places = torch.arange(length + 1)[:, None] + starts
    return ids[places[:-1]], ids[places[1:]]


def fit(model: GPT, ids: torch.Tensor, options: argparse.Namespace, steps: int) -> Iterator[float]:
    """Train on sequences that are equal on all ranks; yield the loss of each step."""
    draws = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1.0) * (1 - step / steps)
    )
    for _ in range(steps):
        starts = torch.randint(len(ids) - options.length, (options.batch,), generator=draws)
        optimizer.zero_grad()
        loss = model.loss(*pieces(ids, starts, options.length))
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()


@torch.no_grad()
def held_out_loss(model: GPT, ids: torch.Tensor, length: int) -> float:
    """Return the loss on held-out text, in nats per token."""
    starts = torch.arange(0, len(ids) - length, length)
    parts = starts.split(16)
    losses = [model.loss(*pieces(ids, part, length)).item() * len(part) for part in parts]
    return sum(losses) / len(starts)


def by_frequency(ids: torch.Tensor, held_out: torch.Tensor, tokens: int) -> float:
    """Return the loss of a guess by the frequency of tokens."""
    shares = (torch.bincount(ids, minlength=tokens) + 1.0) / (len(ids) + tokens)
    return -shares.log()[held_out].mean().item()


def record(model: GPT, losses: Iterator[float]) -> Record:
    """Run a training; return its losses, and the full gradients of its first step."""
    first, gradients = next(losses), []
    for parameter in model.parameters():
        spec = shard_spec(parameter)
        gradients.append(parameter.grad.clone() if spec is None else spec.gather(parameter.grad))
    return [first, *losses], gradients


def compare(model: GPT, ids: torch.Tensor, options: argparse.Namespace) -> tuple[float, float]:
    """Return the differences of some steps on ranks from one process."""

    def on_ranks() -> Record:
        together = over_ranks(copy.deepcopy(model), options)
        return record(together, fit(together, ids, options, options.check))

    def alone() -> Record:
        single = copy.deepcopy(model)
        return record(single, fit(single, ids, options, options.check))

    return differences(on_ranks, alone)


def even(text: str) -> int:
    if not text.isdecimal() or int(text) == 0 or int(text) % 2:
        raise argparse.ArgumentTypeError(f"need an even number from 2 on, got {text!r}")
    return int(text)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    smoke = {"steps": 8, "layers": 1, "head_size": 8, "length": 32, "sample": 40}
    parser = Parser(__doc__, smoke)
    parser.add_whole("--steps", 500, "training steps")
    parser.add_whole("--layers", 3, "layers of the model")
    parser.add_whole("--heads", 5, "attention heads per layer")
    parser.add_argument(
        "--head-size", default=32, type=even, metavar="N", help="features of a head (%(default)s)"
    )
    parser.add_whole("--length", 128, "tokens per sequence")
    parser.add_whole("--batch", 8, "sequences per step")
    parser.add_argument(
        "--rate", default=4e-3, type=float, metavar="X", help="learning rate (%(default)s)"
    )
    parser.add_seed("all draws")
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="shard the sequence between the layers",
    )
    parser.add_whole("--sample", 300, "tokens to generate")
    parser.add_argument(
        "--check",
        nargs="?",
        const=20,
        type=positive,
        metavar="N",
        help="compare N steps (20) with one process",
    )
    parser.add_picture("out/text.png")
    options = parser.parse(arguments)
    if options.length >= HELD_OUT:
        parser.error(f"argument --length: need less than {HELD_OUT}, got {options.length}")
    return options


def shares(model: GPT, options: argparse.Namespace) -> str:
    """Return a line with the tokens, heads and parameters of each rank."""
    heads = vc.ShardSizes.balanced(options.heads, vc.init().size)
    sizes = vc.ShardSizes.from_local(sum(p.numel() for p in model.parameters()))
    tokens = model.head.spec.sizes
    return f"{list(tokens)} tokens, {list(heads)} heads and {list(sizes)} parameters per rank"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    text = corpus.text()
    vocabulary = corpus.Vocabulary(text[:100_000])
    ids, tokens = vocabulary.encode(text), len(vocabulary)
    say(f"{len(text):,} characters, {len(ids):,} tokens, {tokens} of them different")
    ids, held_out = ids[:-HELD_OUT], ids[-HELD_OUT:]
    model = new_model(options, tokens)
    parameters = sum(p.numel() for p in model.parameters())
    model = over_ranks(model, options)
    say(f"{parameters:,} parameters; {shares(model, options)}\n")

    cost, losses, known = Cost(), [], {}
    for loss in training(fit(model, ids, options, options.steps), options.steps, cost):
        losses.append(loss)
        step = len(losses)
        if step % math.ceil(options.steps / 8) == 0 or step == options.steps:
            known[step] = held_out_loss(model, held_out, options.length)
    say(cost.report())
    guesses = {
        "frequency of tokens": by_frequency(ids, held_out, tokens),
        "uniform guess": math.log(tokens),
    }
    say(f"\nloss on held-out text after {options.steps} steps, in nats per token:")
    for name, loss in {"model": known[options.steps], **guesses}.items():
        say(f"  {loss:6.3f}  {name}")

    begin = vocabulary.encode("\n\n\nReturn ")[:, None].expand(-1, 2)
    draws = torch.Generator().manual_seed(options.seed)
    texts = model.generate(begin, options.sample, 0.7, draws, context=options.length)
    for number, written in enumerate(texts.T, 1):
        say(f"\n--- sample {number} ---\n{vocabulary.decode(written).strip()}")
    if is_first():
        draw(options.picture, losses, known, guesses)
    say(f"\npicture: {options.picture}")
    if options.check is None:
        return 0

    def found(dtype: torch.dtype) -> tuple[float, float]:
        return compare(new_model(options, tokens).to(dtype), ids, options)

    say(f"\n{options.check} steps on ranks and in one process:")
    return 0 if one_answer(found) else 1


if __name__ == "__main__":
    sys.exit(main())
