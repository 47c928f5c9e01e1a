"""
Second derivatives and forces
=============================

You will compute forces between atoms as derivatives of an energy, with the atoms split over two
ranks, train a network on these forces, which differentiates twice through every exchange, and
compare all of it with one process. You need to know ``torch.autograd.grad`` with
``create_graph=True``, and from the :doc:`second tutorial <02_first_halo_exchange>` what a plan is.
"""

# %%
# An energy of neighbours
# -----------------------
#
# Seven beads on a ring, split unevenly over two ranks. Each bead is tied
# to the one before it by a spring that gets stiffer as it is pulled. Each rank computes the
# energies of the springs that end at its own beads, and needs one bead of the other rank.
#
# The first derivative of the energy is minus the force. Its derivative in a direction ``d`` is a
# product with the second derivatives of the energy, the Hessian. We ask for it with a second call
# of ``grad``: it differentiates the backward of the exchange, which is an exchange itself.

import sys

import matplotlib.pyplot as plt
import torch
from _examples import EXAMPLES  # beside this script

import varcomm as vc
from varcomm.models import PaiNN

sys.path.append(str(EXAMPLES / "atoms"))
from crystal import CUTOFF, as_graph, shaken, with_truth

SIZES = vc.ShardSizes([5, 2])
ranks = vc.Ranks(len(SIZES))

torch.manual_seed(0)
beads, direction = torch.randn(2, SIZES.total, dtype=torch.float64)


def ring_energy(own, before):
    """The springs that end at own beads; `before` is the bead before the first of them."""
    return (own - torch.cat([before, own[:-1]])).pow(4).sum()


def derivatives(own, energy_of, d):
    """The gradient of the energy, and the Hessian times d; the rows of own beads."""
    own = own.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy_of(own), own, create_graph=True)
    (product,) = torch.autograd.grad(gradient, own, d)
    return gradient.detach(), product


def ring(rank, beads, direction):
    own = slice(SIZES.offsets[rank], SIZES.offsets[rank] + SIZES[rank])
    before = torch.tensor([(own.start - 1) % SIZES.total])
    plan = vc.ExchangePlan.from_needed(before, SIZES)
    exact = derivatives(beads[own], lambda x: ring_energy(x, plan(x)), direction[own])
    cut = derivatives(beads[own], lambda x: ring_energy(x, plan(x).detach()), direction[own])
    return *exact, *cut


whole = derivatives(beads, lambda x: ring_energy(x, x[-1:]), direction)
shards = zip(*ranks.run(ring, beads, direction), strict=True)
gradient, product, cut_gradient, cut_product = (torch.cat(shard) for shard in shards)
print(f"gradient differs by        {(gradient - whole[0]).abs().max():.1e}")
print(f"Hessian product differs by {(product - whole[1]).abs().max():.1e}")

# %%
# What if nothing came back through the exchange? Take the halo as numbers, by ``detach()``, as code
# does that fills it outside of autograd. The energy is the same, no error is raised, and forces are
# wrong at each border:

print(f"gradient, halo detached        {(cut_gradient - whole[0]).abs().max():.1e}")
print(f"Hessian product, halo detached {(cut_product - whole[1]).abs().max():.1e}")

# %%
# Atoms on ranks
# --------------
#
# A crystal of argon that repeats in all directions, its atoms shaken off their sites. Edges join
# atoms closer than a cutoff; ``shifts`` say in which copy of the box a neighbour is. Energies and
# forces that we want to learn come from a formula.

train_data = with_truth(as_graph(shaken(4, 0.12, seed=0)))
test_data = with_truth(as_graph(shaken(4, 0.12, seed=1)))
print(train_data)


def new_model(data):
    torch.manual_seed(0)
    scale = data.forces.square().mean().sqrt().item()
    mean = data.energies.mean().item()
    model = PaiNN(1, CUTOFF, hidden_channels=16, num_blocks=2, mean=mean, scale=scale)
    return model.double()


# %%
# ``part`` is the whole crystal in one process, and a rank's part of it on ranks: the code is the
# same. An atom's energy depends on atoms of other ranks. The model has the exchange of positions
# inside, so that ``grad`` brings back what other ranks' energies say of the forces on our atoms, as
# long as all ranks ask.


def energies_and_forces(model, part, create_graph=False):
    pos = part.pos.clone().requires_grad_()
    energies = model(part.types, pos, part.edge_index, part.shifts)
    (slope,) = torch.autograd.grad(energies.sum(), pos, create_graph=create_graph)
    return energies, -slope


# %%
# Train on forces
# ---------------
#
# The loss contains forces, which are derivatives, and ``backward`` differentiates them once more,
# with respect to the parameters. That takes every exchange of the model through its second
# derivative.

STEPS = 50


def train(model, part, mean, sum_gradients):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        energies, forces = energies_and_forces(model, part, create_graph=True)
        of_forces = mean((forces - part.forces).square())
        of_energy = mean(energies - part.energies).square()
        loss = (of_forces + 10 * of_energy) / model.scale**2
        loss.backward()
        sum_gradients(model)
        if step == 0:
            first = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def on_ranks(rank, train_data, test_data):
    graph = vc.graph.partition(train_data, method="rcb")
    model = vc.graph.distribute(new_model(train_data), graph)
    losses, first = train(model, graph, graph.mean, vc.data_parallel.sum_gradients)
    other = vc.graph.partition(test_data, method="rcb")
    vc.graph.distribute(model, other)  # the model moves to a crystal that it has not seen
    _, forces = energies_and_forces(model, other)
    return losses, first, other.gather(forces, dst=0), other.owned_ids, graph.report()


results = ranks.run(on_ranks, train_data, test_data)
ranks.close()
losses, first, forces, _, report = results[0]
print(report)

# %%
# The halos are large here, as the crystal is small enough to be trained on while this page is
# built: nearly every atom is close to a border. They shrink, by the share of atoms, as crystals
# grow.
#
# In one process
# --------------

alone = new_model(train_data)
alone_losses, alone_first = train(alone, train_data, torch.mean, lambda model: None)
_, alone_forces = energies_and_forces(alone, test_data)


def worst(ours, theirs):
    """The largest difference, by the largest entry."""
    ours, theirs = (torch.as_tensor(values, dtype=torch.float64) for values in (ours, theirs))
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


of_gradients = max(worst(ours, theirs) for ours, theirs in zip(first, alone_first, strict=True))
print(f"first gradients of a loss on forces differ by {of_gradients:.1e}")
print(f"losses of all steps differ by                 {worst(losses, alone_losses):.1e}")
print(f"forces on a new crystal differ by             {worst(forces, alone_forces):.1e}")
print(f"sum of all forces, which should be zero:      {forces.sum(0).abs().max():.1e} eV/Å")

# %%
# Look at it
# ----------
#
# Left, a layer of the new crystal: atoms in the colour of their rank, true forces in grey and
# learned ones in black, across the borders too. Middle, all components of the forces. Right, the
# loss.

COLOURS = ["#56b4e9", "#e69f00"]  # one a rank; told apart by colour-blind readers too
INK, PALE = "#22272b", "#8a9299"
owner = torch.empty(test_data.num_nodes, dtype=torch.long)
for rank, result in enumerate(results):
    owner[result[3]] = rank
pos, truth = test_data.pos, test_data.forces
layer = (pos[:, 2] - pos[:, 2].median()).abs() < 1.5

figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), facecolor="white", layout="constrained")
crystal, parity, curve = axes
for rank, colour in enumerate(COLOURS):
    here = layer & (owner == rank)
    crystal.scatter(*pos[here, :2].T, s=130, color=colour, label=f"rank {rank}")
style = {"angles": "xy", "scale_units": "xy", "scale": truth.abs().max().item() / 3.5}
crystal.quiver(
    *pos[layer, :2].T, *truth[layer, :2].T, color=PALE, width=0.014, **style, label="true"
)
crystal.quiver(
    *pos[layer, :2].T, *forces[layer, :2].T, color=INK, width=0.006, **style, label="learned"
)
crystal.set_title("Forces in a layer of the crystal", loc="left")
crystal.set_aspect("equal")
crystal.set_xticks([])
crystal.set_yticks([])
crystal.spines[:].set_visible(False)
below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "ncols": 4, "frameon": False}
crystal.legend(**below, markerscale=0.6, handlelength=1, columnspacing=1)

for rank, colour in enumerate(COLOURS):
    here = owner == rank
    parity.plot(
        truth[here].flatten(), forces[here].flatten(), ".", color=colour, label=f"rank {rank}"
    )
parity.axline((0, 0), slope=1, color=INK, lw=1)
parity.set_title("Forces on a crystal not seen", loc="left")
parity.set_xlabel("true, eV/Å")
parity.set_ylabel("learned, eV/Å")
parity.set_aspect("equal", adjustable="datalim")
parity.legend(frameon=False, markerscale=2)

curve.plot(alone_losses, color=INK, lw=1.5, label="one process")
curve.plot(losses, "o", ms=5, mfc="none", color="#0072b2", label="two ranks")
curve.set_title("Loss, mostly of forces", loc="left")
curve.set_xlabel("step")
curve.set_yscale("log")
curve.legend(frameon=False)
for ax in (parity, curve):
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# What to take away
# -----------------
#
# - Backward of an exchange is an exchange that can itself be differentiated, to any order.
# - Ask for forces by ``torch.autograd.grad(energies.sum(), pos)`` on all ranks at once: what other
#   ranks' energies say of an atom comes back to its owner.
# - A halo that is filled outside of autograd gives the right energy and wrong forces, without a
#   word.
# - A loss on forces trains as in one process: same losses, same gradients, to rounding.
#
# Next: :doc:`tensor parallelism when nothing divides <06_nothing_divides>`.
