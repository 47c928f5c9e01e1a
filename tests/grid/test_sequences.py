"""Tokens that are split over ranks: torch's layers, and unmodified models of transformers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import varcomm as vc
from tests.grid.comparing import apart
from tests.worlds import on_ranks, refused_alike

TOKENS = 11
SIZES = {1: [11], 3: [4, 0, 7]}
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=torch.float64)
PADDING = torch.arange(TOKENS) > torch.tensor([[10], [7]])  # of two samples


def encoder(**how):
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, **how)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder():
    layer = nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True)
    return nn.TransformerDecoder(layer, 2)


def attention():
    return nn.MultiheadAttention(16, 4, batch_first=True)


def grouped(linear, x):
    """Attend with four heads of queries, two of keys and values, to the tokens before."""
    q, k, v = linear(x).split([16, 8, 8], -1)
    q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


LAYERS = {
    "encoder": (encoder, lambda m, x: m(x)),
    "encoder with norms first": (lambda: encoder(norm_first=True), lambda m, x: m(x)),
    "causal encoder": (encoder, lambda m, x: m(x, mask=CAUSAL, is_causal=True)),
    "padded encoder": (encoder, lambda m, x: m(x, mask=CAUSAL, src_key_padding_mask=PADDING)),
    "encoder in evaluation": (
        lambda: encoder().eval(),
        lambda m, x: m(x, src_key_padding_mask=PADDING),
    ),
    "decoder": (decoder, lambda m, x: m(x, x[:, :5].sin(), tgt_mask=CAUSAL, tgt_is_causal=True)),
    "shown weights": (attention, lambda m, x: torch.cat([*m(x, x.sin(), x)], -1)),
    "further keys": (
        lambda: nn.MultiheadAttention(
            16, 4, batch_first=True, add_bias_kv=True, add_zero_attn=True
        ),
        lambda m, x: torch.cat([*m(x, x.sin(), x)], -1),
    ),
    "no weights": (attention, lambda m, x: m(x, x, x, need_weights=False)[0]),
    "grouped queries": (lambda: nn.Linear(16, 32), grouped),
}


@pytest.mark.parametrize("ranks", [1, 3])
@on_ranks()
def test_layers(rank, ranks):
    torch.set_num_threads(1)
    for name, (make, call) in LAYERS.items():
        torch.manual_seed(0)
        alone = make().double()
        split = copy.deepcopy(alone)
        whole = torch.randn(2, TOKENS, 16, dtype=torch.float64, requires_grad=True)
        expected = call(alone, whole)
        grid = vc.grid.Grid((TOKENS, 16), sizes=[SIZES[ranks], None])
        x = grid.scatter(whole.detach()).requires_grad_()
        out = call(split, x)
        for result in (expected, out):
            result.square().mean().backward()
        vc.data_parallel.sum_gradients(split)
        pairs = [(out, expected), (x.grad, whole.grad)]
        pairs += [
            (p.grad, q.grad) for p, q in zip(split.parameters(), alone.parameters(), strict=True)
        ]
        worst = max(apart(found, want) for found, want in pairs)
        assert worst < 1e-12, (name, worst)


@on_ranks(3)
def test_nested_tensors_are_refused(rank):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x = vc.grid.Grid((TOKENS, 16)).scatter(torch.zeros(2, TOKENS, 16, dtype=torch.float64))
    call = lambda: model(x, src_key_padding_mask=PADDING)  # noqa: E731
    refused_alike(vc.ArgumentError, call, "enable_nested_tensor=False")


@on_ranks(3)
def test_losses_of_tokens(rank):
    """Classes of samples: flat tokens, labels in other sizes, whole, or the only split operand."""
    torch.manual_seed(0)
    scores = torch.randn(2, TOKENS, 5, dtype=torch.float64)
    ids = torch.randint(5, (2, TOKENS))
    ids[0, 3] = -100

    def shifted(labels):
        return F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)

    grid = vc.grid.Grid((TOKENS,), sizes=[SIZES[3]])
    split_ids = grid.scatter(ids)
    weight = torch.arange(1.0, 6, dtype=torch.float64)
    for how in ({}, {"weight": weight}, {"reduction": "sum"}, {"label_smoothing": 0.1}):
        labels = ids.clamp_min(0) if "label_smoothing" in how else ids
        flat = labels.reshape(-1) if "label_smoothing" in how else shifted(labels)
        one = scores.clone().requires_grad_()
        expected = F.cross_entropy(one.reshape(-1, 5), flat, **how)
        expected.backward()
        split_flat = grid.scatter(labels)
        split_flat = split_flat.reshape(-1) if "label_smoothing" in how else shifted(split_flat)
        for target in (flat, split_flat):
            x = vc.grid.Grid((TOKENS, 5), sizes=[SIZES[3], None]).scatter(scores).requires_grad_()
            found = F.cross_entropy(x.reshape(-1, 5), target, **how)
            found.backward()
            assert apart(found, expected) < 1e-12, how
            assert apart(x.grad, one.grad) < 1e-12, how
    shares = scores.softmax(-1).reshape(-1, 5)
    x = vc.grid.Grid((TOKENS, 5), sizes=[SIZES[3], None]).scatter(scores)
    found = F.cross_entropy(x.reshape(-1, 5), shares)
    assert apart(found, F.cross_entropy(scores.reshape(-1, 5), shares)) < 1e-12
    ordinary = scores.reshape(-1, 5)
    found = F.cross_entropy(ordinary, split_ids.reshape(-1))
    assert apart(found, F.cross_entropy(ordinary, ids.reshape(-1))) < 1e-12
    classes = vc.grid.Grid((5,), sizes=[[2, 0, 3]]).scatter(ordinary)
    refused_alike(vc.ArgumentError, lambda: F.cross_entropy(classes, ids.reshape(-1)), "classes")


# --- Models of transformers

SMALL = {"vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FEED = {"intermediate_size": 53}
KEYS = {"num_key_value_heads": 2}
NONE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = {
    "Llama": ("LlamaConfig", SMALL | FEED | KEYS),
    "Llama, eager": ("LlamaConfig", SMALL | FEED | KEYS | {"attn_implementation": "eager"}),
    "Llama, a function of your own": (
        "LlamaConfig",
        SMALL | FEED | KEYS | {"attn_implementation": "own"},
    ),
    "Qwen3": ("Qwen3Config", SMALL | FEED | KEYS | {"head_dim": 8}),
    "Mistral with windows": ("MistralConfig", SMALL | FEED | KEYS | {"sliding_window": 3}),
    "GPT-2": (
        "GPT2Config",
        {"vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "BERT": ("BertConfig", SMALL | FEED | NONE),
}


def own_attention(module, query, key, value, mask, scaling=None, **_):
    out = F.scaled_dot_product_attention(
        query, key, value, mask, scale=scaling, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def language_model(name):
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.AttentionInterface.register("own", own_attention)
    kind, options = FAMILIES[name]
    torch.manual_seed(0)
    head = transformers.AutoModelForMaskedLM if kind == "BertConfig" else None
    head = head or transformers.AutoModelForCausalLM
    return head.from_config(getattr(transformers, kind)(**options)).double()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_models_of_transformers(worlds, ranks, name):
    pytest.importorskip("transformers")
    for failed in worlds.run(ranks, differences, name, SIZES[ranks], timeout=300):
        assert failed == []


def differences(rank, name, sizes):
    """Return what differs from one process: ids, labels and masks are split or whole."""
    torch.set_num_threads(1)
    alone, failed = language_model(name), []
    ids = torch.randint(131, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(ids % 7 == 0, -100)
    grid = vc.grid.Grid((TOKENS,), sizes=[sizes])
    for mask in (None, ~PADDING):
        alone.zero_grad()
        expected = alone(input_ids=ids, labels=labels, attention_mask=mask)
        expected.loss.backward()
        for targets in (labels, grid.scatter(labels)):
            split = language_model(name)
            out = split(input_ids=grid.scatter(ids), labels=targets, attention_mask=mask)
            out.loss.backward()
            vc.data_parallel.sum_gradients(split)
            pairs = {"logits": (out.logits, expected.logits), "loss": (out.loss, expected.loss)}
            for key, one in alone.named_parameters():
                if one.grad is not None:
                    pairs[key] = split.get_parameter(key).grad, one.grad
            apart_by = {key: apart(*pair) for key, pair in pairs.items()}
            # transformers computes the loss in fp32
            bound = {"loss": 1e-6}
            failed += [f"{k}: {v}" for k, v in apart_by.items() if not v < bound.get(k, 1e-6)]
    return failed
