"""Models of Hugging Face transformers, sharded without a plan: each step is that of one process."""

import contextlib
import copy
import importlib.util
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import varcomm
from tests.ops.comparing import Failures
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    clip_grad_norm_,
    parallelize,
    shard_spec,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
    ),
]

VOCABULARY, HIDDEN, INNER, LAYERS, POSITIONS = 131, 40, 53, 2, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)


def decoder(name, heads, kv_heads, **options):
    """A causal model of Llama's kind, from a random config."""
    import transformers

    given = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    if name == "Olmo2":
        del given["head_dim"]
    config = getattr(transformers, options.pop("config", f"{name}Config"))
    settings = {**SIZES, "max_position_embeddings": POSITIONS, **given, **options}
    return getattr(transformers, f"{name}ForCausalLM")(config(**settings))


def gpt2(heads):
    import transformers

    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": heads, "n_inner": INNER}
    sizes["n_positions"] = POSITIONS
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **ids, **NO_DROPOUT)
    return transformers.GPT2LMHeadModel(config)


def gpt_neox(heads):
    import transformers

    more = {"num_attention_heads": heads, "max_position_embeddings": POSITIONS}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, **more))


def bert(heads, name="Bert", kind="ForMaskedLM", **options):
    import transformers

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}{kind}")(
        config(
            **SIZES,
            num_attention_heads=heads,
            max_position_embeddings=POSITIONS,
            **dropout,
            **options,
        )
    )


def t5(heads, name="T5"):
    import transformers

    sizes = {"d_model": HIDDEN, "d_kv": 8, "d_ff": INNER, "num_layers": LAYERS, "num_heads": heads}
    more = {"feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **sizes, **more)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def vit(heads):
    import transformers

    sizes = {key: SIZES[key] for key in SIZES if key != "vocab_size"}
    image = {"image_size": 8, "patch_size": 4, "num_labels": 7}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **image, num_attention_heads=heads)
    )


MODELS = {
    "Llama, 5 heads": partial(decoder, "Llama", 5, 5),
    "Llama, 4 heads, 2 of keys, tied": partial(decoder, "Llama", 4, 2, tie_word_embeddings=True),
    "Llama, 5 heads, 1 of keys": partial(decoder, "Llama", 5, 1, attention_bias=True),
    "Llama, 2 heads": partial(decoder, "Llama", 2, 2),
    "Qwen2, 7 heads": partial(decoder, "Qwen2", 7, 7, hidden_size=56),
    "Qwen3, 4 heads, 2 of keys": partial(decoder, "Qwen3", 4, 2),
    "Gemma2, 4 heads, 2 of keys": partial(decoder, "Gemma2", 4, 2, query_pre_attn_scalar=8),
    "Gemma3, 4 heads, 1 of keys": partial(
        decoder, "Gemma3", 4, 1, config="Gemma3TextConfig", query_pre_attn_scalar=8
    ),
    "Mistral, 6 heads, 2 of keys": partial(decoder, "Mistral", 6, 2, sliding_window=4),
    "Mixtral, 5 heads": partial(
        decoder, "Mixtral", 5, 5, num_local_experts=4, experts_implementation="eager"
    ),
    "OLMo2, 5 heads": partial(decoder, "Olmo2", 5, 5),
    "Phi-3, 4 heads, 2 of keys": partial(decoder, "Phi3", 4, 2, pad_token_id=0),
    "GPT-NeoX, 5 heads": partial(gpt_neox, 5),
    "GPT-2, 5 heads": partial(gpt2, 5),
    "GPT-2, 2 heads": partial(gpt2, 2),
    "BERT, 5 heads": partial(bert, 5),
    "BERT, 2 heads": partial(bert, 2),
    "BERT decoder, 5 heads": partial(
        bert, 5, kind="LMHeadModel", is_decoder=True, add_cross_attention=True
    ),
    "RoBERTa, 5 heads": partial(bert, 5, "Roberta"),
    "ELECTRA, 5 heads": partial(bert, 5, "Electra", embedding_size=24),
    "T5, 5 heads": partial(t5, 5),
    "T5, 2 heads": partial(t5, 2),
    "mT5, 5 heads": partial(t5, 5, "MT5"),
    "ViT, 5 heads": partial(vit, 5),
    "ViT, 2 heads": partial(vit, 2),
}


@contextlib.contextmanager
def in_fp64():
    """Let models of fp64 stay in fp64, where transformers computes norms and losses in fp32."""
    to, softmax = torch.Tensor.to, nn.functional.softmax

    def wide_to(x, *args, **kwargs):
        narrow = torch.float32 in (*args, kwargs.get("dtype"))
        return x if x.dtype == torch.float64 and narrow else to(x, *args, **kwargs)

    def wide_softmax(x, dim=None, _stacklevel=3, dtype=None):
        return softmax(x, dim, _stacklevel, None if x.dtype == torch.float64 else dtype)

    patch = pytest.MonkeyPatch()
    with patch.context() as changed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers
        changed.setattr(torch.Tensor, "to", wide_to)
        changed.setattr(torch.Tensor, "float", lambda x: wide_to(x, torch.float32))
        changed.setattr(nn.functional, "softmax", wide_softmax)
        yield


def made(name, dtype=torch.float64):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    # so that norms, biases and padding matter; T5, whose scores are not scaled, amplifies
    # rounding: with 0.3, weights that differ by 2e-16 give 4e-9 in gradients of the fifth step
    spread = 0.1 if "T5" in name else 0.3
    for parameter in model.parameters():
        nn.init.normal_(parameter, float(parameter.dim() == 1), spread)
    return model


def batch(name, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=generator)
    if name.startswith("ViT"):
        pixels = torch.randn(2, 3, 8, 8, generator=generator, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.tensor([1, 3])}
    if name.startswith("BERT decoder"):
        read = torch.randn(2, 5, HIDDEN, generator=generator, dtype=dtype)
        return {"input_ids": ids, "labels": ids.roll(1, 1), "encoder_hidden_states": read}
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


LLAMA = "Llama, 4 heads, 2 of keys, tied"
STEPS = [(3, name, {}) for name in MODELS]
STEPS += [
    (ranks, name, {})
    for ranks in (1, 2, 5)
    for name in (LLAMA, "Qwen3, 4 heads, 2 of keys", "GPT-2, 5 heads", "T5, 5 heads")
]
STEPS += [(3, LLAMA, {option: False}) for option in ("replicate_kv", "gather_output")]


@pytest.mark.parametrize(("ranks", "name", "options"), STEPS)
@on_ranks(timeout=200)
def test_five_steps_are_those_of_one_process(rank, name, options):
    """Losses, gradients, their norm and weights of 5 steps with clipping."""
    failures, bound = Failures(), {"rtol": 1e-9, "atol": 1e-9}
    with in_fp64():
        one = made(name)
        model = parallelize(copy.deepcopy(one), **options)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, model)]
        for step in range(5):
            expected, loss = (m(**batch(name)).loss for m in (one, model))
            for optimizer, total in zip(optimizers, (expected, loss), strict=True):
                optimizer.zero_grad()
                total.backward()
            whole = dict(one.named_parameters())
            with failures.named(f"loss {step}"):
                torch.testing.assert_close(loss, expected, **bound)
            for key, parameter in model.named_parameters():
                if whole[key].grad is not None:
                    with failures.named(f"gradient {step} of {key}"):
                        own = part(parameter, whole[key].grad)
                        if parameter.grad is None and not own.numel():
                            continue  # T5's table of biases on a rank without heads
                        torch.testing.assert_close(parameter.grad, own, **bound)
            norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            with failures.named(f"norm {step}"), varcomm.debug():
                torch.testing.assert_close(clip_grad_norm_(model, 1.0), norm, **bound)
            for optimizer in optimizers:
                optimizer.step()
        for key, parameter in model.named_parameters():
            with failures.named(f"weight {key}"):
                own = part(parameter, whole[key].detach())
                torch.testing.assert_close(parameter.detach(), own, **bound)
        with failures.named("half of the weights are sharded"):
            sharded = (whole[key] for key, p in model.named_parameters() if shard_spec(p))
            assert 2 * count(sharded) > count(one.parameters())
    return failures


def part(parameter, whole):
    spec = shard_spec(parameter)
    return whole if spec is None else spec.shard(whole)


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


EXPERTS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(3, timeout=200)
def test_experts_of_any_width(rank, name, dtype):
    """The default products of experts accept multiples of 16 bytes only."""
    failures, eps = Failures(), torch.finfo(dtype).eps
    for width in (64, 53, 6, 2):  # with 2, a rank has no features
        torch.manual_seed(0)
        widths = {"intermediate_size": width}
        widths |= {"moe_intermediate_size": width} if name == "Qwen3Moe" else {}
        one = decoder(name, 5, 5, **EXPERTS[name], **widths, num_hidden_layers=1).to(dtype)
        model = parallelize(copy.deepcopy(one))
        assert model.config._experts_implementation == "grouped_mm"
        if width % 16:  # which one process does not accept
            one.set_experts_implementation("eager")
        expected, loss = (m(**batch(name)).loss for m in (one, model))
        expected.backward()
        loss.backward()
        whole = dict(one.named_parameters())
        with failures.named(width):
            torch.testing.assert_close(loss, expected, rtol=20 * eps, atol=0)
            for key, parameter in model.named_parameters():
                own, scale = part(parameter, whole[key].grad), whole[key].grad.abs().max()
                difference = (parameter.grad - own).abs().sum()
                assert difference <= 100 * eps * scale * max(own.numel(), 1), key
    return failures


@pytest.mark.parametrize(
    "name", ["Llama, 4 heads, 2 of keys, tied", "GPT-2, 2 heads", "T5, 5 heads", "Qwen2, 7 heads"]
)
@on_ranks(3, timeout=200)
def test_generate(rank, name):
    """Tokens are those of one process, with and without a cache, by beams, and with padding."""
    with in_fp64():
        one = made(name).eval()
        model = copy.deepcopy(parallelize(copy.deepcopy(one)))
        ids = batch(name)["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        ways = [{}, {"use_cache": False}, {"num_beams": 3}, {"attention_mask": mask}]
        for way in ways:
            asked = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, **way}
            assert torch.equal(model.generate(ids, **asked), one.generate(ids, **asked)), way


@pytest.mark.parametrize("name", ["Llama, 5 heads", "T5, 5 heads"])
@on_ranks(2, timeout=200)
def test_sampling_needs_the_same_seed_on_all_ranks(rank, name):
    with in_fp64():
        one = made(name).eval()
        model = parallelize(copy.deepcopy(one))
        ids = batch(name)["input_ids"]
        asked = {"max_new_tokens": 7, "do_sample": True, "pad_token_id": 0}
        tokens = []
        for each in (one, model):
            torch.manual_seed(3)
            tokens.append(each.generate(ids, **asked))
        assert torch.equal(*tokens)
        torch.manual_seed(rank)
        with pytest.raises(DisagreementError, match=r"torch\.manual_seed.* before generate"):
            model.generate(ids, **asked)
        model.generate(ids, **asked | {"do_sample": False})  # which draws no numbers
        with pytest.raises(DisagreementError, match="Pass the same inputs"):
            model.generate(ids + rank, **asked)


@pytest.mark.parametrize("name", ["Llama", "T5", "BERT"])
@on_ranks(2, timeout=200)
def test_training_with_dropout_is_refused(rank, name):
    import transformers

    torch.manual_seed(0)
    if name == "Llama":
        model, found = decoder("Llama", 4, 4, attention_dropout=0.1), "attention_dropout"
    elif name == "T5":
        model, found = t5(4), "dropout_rate"
        sizes = {k: v for k, v in model.config.to_dict().items() if k != "dropout_rate"}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    else:
        sizes = {"num_attention_heads": 4, "attention_probs_dropout_prob": 0.0}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **sizes))
        found = "hidden_dropout_prob"
    ids = batch(name)
    model = copy.deepcopy(parallelize(model))
    with pytest.raises(ArgumentError, match=rf"dropout \(.*Set {found} to 0"):
        model.train()(**ids)
    inner = model.get_encoder() if name == "T5" else model.base_model
    with pytest.raises(ArgumentError, match=rf"dropout \(.*Set {found} to 0"):
        inner(ids["input_ids"])
    model.eval()(**ids).loss.backward()
    for layer in model.train().modules():
        for key, value in vars(layer).items():
            if isinstance(value, float) and (key == "p" or "dropout" in key):
                setattr(layer, key, 0.0)
    model(**ids)
    for layer in list(model.modules()):
        for key, child in layer.named_children():
            if isinstance(child, nn.Dropout) and not hasattr(layer, "query"):  # which reads p
                setattr(layer, key, nn.Identity())
    model(**ids)


@pytest.mark.parametrize("name", [LLAMA, "GPT-2, 5 heads", "BERT, 5 heads", "Mixtral, 5 heads"])
@on_ranks(3, timeout=200)
def test_save_pretrained_writes_full_tensors(rank, name, tmp_path):
    """The files of a sharded model are those of the whole one."""
    import transformers

    folder = tmp_path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = made(name, torch.float32)
        model = parallelize(copy.deepcopy(one))
        model.save_pretrained(folder)
        again = getattr(transformers, type(one).__name__).from_pretrained(folder)
        assert one.state_dict().keys() == again.state_dict().keys()
        for key, value in one.state_dict().items():
            torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=0)
        model.save_pretrained(folder / "none", is_main_process=False)
        assert not (folder / "none").exists()
        with pytest.raises(ArgumentError, match="Leave out state_dict"):
            model.save_pretrained(folder, state_dict=model.state_dict())


@on_ranks(3, timeout=200)
def test_refusals(rank):
    name = "Qwen3, 4 heads, 2 of keys"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parallelize(made(name), gather_output=False)
        refused = model.generate, model.resize_token_embeddings, model.model._init_weights
        for call in refused:
            with pytest.raises(ArgumentError, match=r"parallelize|gather_output=True"):
                call(batch(name)["input_ids"])
        of_heads = {"multiple_of": 8}
        column = partial(ColumnParallelLinear.from_linear, **of_heads)
        row = partial(RowParallelLinear.from_linear, **of_heads)
        plan = {"*.[q]_proj": column, "*.o_proj": row}
        with pytest.raises(ArgumentError, match=r"q_norm.*'sequence'"):
            parallelize(made(name), plan)
        with pytest.raises(ArgumentError, match="cuts through heads of 8"):
            parallelize(made("Llama, 5 heads"), {"*.q_proj": "column", "*.o_proj": "row"})
        with pytest.raises(ArgumentError, match=r"shared\.weight and .*embed_tokens\.weight"):
            parallelize(made("T5, 5 heads"), {"lm_head": "column"})
        untied = t5(5).double()
        untied.lm_head.weight = nn.Parameter(untied.shared.weight.detach().clone())
        whole = partial(ColumnParallelLinear.from_linear, gather_output=True)
        for how in ("column", whole):
            model = parallelize(copy.deepcopy(untied), {"lm_head": how})
            if how is whole:
                torch.testing.assert_close(model(**batch("T5")).loss, untied(**batch("T5")).loss)
                continue
            model(**batch("T5") | {"labels": None, "decoder_input_ids": torch.tensor([[0], [0]])})
            with pytest.raises(ArgumentError, match=r"head 'lm_head'.*gather_output=True"):
                model(**batch("T5"))
        model = parallelize(
            made("Llama, 5 heads"), {"*.gate_proj": "column", "*.up_proj": "column"}
        )
        with in_fp64(), pytest.raises(ArgumentError, match=r"layers\.0\.mlp\.down_proj'.*'row'"):
            model(**batch("Llama"))
        parallelize(model, {"lm_head": "column"})  # a second plan
        with pytest.raises(ArgumentError, match="gather_output=True"):
            model.generate(batch("Llama")["input_ids"])
        with pytest.raises(ArgumentError, match="input_is_parallel=False"):
            parallelize(copy.deepcopy(untied), {"lm_head": "row"})(**batch("T5"))
        parts = {"model.embed_tokens": "embedding"}, [3, 3, 3]
        with pytest.raises(ArgumentError, match="every rank would start at 0"):
            parallelize(made("Llama, 5 heads"), *parts, sequence_dim=1)
        with pytest.raises(ArgumentError, match="Leave out gather_output"):
            parallelize(made("T5, 5 heads"), gather_output=False)
        for plan, words in (
            ({"*.mlp.up": "colwise"}, r"matches no layer .* like \['model.embed_tokens'"),
            ({"*.q_norm.weight": "colwise"}, "and no module"),
            ({"*.[qkv]_proj": "colwise"}, "could be cut through heads"),
        ):
            model = made(name)
            model._tp_plan = plan
            for layer in model.model.layers if "cut" in words else ():
                del layer.self_attn.head_dim
            with pytest.raises(ArgumentError, match=words):
                parallelize(model)
        with in_fp64(), pytest.raises(ArgumentError, match="q_norm has parameters per head"):
            parallelize(decoder("Cohere", 5, 5, use_qk_norm=True, pad_token_id=0, eos_token_id=1))
        heads = partial(ColumnParallelLinear.from_linear, multiple_of=8)
        with pytest.raises(ArgumentError, match=r"shards 'q_proj' and not '[kv]_proj' of LlamaAtt"):
            parallelize(made("Llama, 5 heads"), {"*.q_proj": heads})
        model = made("GPT-2, 5 heads")
        model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_: None)
        with pytest.raises(ArgumentError, match="Conv1D has hooks"):
            parallelize(model)
        del model.transformer.h[0].attn.num_heads
        with pytest.raises(ArgumentError, match=r"no attribute 'num_heads'\. Pass a plan"):
            parallelize(model)
        with pytest.raises(ArgumentError, match="has no tp_plan"):
            parallelize(nn.Linear(2, 2))
        for options in ({"sequence_sizes": [1, 1, 1]}, {"sequence_dim": 1}):
            with pytest.raises(ArgumentError, match="need a plan"):
                parallelize(made(name), **options)


@on_ranks(3, timeout=200)
def test_gradient_checkpointing_is_enabled_after_sharding(rank):
    failures = Failures()
    with in_fp64():
        for name in ("Llama, 5 heads", "Gemma2, 4 heads, 2 of keys"):
            one, early = made(name).train(), made(name)
            early.gradient_checkpointing_enable()
            with pytest.raises(ArgumentError, match=r"_enable\(\) after parallelize"):
                parallelize(early)
            model = parallelize(copy.deepcopy(one))
            model.gradient_checkpointing_enable()
            for each in (one, model):
                each(**batch(name)).loss.backward()
            whole = dict(one.named_parameters())
            for key, parameter in model.named_parameters():
                with failures.named(name, key):
                    own = part(parameter, whole[key].grad)
                    torch.testing.assert_close(parameter.grad, own, rtol=1e-9, atol=1e-9)
    return failures


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@on_ranks(3, timeout=200)
def test_parameters_drawn_again_are_those_of_one_process(rank):
    failures = Failures()
    for name in ("T5, 5 heads", "Gemma2, 4 heads, 2 of keys", LLAMA, "Llama, 5 heads, 1 of keys"):
        one = made(name)
        model = parallelize(copy.deepcopy(one))
        for each in (one, model):
            torch.manual_seed(5)
            each.apply(reset)
        whole = dict(one.named_parameters())
        for key, parameter in model.named_parameters():
            with failures.named(name, key):
                assert torch.equal(parameter, part(parameter, whole[key]))
    return failures


@on_ranks(2, timeout=200)
def test_a_model_of_two_towers(rank):
    """A plan for a model without one table of ids."""
    import transformers

    torch.manual_seed(0)
    sizes = SIZES | {"num_attention_heads": 5, "max_position_embeddings": POSITIONS}
    pixels = {
        key: sizes[key] for key in sizes if key not in ("vocab_size", "max_position_embeddings")
    }
    config = transformers.CLIPConfig(
        text_config=sizes | {"eos_token_id": 2},
        vision_config=pixels | {"image_size": 8, "patch_size": 4},
        projection_dim=7,
    )
    one = transformers.CLIPModel(config).double().eval()
    given = {"input_ids": batch("CLIP")["input_ids"], "pixel_values": batch("ViT")["pixel_values"]}
    plan = {"*.mlp.fc1": "column", "*.mlp.fc2": "row"}
    model = parallelize(copy.deepcopy(one), plan)
    expected, found = (m(**given, return_loss=True) for m in (one, model))
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits_per_image, expected.logits_per_image)
    table = {"text_model.embeddings.token_embedding": "embedding"}
    with pytest.raises(ArgumentError, match="every rank would start at 0"):
        parallelize(copy.deepcopy(one), table, [5, 4], sequence_dim=1)


def with_double_heads(name):
    """A causal model that calls a cross-entropy of its own, with a head of its own weight."""
    import transformers

    torch.manual_seed(0)
    if name == "Bart":
        sizes = {"vocab_size": VOCABULARY, "d_model": HIDDEN, "decoder_layers": LAYERS}
        more = {"decoder_ffn_dim": INNER, "decoder_attention_heads": 5, "is_decoder": True}
        return transformers.BartForCausalLM(
            transformers.BartConfig(**sizes, **more, tie_word_embeddings=False, dropout=0.0)
        )
    ids = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 5, "n_positions": POSITIONS}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **ids, **NO_DROPOUT)
    return transformers.GPT2DoubleHeadsModel(config)


@pytest.mark.parametrize("name", ["GPT-2", "Bart"])
@on_ranks(2, timeout=200)
def test_labels_of_models_with_a_loss_of_their_own(rank, name):
    """Labels below the sizes of both ranks, which a cross-entropy of one rank would accept."""
    one = with_double_heads(name)
    ids = batch(name)["input_ids"]
    model = parallelize(copy.deepcopy(one), {"lm_head": "column"})
    with pytest.raises(ArgumentError, match=r"head 'lm_head'.*vocab_parallel_cross_entropy"):
        model(input_ids=ids, labels=ids % 40)
    model(input_ids=ids)
    whole = partial(ColumnParallelLinear.from_linear, gather_output=True)
    model = parallelize(copy.deepcopy(one), {"lm_head": whole})
    expected, loss = (m(input_ids=ids, labels=ids).loss for m in (one, model))
    torch.testing.assert_close(loss, expected)


@on_ranks(2, timeout=200)
def test_labels_of_subclasses(rank):
    """A subclass with its own forward may compute another loss; others have their base's."""
    import transformers

    class Renamed(transformers.LlamaForCausalLM):
        pass

    class Loose(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            return super().forward(input_ids, labels=labels, **kwargs)

    one, ids = made("Llama, 5 heads"), batch("Llama")["input_ids"]
    renamed, loose = Renamed(one.config).double(), Loose(one.config).double()
    renamed.load_state_dict(one.state_dict())
    with pytest.raises(ArgumentError, match="Leave out gather_output"):
        parallelize(copy.deepcopy(loose), gather_output=False)
    parallelize(loose, {"lm_head": "column"})
    with pytest.raises(ArgumentError, match=r"head 'lm_head'.*vocab_parallel_cross_entropy"):
        loose(input_ids=ids, labels=ids)
    parallelize(renamed, gather_output=False)
    with in_fp64():
        expected, loss = (m(input_ids=ids, labels=ids).loss for m in (one, renamed))
    torch.testing.assert_close(loss, expected)


@on_ranks(2, timeout=200)
def test_a_second_plan_keeps_methods_of_the_caller(rank):
    import transformers

    class Loose(transformers.GPT2DoubleHeadsModel):
        def forward(self, input_ids=None, **kwargs):
            return super().forward(input_ids, **kwargs)

    class Elsewhere(transformers.GPT2DoubleHeadsModel):
        def get_output_embeddings(self):
            return outside.head

    one, ids = with_double_heads("GPT-2"), batch("GPT-2")["input_ids"]
    one.__class__ = Loose
    model = copy.deepcopy(one)
    parallelize(model, {"lm_head": "column"})
    kept = model.generate
    model.generate = lambda *args, **kwargs: kept(*args, **kwargs)  # set by the caller
    own = model.generate
    for pattern in ("*.mlp.c_fc", "*.attn.c_attn"):
        parallelize(model, {pattern: lambda layer: layer})
    assert model.generate is own
    with pytest.raises(ArgumentError, match="head 'lm_head'"):
        model(ids, labels=ids % 40)
    with pytest.raises(ArgumentError, match="gather_output=True"):
        model.generate(ids)
    one.save_pretrained = lambda folder: None
    before = one.lm_head
    with pytest.raises(ArgumentError, match=r"save_pretrained was set .*after parallelize"):
        parallelize(one, {"lm_head": "column"})
    assert one.lm_head is before
    del one.save_pretrained
    outside = nn.Module()
    outside.head, outside.model, one.__class__ = nn.Linear(HIDDEN, VOCABULARY), one, Elsewhere
    with pytest.raises(ArgumentError, match="not a submodule of this Elsewhere"):
        parallelize(outside, {"head": "column"})
    assert type(outside.head) is nn.Linear
