"""Train a point transformer and a graph network on one mesh, and compare error, time and bytes.

    torchrun --nproc-per-node 2 examples/points/train.py

Both models predict the sea level after a time step of long waves on the world ocean. After a short
step the result at a node depends on its neighbourhood, after a long step on the whole ocean.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from common import Cost, Parser, Record, differences, is_first, one_answer, one_cycle, say, training
from mesh import HELD_OUT, Ocean, load
from picture import draw
from torch import Tensor, nn
from torch_geometric.data import Data

import varcomm as vc
from varcomm.graph import PartitionedGraph
from varcomm.models import MeshGraphNet, Transolver

Part = Data | PartitionedGraph
Total = Callable[[Tensor], Tensor]
RATES = {"MeshGraphNet": 3e-3, "Transolver": 6e-3}


def new_model(name: str, hidden: int, blocks: int, seed: int) -> nn.Module:
    """Return a model with equal weights on all ranks, which draw them from one seed."""
    torch.manual_seed(seed)
    if name == "MeshGraphNet":
        return MeshGraphNet(6, 3, 1, hidden_channels=hidden, num_blocks=blocks)
    slices = {"num_heads": 4, "num_slices": 32, "mlp_channels": 2 * hidden}
    return Transolver(6, 1, hidden_channels=hidden, num_blocks=blocks, **slices)


def predict(model: nn.Module, part: Part, disturbance: Tensor) -> Tensor:
    """Return sea levels (n,) from a disturbance (n,), on ranks or in one process."""
    x = torch.cat([disturbance[:, None], part.x], dim=1)
    if isinstance(model, MeshGraphNet):
        return model(x, part.edge_index, part.edge_attr)[:, 0]
    sizes = part.node_sizes if isinstance(part, PartitionedGraph) else None
    return model(x, sizes)[:, 0]


def size(part: Part, level: Tensor, total: Total) -> Tensor:
    """Return the root mean square of fields (n, fields) over the ocean."""
    return total(part.area[:, None] * level.square() / level.shape[1]).sqrt()


class Run:
    """A training on ranks or in one process, with a new field in each step."""

    def __init__(self, model: nn.Module, part: Part, step: int, steps: int, rate: float) -> None:
        self.model, self.part, self.steps = model, part, steps
        self.on_ranks = isinstance(part, PartitionedGraph)
        self.level = part.level[:, step]
        if self.on_ranks and isinstance(model, MeshGraphNet):
            vc.graph.distribute(model, part)
        with torch.no_grad():
            known = (part.disturbance[:, HELD_OUT:], self.level[:, HELD_OUT:])
            self.unit, self.scale = (size(part, fields, self.total) for fields in known)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=1e-4)
        self.schedule = one_cycle(self.optimizer, rate, steps, rise=0.15)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the nodes of all ranks."""
        return self.part.sum(values) if self.on_ranks else values.sum()

    def found(self, field: int) -> Tensor:
        disturbance = self.part.disturbance[:, field] / self.unit
        return self.scale * predict(self.model, self.part, disturbance)

    def loss(self, field: int) -> Tensor:
        """Return the square of the relative error, which is 1 if the prediction is zero."""
        error = (self.found(field) - self.level[:, field]) / self.scale
        return self.total(self.part.area * error.square())

    def losses(self) -> Iterator[float]:
        """Train; yield the loss before each step."""
        for field in range(HELD_OUT, HELD_OUT + self.steps):
            self.optimizer.zero_grad()
            loss = self.loss(field)
            loss.backward()
            if self.on_ranks:
                vc.data_parallel.sum_gradients(self.model)
            yield loss.item()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()

    def sent(self) -> list[int]:
        """Return bytes that this rank sends per step: for the model, and for gradients."""
        with vc.trace() as of_model:
            self.loss(0).backward()
        with vc.trace() as of_gradients:
            vc.data_parallel.sum_gradients(self.model)
        return [of_model.total.sent, of_gradients.total.sent]

    def held_out(self) -> tuple[float, Tensor]:
        """Return the relative error of held-out fields; on rank 0, also the first prediction."""
        with torch.no_grad():
            found = torch.stack([self.found(field) for field in range(HELD_OUT)], dim=1)
            true = self.level[:, :HELD_OUT]
            error = size(self.part, found - true, self.total) / size(self.part, true, self.total)
        return error.item(), self.part.gather(found[:, 0], dst=0)


def record(run: Run) -> Record:
    """Run a training; return its losses, and the gradients of its first step, as one vector."""
    losses = run.losses()
    first = next(losses)
    gradients = torch.cat([parameter.grad.flatten() for parameter in run.model.parameters()])
    return [first, *losses], [gradients]


def baselines(ocean: Ocean, data: Data, step: int, hours: float, blocks: int) -> dict[str, float]:
    """Return relative errors of baselines on held-out fields."""
    before, true = data.disturbance[:, :HELD_OUT], data.level[:, step, :HELD_OUT]
    iterated = ocean.iterate(before.numpy(), hours, blocks)
    guesses = {
        "the disturbance itself": before,
        f"{blocks} steps of conjugate gradients": torch.from_numpy(iterated),
    }
    unit = size(data, true, torch.sum)
    return {name: float(size(data, x - true, torch.sum) / unit) for name, x in guesses.items()}


def precise(data: Data, dtype: torch.dtype) -> Data:
    return data.clone().apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__, smoke={"spacing": 8, "steps": 5, "hidden": 16, "blocks": 2})
    parser.add_argument(
        "--models",
        nargs="+",
        choices=RATES,
        default=[*RATES],
        metavar="NAME",
        help="models to train (all)",
    )
    parser.add_argument(
        "--hours", type=float, nargs="+", default=[1, 8], metavar="X", help="hours per step (1 8)"
    )
    parser.add_argument(
        "--spacing",
        type=float,
        default=4,
        metavar="X",
        help="spacing of deep nodes in degrees (%(default)s)",
    )
    parser.add_whole("--steps", 600, "training steps per model")
    parser.add_whole("--hidden", 32, "width of the models")
    parser.add_whole("--blocks", 4, "blocks of each model")
    parser.add_seed("fields and weights")
    parser.add_picture("out/points.png")
    parser.add_check("5 steps")
    options = parser.parse(arguments)
    if not 1 <= options.spacing <= 10:
        parser.error(f"argument --spacing: need 1 to 10, got {options.spacing}")
    if not all(0 < hours <= 100 for hours in options.hours):
        parser.error(f"argument --hours: need more than 0 and at most 100, got {options.hours}")

    ocean = whole = None
    if is_first():
        ocean = Ocean(options.spacing)
        samples = max(5, options.steps)
        whole = load(ocean, options.hours, samples, options.seed, options.spacing)
    graph = vc.graph.partition(whole and precise(whole, torch.float32), src=0)
    say(f"{graph.report()}")
    shape = options.hidden, options.blocks, options.seed
    rows, pictures = [], {}
    for step, hours in enumerate(options.hours):
        for name in options.models:
            model, cost = new_model(name, *shape), Cost()
            parameters = sum(parameter.numel() for parameter in model.parameters())
            say(f"\n{name}, {parameters:,} parameters, a step of {hours:g} hours")
            run = Run(model, graph, step, options.steps, RATES[name])
            for _ in training(run.losses(), options.steps, cost):
                pass
            say(cost.report())
            error, field = run.held_out()
            sent = vc.all_gather_v(torch.tensor([run.sent()]), [1] * graph.group.size)
            seconds = sorted(cost.seconds)[len(cost.seconds) // 2]
            rows.append((hours, name, error, seconds, *sent.amax(dim=0).tolist()))
            pictures[hours, name] = field
    rank = graph.gather(torch.full((graph.num_owned,), graph.group.rank), dst=0)
    if is_first():
        say("\nhours  error (%)  s/step    bytes: model  gradients")
        for hours, name, error, seconds, of_model, of_gradients in rows:
            costs = f"{seconds:8.3f}  {of_model:12,}  {of_gradients:9,}"
            say(f"{hours:5g}  {100 * error:9.1f}  {costs}  {name}")
        for step, hours in enumerate(options.hours):
            for name, error in baselines(ocean, whole, step, hours, options.blocks).items():
                say(f"{hours:5g}  {100 * error:9.1f}  {name}")
        errors = {(hours, name): error for hours, name, error, *_ in rows}
        draw(options.picture, ocean, rank.numpy(), whole, errors, pictures)
        say(f"picture: {options.picture}")
    if not options.check:
        return 0

    passed = True
    for name in options.models:
        say(f"\n5 steps of {name} on ranks and in one process:")

        def found(dtype: torch.dtype, name: str = name) -> tuple[float, float]:
            data = whole and precise(whole, dtype)
            graph = vc.graph.partition(data, src=0)

            def run(part: Part) -> Record:
                model = new_model(name, *shape).to(dtype)
                return record(Run(model, part, -1, 5, RATES[name]))

            return differences(lambda: run(graph), lambda: run(data))

        passed &= one_answer(found)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
