"""Wrong use of both losses: an error that names what, where, and how to mend it."""

import pytest
import torch

import varcomm
from tests.tensor_parallel.cross_entropy_cases import drawn
from varcomm import ArgumentError, DisagreementError
from varcomm.tensor_parallel.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)

SIZES = [2, 3]


def refused(rank, arguments, linear):
    """Call with some arguments exchanged; all ranks are wrong alike, and none communicates."""
    given = {
        "target": torch.tensor([4, 0, -100]),
        "sizes": SIZES,
    }
    if linear:
        given |= {"hidden": drawn(3, 4), "weight": drawn(SIZES[rank], 4)}
    else:
        given |= {"logits": drawn(3, SIZES[rank])}
    if isinstance(arguments.get("logits"), torch.dtype):
        arguments = {"logits": torch.ones(3, SIZES[rank]).to(arguments["logits"])}
    fn = linear_cross_entropy if linear else vocab_parallel_cross_entropy
    try:
        fn(**(given | arguments))
    except ArgumentError as error:
        return str(error)
    return "no error"


def assert_refused(worlds, message, linear=False, **arguments):
    name = "linear_cross_entropy" if linear else "vocab_parallel_cross_entropy"
    for rank, text in enumerate(worlds.run(2, refused, arguments, linear)):
        assert text.startswith(f"{name} on rank {rank} of 2: ")
        assert message in text


BOTH = [
    ({"sizes": [2, 3, 1]}, "sizes must have one entry a rank, 2; got 3: [2, 3, 1]."),
    ({"sizes": [5]}, "sizes must have one entry a rank, 2; got 1: [5]."),
    ({"sizes": [2.0, 3.0]}, "sizes must hold ints; got [2.0, 3.0], where entry 0 is 2.0"),
    ({"sizes": [-1, 6]}, "sizes must not be negative; got [-1, 6]."),
    (
        {"target": torch.tensor([0, 5, 1])},
        "target[1] is 5, which is no class, 0...4, and not ignore_index, -100; so are 0 more.",
    ),
    (
        {"target": torch.tensor([-1, 5, -100]), "ignore_index": 3},
        "target[0] is -1, which is no class, 0...4, and not ignore_index, 3; so are 2 more.",
    ),
    (
        {"target": torch.tensor([4, 0, 1], dtype=torch.int32)},
        "target must be of torch.int64; got torch.int32. Convert: target.to(torch.int64).",
    ),
    (
        {"target": torch.ones(3, 5) / 5},
        "target must be of torch.int64; got torch.float32. Distributions over classes are not "
        "supported: pass the ids of classes.",
    ),
    ({"target": [4, 0, 1]}, "target must be a torch.Tensor; got list."),
    (
        {"target": torch.tensor([[4, 0, 1]])},
        "target must have the shape (3,), an id for each token (classes are along the last "
        "dimension of logits); got (1, 3).",
    ),
    (
        {"target": torch.zeros(3, dtype=torch.int64, device="meta")},
        "target must be on cpu; it is on meta.",
    ),
    ({"label_smoothing": 1.0}, "label_smoothing must be a number in [0, 1); got 1.0."),
    ({"label_smoothing": -0.1}, "label_smoothing must be a number in [0, 1); got -0.1."),
    ({"label_smoothing": float("nan")}, "label_smoothing must be a number in [0, 1); got nan."),
    ({"label_smoothing": True}, "label_smoothing must be a number in [0, 1); got True."),
    ({"label_smoothing": "0.1"}, "label_smoothing must be a number in [0, 1); got '0.1'."),
    ({"z_loss": -1e-4}, "z_loss must be a finite number of at least 0; got -0.0001."),
    ({"z_loss": float("inf")}, "z_loss must be a finite number of at least 0; got inf."),
    ({"z_loss": None}, "z_loss must be a finite number of at least 0; got None."),
    ({"ignore_index": -100.0}, "ignore_index must be an int; got -100.0."),
    ({"reduction": "avg"}, "reduction must be one of 'none', 'mean', 'sum'; got 'avg'."),
    ({"smooth_over": "none"}, "smooth_over must be one of 'all', 'wrong'; got 'none'."),
]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("arguments", "message"), BOTH)
def test_arguments_of_both(worlds, arguments, message, linear):
    assert_refused(worlds, message, linear, **arguments)


def class_weights(name):
    return [
        ({name: torch.ones(2)}, f"{name} must have one entry a class, 5 (sizes [2, 3]); got the"),
        ({name: torch.ones(5, 1)}, "got the shape (5, 1). Pass the whole one on all ranks."),
        (
            {name: torch.ones(5, dtype=torch.int64)},
            f"{name} must be of floats of 2 bytes or more; got torch.int64.",
        ),
        (
            {name: torch.tensor(1.0)},
            f"{name} must have at least 1 dimensions; got the shape ().",
        ),
        (
            {name: torch.ones(5, requires_grad=True)},
            f"{name} gets no gradient. Pass {name}.detach().",
        ),
        ({name: torch.ones(5, device="meta")}, f"{name} must be on cpu; it is on meta."),
        ({name: [1.0] * 5}, f"{name} must be a torch.Tensor; got list."),
    ]


@pytest.mark.parametrize(("arguments", "message"), class_weights("weight"))
def test_weights_of_classes(worlds, arguments, message):
    assert_refused(worlds, message, **arguments)


@pytest.mark.parametrize(("arguments", "message"), class_weights("class_weight"))
def test_weights_of_classes_beside_a_head(worlds, arguments, message):
    assert_refused(worlds, message, True, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"logits": drawn(3, 5)},
            "the last dimension of logits, of shape (3, 5), is for 5 classes, but sizes[",
        ),
        (
            {"logits": torch.int64},
            "logits must be of floats of 2 bytes or more; got torch.int64.",
        ),
        (
            {"logits": torch.float8_e4m3fn},
            "logits must be of floats of 2 bytes or more; got torch.float8_e4m3fn.",
        ),
        ({"logits": torch.tensor(1.0)}, "logits must have at least 1 dimensions; got the shape ()"),
        (
            {"logits": drawn(3, 0), "sizes": [0, 0]},
            "sizes sum to 0: there are no classes (sizes [0, 0]).",
        ),
    ],
)
def test_logits(worlds, arguments, message):
    assert_refused(worlds, message, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": drawn(5, 4)}, "weight, of shape (5, 4), is for 5 classes, but sizes["),
        (
            {"hidden": drawn(3, 5)},
            "weight must have the shape (sizes[rank], 5), for hidden of shape (3, 5); got (",
        ),
        ({"weight": drawn(4)}, "weight must have at least 2 dimensions; got the shape (4,)."),
        (
            {"weight": drawn(2, 2, 4)},
            "weight must have the shape (sizes[rank], 4), for hidden of shape (3, 4); got (2, 2, ",
        ),
        (
            {"hidden": drawn(3, 4).float()},
            "weight must have the dtype of hidden, torch.float32; got torch.float64.",
        ),
        ({"bias": drawn(5)}, ", an entry for each row of weight; got (5,)."),
        ({"hidden": torch.tensor(1.0)}, "hidden must have at least 1 dimensions; got the shape ()"),
        ({"chunk_rows": 0}, "chunk_rows must be a positive int; got 0."),
        ({"chunk_rows": 1.5}, "chunk_rows must be a positive int; got 1.5."),
        ({"sequence_sizes": [1, 1]}, "has 3 rows along dim 0, but sequence_sizes["),
        ({"sequence_sizes": [3]}, "sequence_sizes must have one entry a rank, 2; got 1: [3]."),
        ({"sequence_sizes": [3, 3]}, "target must have the shape (6,), an id for each token"),
    ],
)
def test_heads(worlds, arguments, message):
    assert_refused(worlds, message, True, **arguments)


def bias_of_another_dtype(rank):
    try:
        linear_cross_entropy(
            drawn(3, 4), drawn(2, 4), torch.tensor([0, 1, 3]), [2, 2], bias=torch.ones(2)
        )
    except ArgumentError as error:
        return str(error)


def test_a_bias_of_another_dtype(worlds):
    for text in worlds.run(2, bias_of_another_dtype):
        assert "bias must have the dtype of hidden, torch.float64; got torch.float32." in text


def no_wrong_class(rank):
    options = {"label_smoothing": 0.1, "smooth_over": "wrong"}
    try:
        vocab_parallel_cross_entropy(drawn(2, 1 - rank), torch.tensor([0, 0]), [1, 0], **options)
    except ArgumentError as error:
        return str(error)


def test_no_wrong_class_to_smooth_over(worlds):
    for text in worlds.run(2, no_wrong_class):
        assert "there is one class, and no wrong one to smooth over." in text


def no_logits_on_one_rank(rank):
    try:
        vocab_parallel_cross_entropy(drawn(2, 3) if rank else None, torch.tensor([0, 0]))
    except ArgumentError as error:
        return str(error)


def test_asking_for_sizes_fails_on_all_ranks(worlds):
    first, second = worlds.run(2, no_logits_on_one_rank)
    assert first == second
    assert "which asks for sizes: refused on rank 0 of 2" in first


def compared(rank, what):
    logits, target = drawn(3, 3), torch.tensor([0, 1, 5])
    given = {
        "values of target": {"target": torch.tensor([0, 1, 5 - rank])},
        "shape of target": {"logits": drawn(3 + rank, 3), "target": target.new_zeros(3 + rank)},
        "options": {"label_smoothing": 0.1 * rank},
        "sizes": {"sizes": [3, 3 + rank], "logits": drawn(3, 3 + rank)},
        "weights": {"weight": None if rank else torch.ones(6)},
    }[what]
    arguments = {"logits": logits, "target": target, "sizes": [3, 3]} | given
    try:
        with varcomm.debug():
            vocab_parallel_cross_entropy(**arguments)
    except DisagreementError as error:
        return str(error)


@pytest.mark.parametrize(
    "what", ["values of target", "shape of target", "options", "sizes", "weights"]
)
def test_ranks_that_disagree_under_debug(worlds, what):
    first, second = worlds.run(2, compared, what)
    assert first == second
    assert first.startswith(f"vocab_parallel_cross_entropy: ranks disagree on {what}: rank 0 has")


def wrong_on_one_rank(rank):
    try:
        with varcomm.debug():
            linear_cross_entropy(drawn(2, 4), drawn(2, 4 + rank), torch.tensor([0, 3]), [2, 2])
    except (ArgumentError, DisagreementError) as error:
        return type(error).__name__, str(error)


def test_an_error_of_one_rank_is_one_of_all_under_debug(worlds):
    (kind, told), (own_kind, own) = worlds.run(2, wrong_on_one_rank)
    assert kind == own_kind == "DisagreementError"
    assert told == own
    assert "linear_cross_entropy: not called, since on rank 1: " in told
    assert "weight must have the shape (sizes[rank], 4)" in told
