"""Ranks that are threads: every rule, any split, and what is refused."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_linear_attn import patch_model
from hf_linear_attn.distill.run import recompute_activations
from hf_linear_attn.errors import ArgumentError, UnsupportedError
from hf_linear_attn.feature_maps import available_feature_maps
from hf_linear_attn.parallel import bytes_sent, context_parallel, sums
from hf_linear_attn.patching import part_of
from hf_linear_attn.patching.call_cache import NAME, returned_cache
from tests.distill.tiny import tiny_teacher
from tests.parallel.cases import RECOMMENDED, batch_of, compare, model_of, packed, padded, run, run_part
from tests.parallel.threads import copies, on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch):
    # So that short texts have several.
    monkeypatch.setattr(sums, "SPAN", 7)


def same(model, batch, size, lengths=None, *, use_cache=False, tol=1e-9):
    """Compare ranks with one process in float64, but for the loss, which Transformers makes in fp32."""
    one = run(model, batch, use_cache=use_cache)
    models = copies(model, size)

    def work(ranks):
        with context_parallel(models[ranks.rank], ranks) as context:
            part = run_part(context, batch, lengths, use_cache=use_cache)
            compare(one, part, context, batch, lengths, tol)

    on_ranks(size, work)


@st.composite
def cuts(draw, tokens, parts):
    places = draw(st.lists(st.integers(1, tokens - 1), min_size=parts - 1, max_size=parts - 1, unique=True))
    bounds = [0, *sorted(places), tokens]
    return [b - a for a, b in pairwise(bounds)]


PATCHES = [
    {"feature_map": "elu"},
    {"feature_map": "cosformer"},
    RECOMMENDED,
    {"feature_map": "hedgehog", "window": 3, "mix": "gate"},
    {"feature_map": "cosformer", "window": 5, "sinks": 3, "mix": "shared"},
    {"feature_map": "elu", "window": 4, "sinks": 1, "rotary": "undo"},
    {"feature_map": "elu", "window": 6, "sinks": 1, "mix": "window"},
    {"feature_map": "elu", "update_rule": "decay"},
    RECOMMENDED | {"update_rule": "decay", "mix": "shared"},
    {"feature_map": "elu", "update_rule": "delta", "window": 3, "mix": "gate"},
    RECOMMENDED | {"update_rule": "gated_delta"},
    {"feature_map": "elu", "window": 4, "sinks": 1, "kept": 3, "mix": "window"},
    {"feature_map": "elu", "window": 4, "sinks": 2, "kept": 3, "mix": "window", "retention": "learned"},
    RECOMMENDED | {"window": 5, "kept": 4},
    RECOMMENDED | {"window": 5, "kept": 4, "retention": "learned", "update_rule": "gated_delta"},
    {"feature_map": "elu", "window": 3, "kept": 4, "mix": "gate", "update_rule": "decay", "rotary": "undo"},
    {"feature_map": "elu", "window": 6, "kept": 2, "mix": "window", "per_layer": {1: {"window": 3, "kept": 5}}},
]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_split_is_one_process(data):
    patch = data.draw(st.sampled_from(PATCHES))
    size, rows, tokens = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2)), data.draw(st.integers(4, 60))
    lengths = data.draw(cuts(tokens, size))
    kind = data.draw(st.sampled_from(["plain", "padded", "packed"]))
    batch, use_cache = batch_of(rows, tokens, data.draw(st.integers(0, 9))), False
    if kind == "packed":
        batch = packed(batch, [data.draw(cuts(tokens, data.draw(st.integers(1, 4)))) for _ in range(rows)])
    else:
        use_cache = data.draw(st.booleans())
    if kind == "padded":
        most = (tokens - 2) // 2
        batch = padded(batch, [(data.draw(st.integers(0, most)), data.draw(st.integers(0, most))) for _ in range(rows)])
    same(model_of(torch.float64, **patch), batch, size, lengths, use_cache=use_cache)


KEPT = [patch for patch in PATCHES if "kept" in patch]


@pytest.mark.parametrize("patch", KEPT, ids=str)
def test_kept_keys_and_windows_of_single_layers(patch):
    plain = batch_of(2, 41)
    same(model_of(torch.float64, **patch), plain, 3, [5, 20, 16], use_cache=True)
    same(model_of(torch.float64, **patch), packed(plain, [[13, 20, 8], [41]]), 3)


@pytest.mark.parametrize("feature_map", available_feature_maps())
def test_every_map(feature_map):
    for window in ({}, {"window": 5, "sinks": 2}):
        same(model_of(torch.float64, feature_map=feature_map, **window), batch_of(1, 23), 3, use_cache=True)


def test_a_part_alone_is_not_the_text():
    # What the comparisons would see if ranks handed nothing on.
    model, batch = model_of(**RECOMMENDED), batch_of(1, 40)
    whole = run(model, batch).logits[:, 20:]
    part = model(input_ids=batch["input_ids"][:, 20:], position_ids=torch.arange(20, 40)[None]).logits
    assert (part - whole).abs().max() > 0.1


@pytest.mark.parametrize("kept", [0, 3])
def test_activations_may_be_recomputed(kept):
    model = model_of(torch.float64, **RECOMMENDED, kept=kept).train()
    recompute_activations(model, enable=True)
    same(model, batch_of(1, 30), 2)


def test_bfloat16_is_one_process_within_its_rounding():
    same(model_of(torch.bfloat16, **RECOMMENDED), batch_of(1, 30), 2, tol=0.1)


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("left", [None, 10, 24, 33])
def test_a_text_goes_on_from_the_last_rank(left, kept):
    """The last rank's part has no padding where that lies before it, and its window may be padding in part."""
    model, batch = model_of(torch.float64, **RECOMMENDED, kept=kept).eval(), batch_of(2, 36)
    batch = batch if left is None else padded(batch, [(left, 0), (0, 0)])
    given = {name: x for name, x in batch.items() if name != "labels"}
    models, tokens = copies(model, 3), batch_of(2, 12, seed=1)["input_ids"].split(1, 1)

    def go_on(model, cache):
        return torch.cat([model(input_ids=token, **{NAME: cache}).logits for token in tokens], 1)

    def work(ranks):
        model = models[ranks.rank]
        with torch.no_grad(), context_parallel(model, ranks) as context:
            cache = returned_cache(model(**context.split(given), use_cache=True))
        assert ranks.rank < 2 or cache.get_seq_length() == 36
        with torch.no_grad():
            return go_on(model, cache) if ranks.rank == 2 else None

    with torch.no_grad():
        expected = go_on(model, returned_cache(model(**given, use_cache=True)))
    torch.testing.assert_close(on_ranks(3, work)[-1], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    "patch",
    [
        {"feature_map": "elu"},
        RECOMMENDED | {"rotary": "keep"},
        RECOMMENDED | {"rotary": "undo"},
        {"feature_map": "elu", "update_rule": "decay"},
        {"feature_map": "elu", "update_rule": "gated_delta", "window": 3, "mix": "gate"},
        {"feature_map": "elu", "window": 4, "kept": 3, "mix": "window"},
        RECOMMENDED | {"rotary": "undo", "kept": 3, "retention": "learned"},
    ],
)
def test_bytes_do_not_grow_with_the_text_and_are_the_formula(patch, monkeypatch):
    monkeypatch.setattr(sums, "SPAN", 4096)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = patch_model(LlamaForCausalLM(config), **patch)
    layer = next(part for module in model.modules() if (part := part_of(module)) is not None)
    models, sent = copies(model, 4), {}
    # Rules that go by the order of keys take their time on a CPU.
    for tokens in (4096, 8192 if layer.rule.ordered or layer.kept else 262144):

        def work(ranks, tokens=tokens):
            model = models[ranks.rank]
            with context_parallel(model, ranks) as context:
                part = context.split({"input_ids": torch.arange(tokens)[None] % 8})
                with torch.no_grad():
                    model(**part, use_cache=False, logits_to_keep=1)
            return ranks.sent_bytes

        of_ranks = set(on_ranks(4, work))
        # Before the first layer, ranks tell each other how their rows lie: whole numbers of 8 bytes.
        layout = 3 * 8 * (5 + 4 + (layer.settings.window or 0))
        expected = bytes_sent(layer, 4, tokens)
        # Kept keys are handed on, by all but the last.
        assert max(of_ranks) == expected.states + layout
        assert (len(of_ranks) == 1) == (layer.kept is None)
        sent[tokens] = expected
    assert sent[4096].states == sent[tokens].states
    assert sent[tokens].keys == tokens // 4096 * sent[4096].keys == 3 * tokens // 4 * 2 * 4 * 4


def test_a_backward_sends_as_much():
    model = model_of(**RECOMMENDED)
    layers = [part for module in model.modules() if (part := part_of(module)) is not None]
    models, batch = copies(model, 2), batch_of(2, 40)

    def work(ranks):
        with context_parallel(models[ranks.rank], ranks) as context:
            loss = models[ranks.rank](**context.split(batch), use_cache=False).loss
            before = ranks.sent_bytes
            loss.backward()
            return ranks.sent_bytes - before

    assert set(on_ranks(2, work)) == {sum(bytes_sent(layer, 2, 40, rows=2).states for layer in layers)}


def convolving():
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return Lfm2ForCausalLM(Lfm2Config(**sizes, num_hidden_layers=2, num_key_value_heads=1, full_attn_idxs=[0]))


def locally_shifted(context, batch):
    part = context.split(batch)
    del part["shift_labels"]
    return part


def unshifted(context, batch):
    part = context.split(batch)
    return part | {"labels": part["input_ids"], "shift_labels": part["input_ids"]}


def shorter(context, batch):
    return context.split({"input_ids": batch["input_ids"][:, : 20 - 6 * context.rank]})


def more_rows(context, batch):
    return context.split({"input_ids": batch["input_ids"].repeat(1 + context.rank, 1)})


def filled_cache(context, batch):
    part = context.split({"input_ids": batch["input_ids"]})
    cache = DynamicCache(config=context.model.config)
    with torch.no_grad():
        context.model(**part, **{NAME: cache})
    return part | {NAME: cache}


def split_with(**more):
    return lambda context, batch: context.split(batch) | more


CALLS = {
    "labels not shifted": (locally_shifted, "`labels` must come shifted before the split"),
    "labels shifted in name": (unshifted, "`shift_labels` must be shifted before the split.*ranks \\[0, 1\\]"),
    "other lengths": (shorter, "`position_ids` must go on where the rank before ended.*ranks \\[1\\]"),
    "other rows": (more_rows, "`input_ids` must have as many rows on every rank, got \\[1, 2\\]"),
    "no positions": (split_with(position_ids=None), "`position_ids` must be those of the whole text"),
    "a filled cache": (filled_cache, "`cache` must be empty", UnsupportedError),
    "a square mask": (
        split_with(attention_mask=torch.ones(1, 1, 10, 10).bool()),
        "`attention_mask` must be a padding mask",
        UnsupportedError,
    ),
    "boundaries": (
        split_with(cu_seq_lens_q=torch.tensor([0, 4, 10])),
        "`cu_seq_lens_q` must be left out",
        UnsupportedError,
    ),
    "a cache of packed documents": (
        lambda context, batch: context.split(packed(batch, [[8, 12]])) | {"use_cache": True},
        "`cache` must be None for packed documents",
        UnsupportedError,
    ),
}


class TestRefused:
    @pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
    def test_calls(self, case):
        change, match, error = (*case, ArgumentError)[:3]
        models, batch = copies(model_of(**RECOMMENDED), 2), batch_of(1, 20)

        def work(ranks):
            with (
                context_parallel(models[ranks.rank], ranks) as context,
                pytest.raises(error, match=match),
            ):
                models[ranks.rank](**({"use_cache": False} | change(context, batch)))
            return True

        assert on_ranks(2, work) == [True] * 2

    def test_a_module_inside_the_model(self):
        def work(ranks):
            model = model_of(**RECOMMENDED)
            with context_parallel(model, ranks), pytest.raises(ArgumentError, match="`model` must be called itself"):
                model.model(input_ids=batch_of(1, 8)["input_ids"])

        on_ranks(1, work)

    def test_what_split_cannot_cut(self):
        def work(ranks):
            with context_parallel(model_of(**RECOMMENDED), ranks) as context:
                batch = batch_of(1, 20)
                for wrong, match in (
                    ({"labels": batch["labels"][:, 1:]}, "`labels` must have 20 tokens"),
                    ({"shift_labels": batch["labels"]}, "`batch` must hold labels as they are"),
                    ({"input_ids": batch["input_ids"][:, :1]}, "have a token for each of 2 ranks"),
                ):
                    with pytest.raises(ArgumentError, match=match):
                        context.split(batch | wrong)
                with pytest.raises(ArgumentError, match="of sum 20"):
                    context.split(batch, [10, 11])
                with pytest.raises(ArgumentError, match="`batch` must hold input_ids"):
                    context.split({})

        on_ranks(2, work)

    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (tiny_teacher, "`model` must be patched"),
            (lambda: patch_model(tiny_teacher(), layers=[0]), "softmax in model.layers.1.self_attn"),
            (lambda: patch_model(convolving()), r"`model` must have attention alone to mix tokens, got \['conv'\]"),
        ],
    )
    def test_models(self, make, match):
        def work(ranks):
            with pytest.raises((ArgumentError, UnsupportedError), match=match), context_parallel(make(), ranks):
                pass

        on_ranks(1, work)

    def test_no_group(self):
        with (
            pytest.raises(ArgumentError, match="`group` must be that of several processes"),
            context_parallel(model_of(**RECOMMENDED)),
        ):
            pass

    def test_twice(self):
        def work(ranks):
            model = model_of(**RECOMMENDED)
            with (
                context_parallel(model, ranks),
                pytest.raises(ArgumentError, match="not be split already"),
                context_parallel(model, ranks),
            ):
                pass
            # Afterwards it is a model like any other.
            model(**batch_of(1, 8))

        on_ranks(1, work)
