"""What a CUDA graph can capture without a step before it: plans are complete once they are made."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.pretended import looks, pretended
from tests.gpu.scenarios import SCENARIOS
from tests.transport.strict_nccl import strict_nccl


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":  # messages of strict_nccl arrive in any order
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def first_and_second(rank, ranks, name):
    """Return the looks and the operators of the first two steps."""
    with strict_nccl(["cuda"]), pretended() as device:
        step, found = SCENARIOS[name].make(device, rank, ranks), []
        for _ in range(2):
            with looks() as own, Operators() as operators:
                step()
            found.append((own, operators.names))
    return found


PLANS = [
    "plan_made_on_the_cpu_and_moved",
    *("plan_started_and_its_adjoint", "plan_of_several_tensors", "moves_between_partitions"),
    "message_passing",
]


@pytest.mark.parametrize(
    "name", [PLANS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PLANS[1:])]
)
def test_a_first_step_plans_nothing(worlds, name):
    for first, second in worlds.run(2, first_and_second, 2, name):
        assert first[0] == []
        if name != "moves_between_partitions":  # ranks compare its first two calls
            assert first == second
