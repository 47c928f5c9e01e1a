"""Train a small GPT on Python's own documentation, on as many ranks as there are.

    torchrun --nproc-per-node 2 examples/text/train.py

131 tokens and 5 heads are shared out over the ranks, which need not divide them; in the end the
model writes some text. With --check, it also trains in one process and compares.
"""

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import corpus
import torch
from tqdm import tqdm

import varcomm as vc
from varcomm.models import GPT
from varcomm.tensor_parallel import parallelize, shard_spec

HELD_OUT = 20_000  # tokens at the end of the text


def new_model(options: argparse.Namespace, tokens: int) -> GPT:
    """The same on every rank, since all draw from the same seed."""
    torch.manual_seed(options.seed)
    hidden = options.heads * options.head_size
    return GPT(tokens, hidden, num_layers=options.layers, num_heads=options.heads)


def over_ranks(model: GPT, options: argparse.Namespace) -> GPT:
    """All that sharding takes."""
    sequence_sizes = None
    if options.sequence_parallel:
        sequence_sizes = vc.ShardSizes.balanced(options.length, vc.init().size)
    return parallelize(model, model.tensor_parallel_plan(sequence_sizes))


def pieces(ids: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Parts of the text, (length, batch), and what comes next at each place."""
    places = torch.arange(length + 1)[:, None] + starts
    return ids[places[:-1]], ids[places[1:]]


def fit(
    model: GPT, ids: torch.Tensor, options: argparse.Namespace, steps: int
) -> Iterator[torch.Tensor]:
    """Train, on pieces that are the same on all ranks; yields the loss of each step."""
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
        yield loss.detach()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def held_out_loss(model: GPT, ids: torch.Tensor, length: int) -> float:
    """Of text that was not trained on, in nats a token."""
    starts = torch.arange(0, len(ids) - length, length)
    parts = starts.split(16)
    losses = [model.loss(*pieces(ids, part, length)).item() * len(part) for part in parts]
    return sum(losses) / len(starts)


def by_frequency(ids: torch.Tensor, held_out: torch.Tensor, tokens: int) -> float:
    """What a guess by the frequency of tokens alone would lose."""
    shares = (torch.bincount(ids, minlength=tokens) + 1.0) / (len(ids) + tokens)
    return -shares.log()[held_out].mean().item()


def record(model: GPT, losses: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    """Run a training; return its losses, and the whole gradients of its first step."""
    first, gradients = next(losses), []
    for parameter in model.parameters():
        spec = shard_spec(parameter)
        gradients.append(parameter.grad.clone() if spec is None else spec.gather(parameter.grad))
    return [torch.stack([first, *losses]), *gradients]


def differences(
    model: GPT, ids: torch.Tensor, options: argparse.Namespace, steps: int
) -> tuple[float, float]:
    """How far training on ranks is from training alone; the same on every rank.

    Relative, at its worst: of the losses of all steps, and of the first step's gradients of any
    parameter, by the largest of its entries.
    """
    together = over_ranks(copy.deepcopy(model), options)
    losses, *gradients = record(together, fit(together, ids, options, steps))
    found = None
    if vc.init().rank == 0:  # the others wait
        losses_alone, *gradients_alone = record(model, fit(model, ids, options, steps))
        errors = [
            (x - y).abs().max() / y.abs().max()
            for x, y in zip(gradients, gradients_alone, strict=True)
        ]
        found = torch.stack([((losses - losses_alone) / losses_alone).abs().max(), max(errors)])
    loss_error, gradient_error = vc.broadcast(found).tolist()
    return loss_error, gradient_error


def check(
    ids: torch.Tensor, tokens: int, options: argparse.Namespace, say: Callable[[str], None]
) -> bool:
    """Tell whether ranks give what one process gives, in double and in single precision."""
    say(f"\n{options.check} steps on ranks and in one process:")
    passed = True
    for dtype, loss_limit, gradient_limit in (
        (torch.float64, 1e-10, 1e-12),
        (torch.float32, 1e-4, 1e-3),
    ):
        model = new_model(options, tokens).to(dtype)
        loss_error, gradient_error = differences(model, ids, options, options.check)
        passed &= loss_error <= loss_limit and gradient_error <= gradient_limit
        say(
            f"  {dtype}: losses differ by {loss_error:.1e} (allowed {loss_limit:.0e}), "
            f"first gradients by {gradient_error:.1e} (allowed {gradient_limit:.0e})"
        )
    say("one answer" if passed else "NOT one answer")
    return passed


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say it once, on the first rank, before any rank leaves."""
        if vc.init().rank == 0:
            print(f"{self.format_usage()}{self.prog}: error: {message}", file=sys.stderr)
        torch.distributed.barrier()
        sys.exit(2)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"need a whole number from 1 on, got {text!r}")
    return int(text)


def even(text: str) -> int:
    if positive(text) % 2:
        raise argparse.ArgumentTypeError(f"need an even number, got {text!r}")
    return int(text)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = {"type": positive, "metavar": "N"}
    parser.add_argument("--steps", default=500, help="of training (%(default)s)", **whole)
    parser.add_argument("--layers", default=3, help="of the model (%(default)s)", **whole)
    parser.add_argument("--heads", default=5, help="in each layer (%(default)s)", **whole)
    parser.add_argument(
        "--head-size", default=32, type=even, metavar="N", help="features of a head (%(default)s)"
    )
    parser.add_argument("--length", default=128, help="tokens of a piece (%(default)s)", **whole)
    parser.add_argument("--batch", default=8, help="pieces a step (%(default)s)", **whole)
    parser.add_argument(
        "--rate", default=4e-3, type=float, metavar="X", help="of learning (%(default)s)"
    )
    parser.add_argument(
        "--seed", default=0, type=int, metavar="N", help="of all draws (%(default)s)"
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="share out the sequence as well, between the layers",
    )
    parser.add_argument("--sample", default=300, help="tokens of a sample (%(default)s)", **whole)
    parser.add_argument(
        "--check",
        nargs="?",
        const=20,
        **whole,
        help="compare N steps (20) with those of one process as well",
    )
    options = parser.parse_args(arguments)
    if options.length >= HELD_OUT:
        parser.error(f"argument --length: need less than {HELD_OUT}, got {options.length}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    world = vc.init()
    first = world.rank == 0

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    text = corpus.text()
    vocabulary = corpus.Vocabulary(text[:100_000])
    ids, tokens = vocabulary.encode(text), len(vocabulary)
    ids, held_out = ids[:-HELD_OUT], ids[-HELD_OUT:]
    model = new_model(options, tokens)
    parameters = sum(p.numel() for p in model.parameters())
    model = over_ranks(model, options)
    sizes = vc.ShardSizes.from_local(sum(p.numel() for p in model.parameters()))
    spec = model.head.spec
    say(
        f"{len(text):,} characters, {len(ids) + len(held_out):,} tokens, {tokens} of them different"
        f"\n{parameters:,} parameters; {list(spec.sizes)} tokens, "
        f"{list(vc.ShardSizes.balanced(options.heads, world.size))} heads and {list(sizes)} "
        "parameters a rank\n"
    )

    began = time.perf_counter()
    with tqdm(total=options.steps, desc="training", unit="step", disable=not first) as bar:
        for loss in fit(model, ids, options, options.steps):
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
    seconds = time.perf_counter() - began

    loss = held_out_loss(model, held_out, options.length)
    say(
        f"\n{options.steps} steps in {seconds:.0f} s. Loss on held-out text, in nats a token:\n"
        f"  {loss:6.3f}  model\n"
        f"  {by_frequency(ids, held_out, tokens):6.3f}  frequency of tokens\n"
        f"  {math.log(tokens):6.3f}  all tokens alike\n"
    )
    begin = vocabulary.encode("\n\n\nReturn ")[:, None].expand(-1, 2)
    draws = torch.Generator().manual_seed(options.seed)
    texts = model.generate(begin, options.sample, 0.7, draws, context=options.length)
    for number, written in enumerate(texts.T, 1):
        say(f"--- sample {number} ---\n{vocabulary.decode(written).strip()}\n")
    if options.check is not None and not check(ids, tokens, options, say):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
