"""``Calculator`` for ASE: energies, forces and stress of one structure split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

import numpy as np
import torch

from varcomm.errors import ArgumentError, MissingModuleError
from varcomm.graph import PartitionedGraph, assign, distribute, radius
from varcomm.transport.launch import Ranks
from varcomm.transport.world import init

try:  # varcomm.graph has found PyTorch Geometric
    from ase import Atoms
    from ase.calculators import calculator as base
    from ase.geometry import complete_cell
    from ase.stress import full_3x3_to_voigt_6_stress
    from torch_geometric.data import Data
except ModuleNotFoundError as error:
    raise MissingModuleError("varcomm.ase needs ASE: pip install ase") from error

__all__ = ["Calculator"]

Array = np.ndarray[Any, Any]
Call = Callable[[torch.nn.Module, PartitionedGraph], torch.Tensor]


class Calculator(base.Calculator):
    """Calculator of ASE that partitions one structure over local ranks, which it starts and keeps.

    The ranks start at the first calculation. They exit after :meth:`close`, at the end of a
    ``with`` block, or when this process exits. Each call computes energy, free energy, energies and
    forces. The call also computes stress if periodic atoms have a cell of three vectors.

    The model runs on the graph of :func:`varcomm.graph.radius`, in fp64: ``pos``, ``edge_index``,
    ``shift`` and displacements ``edge_attr``, with ``numbers``, (n,), and ``cell``, (3, 3).

    Parameters
    ----------
    make_model : callable
        Called once on each rank. Returns the same torch.nn.Module on all ranks. The calculator
        moves the model to the rank's device and, with ``adapt``, prepares the model by
        :func:`varcomm.graph.distribute`.
    cutoff : float, optional
        Largest distance between neighbours, in Angstrom; None reads ``model.cutoff``.
    ranks : int
        Number of local ranks.
    skin : float
        Distance in Angstrom by which the halo exceeds the cutoff. Owners and halo are kept while no
        atom has moved by more than half of the skin.
    call : callable, optional
        ``call(model, graph)`` returns the energies in eV of the rank's atoms, floats of shape (n,),
        differentiable with respect to ``graph.pos``. None means ``model(graph)``.
    adapt : bool
        False leaves out :func:`varcomm.graph.distribute`. Use False for models in TorchScript, such
        as MACE, that have no layers of PyTorch Geometric and no norms over atoms.
    backend : str or None
        As in :func:`varcomm.launch`; with ``"nccl"`` each rank computes on its own GPU.
    timeout : float or timedelta
        Seconds for one calculation.

    Raises
    ------
    ArgumentError
        If positions are not finite, or the cell of periodic atoms is singular.
    LaunchError
        If a rank fails; a later calculation starts new ranks.

    See Also
    --------
    varcomm.graph.partition, varcomm.graph.distribute

    Examples
    --------
    >>> import torch, varcomm
    >>> from ase import Atoms
    >>> class Springs(torch.nn.Module):
    ...     def forward(self, graph):
    ...         energy = (graph.edge_attr.norm(dim=1) - 1) ** 2 / 4
    ...         return torch.zeros_like(graph.pos[:, 0]).index_add(0, graph.edge_index[1], energy)
    >>> atoms = Atoms("H3", [[0, 0, 0], [1, 0, 0], [2.5, 0, 0]])
    >>> with varcomm.ase.Calculator(Springs, cutoff=2.0, ranks=2) as atoms.calc:
    ...     print(atoms.get_potential_energy(), atoms.get_forces()[1:, 0])
    0.125 [ 0.5 -0.5]
    """

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress"]  # noqa: RUF012

    def __init__(
        self,
        make_model: Callable[[], torch.nn.Module],
        cutoff: float | None = None,
        ranks: int = 4,
        *,
        skin: float = 0.5,
        call: Call | None = None,
        adapt: bool = True,
        backend: str | None = "gloo",
        timeout: float | timedelta = 300.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = Ranks(ranks, timeout, backend=backend)
        call = call or (lambda model, graph: model(graph))
        self._of_model, self._skin = (make_model, cutoff, skin, call, adapt), skin
        self._owner = np.zeros(0, np.int64)
        self._stood: Atoms | None = None  # the atoms when their owners were assigned

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks; a later calculation starts new ones."""
        self._ranks.close()

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = base.all_changes,
    ) -> None:
        """Compute all properties; ASE calls this method when the atoms have changed."""
        super().calculate(atoms, properties, system_changes)  # type: ignore[no-untyped-call]
        given: Any = self.atoms
        whole = _with_whole_cell(given)
        if not (is_near := self._is_near(whole)):
            data = Data(pos=torch.from_numpy(whole.get_positions(wrap=True)))
            self._owner = assign(data, self._ranks.world_size, "rcb").numpy()
            self._stood = whole
        task = whole, self._owner, is_near
        if None in (parts := self._ranks.run(_calculated, *task)):
            self._ranks.run(_set_up, *self._of_model)
            parts = self._ranks.run(_calculated, *task)
        energies, forces, slopes = zip(*parts, strict=True)
        place = np.argsort(np.argsort(self._owner, kind="stable"))
        of_atoms, of_forces = (np.concatenate(each)[place] for each in (energies, forces))
        energy = float(of_atoms.sum())
        self.results = {"energy": energy, "free_energy": energy}
        self.results |= {"energies": of_atoms, "forces": of_forces}
        if whole.pbc.any() and given.cell.rank == 3:
            self.results["stress"] = full_3x3_to_voigt_6_stress(sum(slopes) / whole.get_volume())

    def _is_near(self, atoms: Atoms) -> bool:
        """Return whether atoms are within half the skin of where the cell alone moved them."""
        last = self._stood
        if last is None or len(last) != len(atoms) or (last.pbc != atoms.pbc).any():
            return False
        moved = atoms.positions - last.positions @ np.linalg.solve(last.cell, atoms.cell)
        return bool(2 * np.linalg.norm(moved, axis=1).max(initial=0.0) <= self._skin)


def _with_whole_cell(atoms: Atoms) -> Atoms:
    """Return atoms without other attributes, in a cell of three independent vectors."""
    cell = complete_cell(atoms.cell) if atoms.pbc.any() else np.eye(3)
    if not atoms.cell.any(1)[atoms.pbc].all() or np.linalg.matrix_rank(cell) < 3:
        raise ArgumentError(f"periodic atoms need independent cell vectors; got {atoms.cell!r}.")
    return Atoms(atoms.numbers, atoms.positions, cell=cell, pbc=atoms.pbc)


@dataclass
class _Part:
    """The model of a rank, and the graph of its last calculation."""

    model: torch.nn.Module
    cutoff: float
    skin: float
    call: Call
    adapt: bool
    graph: PartitionedGraph | None = None


# The part of this process, which is a rank of one calculator.
_part: _Part | None = None


def _set_up(rank: int, make_model: Any, cutoff: Any, *more: Any) -> None:
    global _part
    model = make_model().to(init().device)
    if cutoff is None and (cutoff := getattr(model, "cutoff", None)) is None:
        raise ArgumentError("cutoff is missing, and the model has no attribute cutoff. Pass one.")
    _part = _Part(model, cutoff, *more)


def _calculated(
    rank: int, atoms: Atoms, owner: Array, is_near: bool
) -> tuple[Array, Array, Array] | None:
    """Return energies, forces and the part of the strain derivative; None before the set-up."""
    if (part := _part) is None:
        return None
    ids = (owner == rank).nonzero()[0]
    numbers, own, cell, index = (
        torch.from_numpy(each).to(init().device)
        for each in (atoms.numbers[ids], atoms.positions[ids], atoms.cell.array, ids)
    )
    strain = torch.zeros_like(cell).requires_grad_()
    stretch = torch.eye(3, dtype=cell.dtype, device=cell.device) + (strain + strain.T) / 2
    pos, cell, pbc = own.requires_grad_() @ stretch, cell @ stretch, atoms.pbc.tolist()
    last = part.graph if is_near else None
    graph = radius(pos, part.cutoff, cell=cell, pbc=pbc, skin=part.skin, previous=last, ids=index)
    nodes = replace(graph.nodes, attributes={"pos": pos, "numbers": numbers})
    part.graph = replace(graph, node_shards={None: nodes}, attributes={"cell": cell})
    model = distribute(part.model, part.graph) if part.adapt else part.model
    energies = part.call(model, part.graph)
    if (shape := getattr(energies, "shape", type(energies).__name__)) != (len(ids),):
        text = f"the model must return an energy per atom, ({len(ids)},) on rank {rank}"
        raise ArgumentError(f"{text}; got {shape}.")
    slopes = torch.autograd.grad(energies.double().sum(), [own, strain])
    found = energies.detach().double(), -slopes[0], slopes[1]
    return tuple(each.cpu().numpy() for each in found)  # type: ignore[return-value]
