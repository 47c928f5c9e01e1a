"""
Second derivatives and forces
=============================

You want to train a potential on forces. Forces are derivatives of the energy, so training needs
second derivatives, which must stay exact across ranks. This tutorial computes forces between atoms
on two ranks, trains a network on these forces, and compares all results with one process. The
tutorial takes 15 minutes. You need to know ``torch.autograd.grad`` with ``create_graph=True``, and
plans from the :doc:`second tutorial <02_first_halo_exchange>`.
"""

# %%
# Springs between neighbours
# --------------------------
#
# Seven beads on a ring are split unevenly over two ranks. A spring joins each bead to the bead
# before it and becomes stiffer when stretched. Each rank computes the energies of the springs that
# end at its own beads, and needs one bead of the other rank.
#
# The first derivative of the energy is minus the force. In ``derivatives``, the second call of
# ``grad`` multiplies the Hessian, the matrix of second derivatives, by a direction ``d``. This call
# differentiates the backward of the exchange, which is itself an exchange.

import torch
from torch_geometric.data import Data

import varcomm as vc
from varcomm.models import PaiNN

SIZES = vc.ShardSizes([5, 2])
ranks = vc.Ranks(len(SIZES))

torch.manual_seed(0)
beads, direction = torch.randn(2, SIZES.total, dtype=torch.float64)


def ring_energy(own, before):
    """Return the energy of own springs; `before` is the bead before the first."""
    return (own - torch.cat([before, own[:-1]])).pow(4).sum()


def derivatives(own, energy_of, d):
    """Return the gradient and the Hessian times d, for own beads."""
    own = own.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy_of(own), own, create_graph=True)
    (product,) = torch.autograd.grad(gradient, own, d)
    return gradient.detach(), product


def ring(rank, beads, direction):
    own = slice(SIZES.offsets[rank], SIZES.offsets[rank] + SIZES[rank])
    before = torch.tensor([(own.start - 1) % SIZES.total])
    plan = vc.ExchangePlan.from_needed(before, SIZES)
    exact = derivatives(
        beads[own], lambda x: ring_energy(x, plan(x)), direction[own]
    )
    cut = derivatives(
        beads[own], lambda x: ring_energy(x, plan(x).detach()), direction[own]
    )
    return *exact, *cut


whole = derivatives(beads, lambda x: ring_energy(x, x[-1:]), direction)
shards = zip(*ranks.run(ring, beads, direction), strict=True)
gradient, product, cut_gradient, cut_product = (
    torch.cat(shard) for shard in shards
)
print(f"gradient differs by        {(gradient - whole[0]).abs().max():.1e}")
print(f"Hessian product differs by {(product - whole[1]).abs().max():.1e}")

# %%
# Some libraries fill the halo outside autograd. Here ``detach()`` imitates such a library: the
# energy is the same and no error is raised, but the forces are wrong at each border.

print(f"gradient, halo detached        {(cut_gradient - whole[0]).abs().max():.1e}")
print(f"Hessian product, halo detached {(cut_product - whole[1]).abs().max():.1e}")

# %%
# Atoms on ranks
# --------------
#
# The data are two crystals of argon that repeat in all directions, with atoms displaced from their
# sites. Edges join atoms closer than a cutoff. An edge can start at a periodic copy of an atom.
# ``shifts`` holds the displacement of this copy for each edge. The true energies and forces come
# from the Lennard-Jones formula, in eV and Angstrom.

CUTOFF = 5.8


def lennard_jones(pos, edge_index, shifts):
    """Return energies per atom, (N,), smoothly cut off."""
    source, target = edge_index
    distance = (pos[source] + shifts - pos[target]).norm(dim=1)
    power = (3.405 / distance) ** 6
    smooth = (1 - (distance / CUTOFF) ** 2) ** 3
    pair = 4 * 0.0103 * (power**2 - power) * smooth
    return torch.zeros_like(pos[:, 0]).index_add(0, target, pair / 2)


def crystal(cells, seed):
    """Return a face-centred cubic crystal with 4 cells^3 displaced atoms."""
    corners = torch.cartesian_prod(*[torch.arange(cells)] * 3).double()
    basis = torch.tensor([[0, 0, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]).double() / 2
    box = 5.26 * cells
    pos = (corners[:, None] + basis + 0.25).view(-1, 3) * 5.26
    draws = torch.Generator().manual_seed(seed)
    pos += 0.12 * torch.randn(pos.shape, generator=draws).double()
    # from atom j to atom i; the box is larger than two cutoffs
    apart = pos[:, None] - pos
    images = -box * (apart / box).round()
    near = ((apart + images).norm(dim=2) < CUTOFF).fill_diagonal_(False)
    edge_index, shifts = near.nonzero().T, images[near]
    pos.requires_grad_()
    energies = lennard_jones(pos, edge_index, shifts)
    (slope,) = torch.autograd.grad(energies.sum(), pos)
    return Data(
        types=torch.zeros(len(pos), dtype=torch.long),
        pos=pos.detach(),
        edge_index=edge_index,
        shifts=shifts,
        energies=energies.detach(),
        forces=-slope,
    )


train_data, test_data = crystal(4, seed=0), crystal(4, seed=1)
print(train_data)


def new_model(data):
    torch.manual_seed(0)
    scale = data.forces.square().mean().sqrt().item()
    mean = data.energies.mean().item()
    model = PaiNN(
        1, CUTOFF, hidden_channels=16, num_blocks=2, mean=mean, scale=scale
    )
    return model.double()


# %%
# The same code runs in one process and on ranks: ``part`` is the full crystal or a rank's part. The
# energy of an atom depends on atoms of other ranks. The model exchanges positions, so ``grad``
# returns the contributions of other ranks' energies to the forces on the rank's atoms. All ranks
# must call ``grad``.


def energies_and_forces(model, part, create_graph=False):
    pos = part.pos.clone().requires_grad_()
    energies = model(part.types, pos, part.edge_index, part.shifts)
    (slope,) = torch.autograd.grad(energies.sum(), pos, create_graph=create_graph)
    return energies, -slope


# %%
# Train on forces
# ---------------
#
# The loss contains forces, which are derivatives of the energy. ``backward`` differentiates the
# forces again, with respect to the parameters, and needs the second derivative of every exchange.

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
    vc.graph.distribute(model, other)  # use the model on the second crystal
    _, forces = energies_and_forces(model, other)
    return (
        losses,
        first,
        other.gather(forces, dst=0),
        other.owned_ids,
        graph.report(),
    )


results = ranks.run(on_ranks, train_data, test_data)
ranks.close()
losses, first, forces, _, report = results[0]
print(report)

# %%
# This crystal is small: nearly every atom is close to a border, and the halos are large. In larger
# crystals the halo is a smaller share of the atoms.
#
# In one process
# --------------

alone = new_model(train_data)
alone_losses, alone_first = train(alone, train_data, torch.mean, lambda model: None)
_, alone_forces = energies_and_forces(alone, test_data)


def worst(ours, theirs):
    """Return the largest difference relative to the largest entry."""
    ours, theirs = (
        torch.as_tensor(values, dtype=torch.float64) for values in (ours, theirs)
    )
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


of_gradients = max(
    worst(ours, theirs) for ours, theirs in zip(first, alone_first, strict=True)
)
print(f"first gradients of a loss on forces differ by {of_gradients:.1e}")
print(f"losses of all steps differ by {worst(losses, alone_losses):.1e}")
print(f"forces on a new crystal differ by {worst(forces, alone_forces):.1e}")
print(f"sum of all forces: {forces.sum(0).abs().max():.1e} eV/Å")

# %%
# Pictures
# --------
#
# The upper picture shows one layer of the second crystal, with true forces in grey and learned
# forces in black. The lower left picture compares all components of the learned and true forces,
# and the lower right picture shows the loss.

# sphinx_gallery_start_ignore
import matplotlib.pyplot as plt

COLOURS = vc._figures.RANKS[:2]
INK, PALE = vc._figures.INK, vc._figures.PALE
plt.rcParams |= vc._figures.style()
owner = torch.empty(test_data.num_nodes, dtype=torch.long)
for rank, result in enumerate(results):
    owner[result[3]] = rank
pos, truth = test_data.pos, test_data.forces
layer = (pos[:, 2] - pos[:, 2].median()).abs() < 1.5

figure = plt.figure(figsize=(7.2, 8), layout="constrained")
axes = figure.subplot_mosaic([["a", "a"], ["b", "c"]], height_ratios=[1.25, 1])
layer_of_atoms, parity, curve = axes.values()
for rank, colour in enumerate(COLOURS):
    here = layer & (owner == rank)
    layer_of_atoms.scatter(
        *pos[here, :2].T, s=130, color=colour, label=f"rank {rank}"
    )
style = {
    "angles": "xy",
    "scale_units": "xy",
    "scale": truth.abs().max().item() / 3.5,
}
layer_of_atoms.quiver(
    *pos[layer, :2].T,
    *truth[layer, :2].T,
    color=PALE,
    width=0.014,
    **style,
    label="true",
)
layer_of_atoms.quiver(
    *pos[layer, :2].T,
    *forces[layer, :2].T,
    color=INK,
    width=0.006,
    **style,
    label="learned",
)
layer_of_atoms.set_title("Forces in a layer of the crystal", loc="left")
layer_of_atoms.set_aspect("equal")
layer_of_atoms.set_xticks([])
layer_of_atoms.set_yticks([])
layer_of_atoms.spines[:].set_visible(False)
below = {
    "loc": "upper center",
    "bbox_to_anchor": (0.5, 0),
    "ncols": 4,
}
layer_of_atoms.legend(**below, markerscale=0.6, handlelength=1, columnspacing=1)

for rank, colour in enumerate(COLOURS):
    here = owner == rank
    parity.plot(
        truth[here].flatten(),
        forces[here].flatten(),
        ".",
        color=colour,
        label=f"rank {rank}",
    )
parity.axline((0, 0), slope=1, color=INK, lw=1)
parity.set_title("Forces on a crystal not seen", loc="left")
parity.set_xlabel("true (eV/Å)")
parity.set_ylabel("learned (eV/Å)")
parity.set_aspect("equal", adjustable="datalim")
parity.locator_params(nbins=4)
parity.legend(markerscale=2)

curve.plot(alone_losses, color=INK, lw=1.5, label="one process")
curve.plot(
    losses, "o", ms=5, mfc="none", color=vc._figures.CURVES[0], label="two ranks"
)
curve.set_title("Loss, mostly of forces", loc="left")
curve.set_xlabel("step")
curve.set_yscale("log")
curve.set_ylabel("loss")
curve.legend()
plt.show()
# sphinx_gallery_end_ignore

# %%
# Summary
# -------
#
# - The backward of an exchange is an exchange that can be differentiated again, to any order.
# - Compute forces with ``torch.autograd.grad(energies.sum(), pos)`` on all ranks at once.
#   ``graph.sum(energies)`` has the same gradient.
# - If the halo is filled outside autograd, the energy is right but the forces are wrong, and no
#   error is raised.
# - Training with a loss on forces has the same losses and gradients as in one process, to rounding.
#
# Next: :doc:`tensor parallelism when nothing divides <06_nothing_divides>`.
