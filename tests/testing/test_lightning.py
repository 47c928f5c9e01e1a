"""`distribute` and `same_as_one_process` under Lightning: the recipe of docs/graphs.md."""

import logging
import warnings

import pytest
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import varcomm as vc
from varcomm.testing import same_as_one_process

lightning = pytest.importorskip("lightning")
pytest.importorskip("lightning.fabric.plugins.environments")
pytestmark = pytest.mark.slow


def graph():
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.randn(30, 1)
    return Data(x=x, y=y, edge_index=torch.randint(30, (2, 120)))


class Net(lightning.LightningModule):
    def __init__(self, sums=True):
        super().__init__()
        torch.manual_seed(1)
        self.net = GCN(4, 8, num_layers=2, out_channels=1, norm="batch_norm")
        self.sums, self.losses = sums, []

    def forward(self, x, edge_index):
        return self.net(x, edge_index)

    def training_step(self, graph, index):
        loss = graph.mean((self(graph.x, graph.edge_index) - graph.y) ** 2)
        self.losses.append(loss.item())
        return loss

    def transfer_batch_to_device(self, graph, device, index):
        return graph  # a copy would be another graph than that of distribute

    def on_after_backward(self):
        if self.sums:
            vc.data_parallel.sum_gradients(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fitted(rank, steps):
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # Lightning's hints on loaders, devices and loggers
    data = vc.graph.partition(graph(), method="random")
    net = vc.graph.distribute(Net(), data)
    trainer = lightning.Trainer(
        max_epochs=steps,
        plugins=lightning.fabric.plugins.environments.LightningEnvironment(),
        strategy=lightning.pytorch.strategies.SingleDeviceStrategy("cpu"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader([data], batch_size=None))
    return net.losses, [each.detach() for each in net.parameters()]


def test_training_is_that_of_one_process(worlds):
    ((expected, parameters),) = worlds.run(1, fitted, 5)
    for losses, found in worlds.run(3, fitted, 5):
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, parameters, rtol=1e-3, atol=1e-4)
    assert expected[-1] < expected[0]


def one_step(net, data):
    loss = net.training_step(data, 0)
    loss.backward()
    net.on_after_backward()
    return loss


def distributed_step(net, data):
    return one_step(vc.graph.distribute(net, data), data)


@pytest.mark.usefixtures("launch_on_worlds")
def test_same_as_one_process():
    found = same_as_one_process(Net(), graph(), step=distributed_step)
    assert max(found.errors.values()) < 1e-12
    with pytest.raises(AssertionError, match="sum_gradients"):
        same_as_one_process(Net(sums=False), graph(), step=distributed_step)
