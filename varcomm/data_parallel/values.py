"""Parameters and buffers of all ranks: what is asked of them, and how they become equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch

from varcomm.data_parallel.buckets import cut, gradient_dtype
from varcomm.errors import ArgumentError, DisagreementError
from varcomm.ops.broadcast import broadcast
from varcomm.ops.checks import checked_tensor
from varcomm.transport.engines import engine_for, peers_answer
from varcomm.transport.group import Group

__all__ = [
    "check_backward",
    "check_dtype",
    "check_entry",
    "check_mode",
    "check_module",
    "check_value",
    "check_writable",
    "compare",
    "make_equal",
]


def check_module(module: torch.nn.Module) -> None:
    """Raise if it cannot be called."""
    if getattr(getattr(module, "forward", None), "__func__", None) is torch.nn.Module.forward:
        raise ArgumentError(
            f"{type(module).__name__} has no forward, and no output by which all ranks would come "
            "to the sums. Pass the module that calls those in it, or each of them."
        )


def check_mode() -> None:
    """Raise if no gradients can be taken of what is made now."""
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            "in torch.inference_mode(), no gradients can be taken of the parameters. Leave that "
            "mode, or use torch.no_grad()."
        )


def check_value(value: torch.Tensor, what: str, group: Group) -> None:
    """Raise unless a parameter or buffer can be sent."""
    if torch.nn.parameter.is_lazy(value):
        raise ArgumentError(f"{what} is not initialised yet. Call the model once before.")
    checked_tensor(value, "", what)
    if value.is_inference():
        raise ArgumentError(
            f"{what} was made in inference mode, and cannot be written to. Register its clone()."
        )
    engine_for(group, value.device)


def check_writable(value: torch.Tensor, what: str) -> None:
    """Raise if elements of a parameter or buffer are one in memory."""
    if any(s == 0 and n > 1 for n, s in zip(value.shape, value.stride(), strict=True)):
        raise ArgumentError(
            f"{what} is an expanded view, and cannot be written to. Register its clone()."
        )


def compare(what: str, given: Sequence[Mapping[str, Mapping[str, object]]]) -> None:
    """Raise on every rank, if what ranks have told differs; without communication.

    Each tells for some words of named things; all words are the same.
    """
    for word in given[0]:
        for rank, own in enumerate(given):
            for name in dict.fromkeys([*given[0][word], *own[word]]):
                here, there = given[0][word].get(name, "none"), own[word].get(name, "none")
                if here != there:
                    raise DisagreementError(
                        f"{what}: ranks disagree on {word}: for {name!r}, rank 0 has {here}; rank "
                        f"{rank} has {there}."
                    )


def make_equal(values: Iterable[torch.Tensor], group: Group, bucket_bytes: int) -> None:
    """Overwrite tensors by those of rank 0; collective."""
    given = [value.detach() for value in values]
    for members in cut(given, range(len(given)), bucket_bytes):
        mine = [given[index] for index in members]
        # where no rank 0 answers, it is taken to have these values
        from_here = group.rank == 0 or not peers_answer(group)
        flat = torch.cat([value.reshape(-1) for value in mine]) if from_here else None
        flat = broadcast(flat, group=group.process_group)
        for value, part in zip(mine, flat.split([v.numel() for v in mine]), strict=True):
            if not from_here:
                value.copy_(part.view(value.shape))


def check_backward(
    parameters: Iterable[tuple[str, torch.Tensor]], refuse: Callable[[str], NoReturn]
) -> None:
    """Raise if what a backward brings to named parameters cannot be summed; at its beginning."""
    if torch.is_grad_enabled():
        refuse(
            "backward(create_graph=True) would need derivatives of what has been summed. Take "
            "torch.autograd.grad(..., create_graph=True) for forces and penalties, and "
            "backward() from the loss that is made of them."
        )
    for name, parameter in parameters:
        if parameter._post_accumulate_grad_hooks:
            refuse(
                f"parameter {name!r} has a hook of register_post_accumulate_grad_hook, which "
                "would run before the gradient is summed. Do its work after backward()."
            )


def check_entry(reached: bool, name: str, refuse: Callable[[str], NoReturn]) -> None:
    """Raise if a named parameter gets a gradient in a backward to which other ranks may not come.

    `reached` tells whether that backward comes by what the output of the module is tied to.
    """
    if not reached:
        refuse(
            f"parameter {name!r} gets a gradient in a backward that does not come by the module's "
            "output, as that of a rank with no rows would not get here. Call the module, of which "
            "the loss is to depend on a tensor that is returned and seen, and backward() without "
            "inputs=."
        )


def check_dtype(
    gradient: torch.Tensor,
    parameter: torch.Tensor,
    name: str,
    before: str,
    refuse: Callable[[str], NoReturn],
) -> None:
    """Raise if the gradient of a named parameter is of another dtype than was agreed `before`."""
    dtype = gradient_dtype(parameter)
    if gradient.dtype != dtype:
        refuse(
            f"the gradient of parameter {name!r} is of {gradient.dtype}, and not of {dtype} as on "
            f"the other ranks. Set its grad_dtype before {before}."
        )
