"""Train a point transformer and a graph network on one mesh, and compare error, time and bytes.

    torchrun --nproc-per-node 2 examples/points/train.py

Both models predict the sea level after two time steps of long waves on the world ocean. After a
short step the result at a node depends on its neighbourhood, after a long step on half an ocean.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import torch
from common import Cost, Parser, Record, differences, is_first, one_answer, one_cycle, say, training
from mesh import HELD_OUT, MODES, Ocean, load
from picture import draw
from torch import Tensor, nn
from torch_geometric.data import Data

import varcomm as vc
from varcomm.graph import PartitionedGraph
from varcomm.models import MeshGraphNet, Transolver

Part = Data | PartitionedGraph
RATE = 3e-3
BATCH = {"MeshGraphNet": 1, "Transolver": 4}  # fields per training step
SAMPLES = 1500


def new_model(name: str, hidden: int, blocks: int, levels: int, seed: int) -> nn.Module:
    """Return a model of some levels with equal weights on all ranks, which draw from one seed."""
    torch.manual_seed(seed)
    if name == "MeshGraphNet":
        return MeshGraphNet(3, 4, levels, hidden_channels=hidden, num_blocks=blocks)
    slices = {"num_heads": 4, "num_slices": 16, "mlp_channels": 2 * hidden}
    return Transolver(6 + MODES, levels, hidden_channels=hidden, num_blocks=blocks, **slices)


def predict(model: nn.Module, part: Part, disturbance: Tensor) -> Tensor:
    """Return levels (n, S, hours) from disturbances (n, S), on ranks or in one process."""
    if isinstance(model, MeshGraphNet):
        fields = [torch.cat([field[:, None], part.x], dim=1) for field in disturbance.unbind(1)]
        return torch.stack([model(x, part.edge_index, part.edge_attr) for x in fields], dim=1)
    point = torch.cat([part.x, part.place], dim=1)[:, None].expand(-1, disturbance.shape[1], -1)
    sizes = part.node_sizes if isinstance(part, PartitionedGraph) else None
    return model(torch.cat([disturbance[..., None], point], dim=2), sizes)


class Run:
    """A training on ranks or in one process, with other fields in each step."""

    def __init__(self, name: str, model: nn.Module, part: Part, steps: int) -> None:
        self.model, self.part, self.steps, self.batch = model, part, steps, BATCH[name]
        self.on_ranks = isinstance(part, PartitionedGraph)
        if self.on_ranks and isinstance(model, MeshGraphNet):
            vc.graph.distribute(model, part)
        with torch.no_grad():
            self.unit = self.size(part.disturbance[:, :HELD_OUT, None])
            self.scale = self.size(part.level[:, :HELD_OUT])
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-4)
        self.schedule = one_cycle(self.optimizer, RATE, steps, rise=0.15)

    def size(self, fields: Tensor) -> Tensor:
        """Return the root mean square (hours,) of fields (n, S, hours) over the ocean."""
        square = torch.einsum("n,nsh->h", self.part.area, fields.square()) / fields.shape[1]
        return (vc.all_reduce(square) if self.on_ranks else square).sqrt()

    def found(self, fields: range) -> Tensor:
        """Return predictions (n, S, hours): the models add to the disturbance."""
        disturbance = self.part.disturbance[:, fields.start : fields.stop]
        change = predict(self.model, self.part, disturbance / self.unit)
        return disturbance[..., None] + self.scale * change

    def loss(self, fields: range) -> Tensor:
        """Return the mean square of the relative errors, which is 1 if the prediction is zero."""
        error = self.found(fields) - self.part.level[:, fields.start : fields.stop]
        error = (error / self.scale).square().mean(dim=(1, 2))
        return self.part.sum(self.part.area * error) if self.on_ranks else self.part.area @ error

    def losses(self) -> Iterator[float]:
        """Train; yield the loss before each step."""
        count = self.part.disturbance.shape[1] - HELD_OUT
        for step in range(self.steps):
            first = HELD_OUT + self.batch * step % (count - self.batch + 1)
            self.optimizer.zero_grad()
            loss = self.loss(range(first, first + self.batch))
            loss.backward()
            if self.on_ranks:
                vc.data_parallel.sum_gradients(self.model)
            yield loss.item()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()

    def sent(self) -> list[int]:
        """Return bytes that this rank sends per field for the model, and for gradients."""
        with vc.trace() as of_model:
            self.loss(range(1)).backward()
        with vc.trace() as of_gradients:
            vc.data_parallel.sum_gradients(self.model)
        return [of_model.total.sent, of_gradients.total.sent]

    def held_out(self) -> tuple[list[float], Tensor]:
        """Return relative errors of held-out fields; on rank 0, also the first prediction."""
        with torch.no_grad():
            found, true = self.found(range(HELD_OUT)), self.part.level[:, :HELD_OUT]
            error = self.size(found - true) / self.size(true)
        return error.tolist(), self.part.gather(found[:, 0, -1], dst=0)


def record(run: Run) -> Record:
    """Run a training; return its losses, and the gradients of its first step, as one vector."""
    losses = run.losses()
    first = next(losses)
    gradients = torch.cat([parameter.grad.flatten() for parameter in run.model.parameters()])
    return [first, *losses], [gradients]


def baselines(ocean: Ocean, data: Data, step: int, hours: float, blocks: int) -> dict[str, float]:
    """Return relative errors of baselines on held-out fields."""
    before, true = data.disturbance[:, :HELD_OUT], data.level[:, :HELD_OUT, step]
    iterated = ocean.iterate(before.numpy(), hours, blocks)
    guesses = {
        "the disturbance itself": before,
        f"{blocks} steps of conjugate gradients": torch.from_numpy(iterated),
    }
    square = {name: data.area @ (x - true).square() for name, x in guesses.items()}
    whole = (data.area @ true.square()).sum()
    return {name: float((x.sum() / whole).sqrt()) for name, x in square.items()}


def precise(data: Data, dtype: torch.dtype) -> Data:
    return data.clone().apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(__doc__, smoke={"steps": 5, "hidden": 16, "blocks": 2})
    parser.add_argument(
        "--models",
        nargs="+",
        choices=BATCH,
        default=[*BATCH],
        metavar="NAME",
        help="models to train (all)",
    )
    parser.add_argument(
        "--hours", type=float, nargs="+", default=[1, 3], metavar="X", help="hours per step (1 3)"
    )
    parser.add_argument(
        "--spacing",
        type=float,
        default=8,
        metavar="X",
        help="spacing of deep nodes in degrees (%(default)s)",
    )
    parser.add_whole("--steps", 1500, "training steps per model")
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
        samples = min(SAMPLES, 4 * max(5, options.steps))
        whole = load(ocean, options.hours, samples, options.seed, options.spacing)
    graph = vc.graph.partition(whole and precise(whole, torch.float32), src=0)
    say(f"{graph.report()}")
    shape = options.hidden, options.blocks, len(options.hours), options.seed
    rows, errors, pictures = [], {}, {}
    for name in options.models:
        model, cost = new_model(name, *shape), Cost()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        fields = "1 field" if BATCH[name] == 1 else f"{BATCH[name]} fields"
        say(f"\n{name}, {parameters:,} parameters, {fields} per step")
        run = Run(name, model, graph, options.steps)
        for _ in training(run.losses(), options.steps, cost):
            pass
        say(cost.report())
        found, pictures[name] = run.held_out()
        sent = vc.all_gather_v(torch.tensor([run.sent()]), [1] * graph.group.size)
        seconds = sorted(cost.seconds)[len(cost.seconds) // 2]
        rows.append((name, seconds, *sent.amax(dim=0).tolist()))
        errors |= {(hours, name): error for hours, error in zip(options.hours, found, strict=True)}
    rank = graph.gather(torch.full((graph.num_owned,), graph.group.rank), dst=0)
    if is_first():
        say("\ns/step    bytes: model  gradients")
        for name, seconds, of_model, of_gradients in rows:
            say(f"{seconds:6.3f}  {of_model:14,}  {of_gradients:9,}  {name}")
        say("\nhours  error (%)")
        for step, hours in enumerate(options.hours):
            trained = {name: errors[hours, name] for name in options.models}
            known = baselines(ocean, whole, step, hours, options.blocks)
            for name, error in (trained | known).items():
                say(f"{hours:5g}  {100 * error:9.1f}  {name}")
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
                return record(Run(name, new_model(name, *shape).to(dtype), part, 5))

            return differences(lambda: run(graph), lambda: run(data))

        passed &= one_answer(found)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
