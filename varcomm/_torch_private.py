"""Private names of torch: varcomm uses them in this file and in no other.

Each entry says what the name is for, why no public name serves, and where torch defines it. Links
are to torch 2.13. ``python tests/test_torch_private.py`` uses each name; it needs no other package
than torch, and passes on torch 2.11.0, 2.12.1, 2.13.0 and 2.14.1. No entry needs a branch for one
of these versions. The source of 2.15.0 has each name; the file has not run there. Protocols that
torch calls by a dunder name, such as ``__torch_dispatch__``, are not listed: torch documents them,
or promises them to other libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# --- Tracing and transforms.

# Whether a transform of torch.func runs. A collective then needs the slower form of its rule, and
# agreements leave the thread. torch.func has no function for it.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# `FunctionalTensorMode`: the mode in which AOTAutograd records. Operators get the token of the last
# call there, so that Inductor keeps their order in generated code; an effect alone does not on
# torch 2.13 (tests/ops/test_compiled.py, test_order_of_calls_in_compiled_code).
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_subclasses/functional_tensor.py

# `TorchDispatchMode`: sees all operators of backward, which TorchFunctionMode does not see.
# simulate counts their bytes. torch's notes on "Extending PyTorch" import it from this place.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_python_dispatch.py

# Lets an operator run on a tensor whose class has __torch_dispatch__, with autograd. A field of a
# grid refuses operators there, and its local tensor is an alias of it. The public form,
# Tensor.__torch_dispatch__, leaves autograd out.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp
WithoutDispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch


def register_effect(op: Any) -> None:
    """Keep an operator in a graph even if its result is not used: another rank waits for it.

    The public form is a method of torch.library.custom_op, whose operators take more time per call.
    A schema that changes an argument would be wrong here. The type of the effect is in the
    function's own module.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/library.py
    """
    torch.library._register_effectful_op(op, cast(Any, torch.library).EffectType.ORDERED)


def let_vary(tensor: Tensor, *dims: int) -> Tensor:
    """Let compiled code take a tensor whose sizes along these dimensions vary.

    The mark of ``torch._dynamo.maybe_mark_dynamic``, whose import takes seconds. Without it, the
    compiler makes constants of the shapes of tensors that a module holds.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/decorators.py
    """
    cast(Any, tensor)._dynamo_weak_dynamic_indices = set(dims)
    return tensor


def unpack_by_unbind(kind: type[Tensor]) -> None:
    """Let compiled code unpack tensors of a class by their own rule of ``unbind``.

    Eager code does. Compiled code makes rows of ``row, col = x`` without asking
    ``__torch_function__``, so they lack all attributes, and torch has no hook for it.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/variables/tensor.py
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/variables/torch_function.py
    """
    # its import takes seconds, so it is for the packages that import it anyway
    from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable as Variable

    rows = Variable.unpack_var_sequence

    def unpack_var_sequence(self: Any, tx: Any, idxes: Sequence[int] | None = None) -> Any:
        if issubclass(self.class_type, kind):
            return self.call_method(tx, "unbind", [], {}).unpack_var_sequence(tx)
        return rows(self, tx, idxes)

    cast(Any, Variable).unpack_var_sequence = unpack_var_sequence


# --- Tensors and modules.


def version_of(tensor: Tensor) -> int:
    """Return the number of changes in place; inference tensors do not count them.

    A tensor in a message must not change. torch.autograd.graph can only increase the number.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_variable.cpp
    """
    return 0 if tensor.is_inference() else tensor._version


def assert_on_device(holds: Tensor, text: str) -> None:
    """End the program with a text unless a condition holds; the host does not wait for a GPU.

    Public functions that fail on a GPU, such as an index out of range, print no text of ours. A
    GPU takes at most 254 bytes of text.
    https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/TensorCompare.cu
    """
    torch._assert_async(holds, text.encode()[:254].decode(errors="ignore"))


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Make a call when the backward that computes here has ended, or at once if none computes.

    DistributedDataParallel ends its step in this way, or calls its hooks after the last node, for
    the first step of a static graph. torch has no public form.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/engine.cpp
    """
    if torch._C._current_autograd_node() is None:
        call()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(call)


class Module(nn.Module):
    """Module that notices when torch may have replaced its parameters, as ``to_empty`` does.

    torch has no hook for it: ``to_empty`` of a module converts all modules in it by this method.
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
    """

    def after_conversion(self) -> None:
        """Do what new parameters need, after torch has replaced the old ones."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.after_conversion()
        return self


# --- Process groups.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/distributed_c10d.py


def group_exists(process_group: dist.ProcessGroup) -> bool:
    """Return whether torch.distributed still has a group; each call of a collective asks.

    The public get_process_group_ranks makes a list of the ranks, or fails.
    """
    return process_group in distributed_c10d._world.pg_group_ranks


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the group that a graph names, or None; torch has no public list of groups."""
    named = distributed_c10d._world.pg_names.items()
    return next((process_group for process_group, each in named if each == name), None)


def timeout_of(process_group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return the timeout of calls, or None for a backend without options.

    ``ProcessGroup.set_timeout`` is public; torch has no function that returns the timeout.
    """
    options = process_group._get_backend(device).options
    return None if options is None else options._timeout


def make_group(
    ranks: Sequence[int], group_rank: int, backends: str, name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a process group of world ranks, by a call of these alone.

    ``new_group(use_local_synchronization=True)`` derives its name from the groups that a rank is
    in, so ranks in different numbers of groups never meet. `name` is equal on all members, and new.

    In a world that is bound to GPUs, torch splits NCCL's communicator of the world, which all ranks
    of the world must do together. So the world is unbound meanwhile, and the group gets a
    communicator of its own at its first call.
    """
    world = distributed_c10d._world
    everyone = cast(dist.ProcessGroup, dist.group.WORLD)
    _, store = world.pg_map[everyone]
    backend, group_name = distributed_c10d.Backend(backends), cast(Any, name)
    bound, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks), group_rank, [*ranks], backend, store, group_name, timeout=timeout
        )
    finally:
        everyone.bound_device_id = bound
    process_group = cast(dist.ProcessGroup, made)
    world.pg_group_ranks[process_group] = {rank: place for place, rank in enumerate(ranks)}
    return process_group
