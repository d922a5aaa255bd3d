"""The retrieval tasks, proved by parsers that read the prompts and by models that cannot."""

import hashlib
import math
import random
import re
from collections import Counter

import pytest
from transformers import PreTrainedTokenizerFast

from hf_linear_attn.errors import ArgumentError
from hf_linear_attn.evaluation.tasks import (
    Noise,
    Task,
    Text,
    available_tasks,
    get_task,
    parse_task,
    register_task,
    sample_rng,
    score,
)
from hf_linear_attn.evaluation.tasks.words import ADJECTIVES, COMMON, MADE_UP_KEYS, MADE_UP_VALUES, NOUNS
from tests.evaluation.helpers import SYMBOLS, byte_level

HELD_OUT = ("assignment", "capital", "default_argument", "json_record")
ALL_TASKS = (
    "assignment",
    "capital",
    "copying",
    "cwe",
    "default_argument",
    "fwe",
    "json_record",
    "kv_recall",
    "niah_multikey",
    "niah_multiquery",
    "niah_multivalue",
    "niah_single",
    "passkey",
    "vt",
)
NEEDLE_TASKS = tuple(name for name in ALL_TASKS if name not in ("cwe", "fwe"))
DEPTH_TASKS = (*HELD_OUT, "copying", "kv_recall", "niah_multikey", "niah_single", "passkey")
DEPTHS = (0, 25, 50, 75, 100)
NEEDLE = re.compile(r"numbers for (\S+) is: (\d+)\.")


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes (no BOS), of whole words, digits and bytes (with BOS), or of bytes and indentation."""
    if kind != "words":
        merges = [("Ċ", "Ġ"), ("ĊĠ", "Ġ"), ("ĊĠĠ", "Ġ")] if kind == "indents" else []
        return byte_level({symbol: i for i, symbol in enumerate([*SYMBOLS, *map("".join, merges)])}, merges)
    words = [f"Ġ{word}" for word in NOUNS + ADJECTIVES] + [f"Ġ{word}" for word in ["the", "is", "of", "grass", "sky"]]
    vocab = {"<bos>": 0} | {symbol: i for i, symbol in enumerate(SYMBOLS, 1)}
    merges = []
    for word in words:
        for i in range(1, len(word)):
            if word[: i + 1] not in vocab:
                vocab[word[: i + 1]] = len(vocab)
                merges.append((word[:i], word[i]))
    return byte_level(vocab, merges, bos=0, bos_token="<bos>")


@pytest.fixture(scope="module", params=["bytes", "words"])
def tokenizer(request):
    return make_tokenizer(request.param)


FORMS = {
    "assignment": (r"^(\w+) =$", r"^(\w+) = (\"\w+\")$"),
    "capital": (r"capital of (\w+) is$", r"^The capital of (\w+) is (\w+)\.$"),
    "default_argument": (r"^(\w+)\(mode=$", r"^def (\w+)\(mode=(\"\w+\")\)"),
    "json_record": (r'^\{"name": "(\w+)", "city":$', r'^\{"name": "(\w+)", "city": (\"\w+\")\}$'),
}


def build(tokenizer, name, length, depth, index=0, **settings):
    return get_task(name, **settings).build(tokenizer, length, depth, sample_rng(7, name, length, depth, index))


def lengths(tokenizer, name):
    shortest = get_task(name).min_length(tokenizer)
    return shortest, shortest + 1, max(2000, 2 * shortest)


def oracle(text, name):
    """Answer a prompt from its text alone, by a rule of the task's own that shares no code with the generator."""
    question = text[text.rindex("\n") :]
    if name == "passkey":
        return re.findall(r"pass key is (\d+)\.", text)[-1]
    if name == "copying":
        return re.findall(r"list of words is: (.*)\.", text)[-1]
    if name in FORMS:
        asked, said = FORMS[name]
        return dict(re.findall(said, text, flags=re.MULTILINE))[re.search(asked, question.strip())[1]]
    if name == "kv_recall":
        key = re.search(r"code of (\w+) is$", question)[1]
        return dict(re.findall(r"code of (\w+) is (\w+)\.", text))[key]
    if name.startswith("niah"):
        asked = re.search(r"numbers? for (.*?) mentioned", question)[1]
        keys = re.findall(r"[a-z]+-[a-z]+", asked)
        return " ".join(value for key, value in NEEDLE.findall(text) if key in keys)
    if name == "vt":
        found = {re.search(r"value (\d+)", question)[1]}
        for target, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", text):
            if source in found:
                found.add(target)
        return " ".join(found)
    if name == "cwe":
        counts = Counter(re.findall(r"\d+\. ([a-z-]+)\n", text))
        return " ".join(word for word, _ in counts.most_common(10))
    body = text.split("\n")[1]
    return " ".join(word for word, _ in Counter(re.findall(r"[a-z]{6}", body)).most_common(3))


def test_registry_holds_the_tasks_sorted_and_knows_which_are_held_out():
    assert available_tasks() == ALL_TASKS
    assert available_tasks(held_out=True) == HELD_OUT
    assert available_tasks(held_out=False) == tuple(name for name in ALL_TASKS if name not in HELD_OUT)
    assert {name for name in ALL_TASKS if get_task(name).needs_depth} == set(DEPTH_TASKS)


@pytest.mark.parametrize("name", ALL_TASKS)
def test_an_oracle_that_parses_the_prompt_scores_one_everywhere(tokenizer, name):
    for length in lengths(tokenizer, name):
        for depth in DEPTHS if get_task(name).needs_depth else (0,):
            sample = build(tokenizer, name, length, depth)
            text = tokenizer.decode(sample.input_ids, skip_special_tokens=True)
            assert score(sample, oracle(text, name)) == 1.0


@pytest.mark.parametrize("name", ALL_TASKS)
def test_prompts_fill_the_asked_length_and_never_exceed_it(tokenizer, name):
    for length in lengths(tokenizer, name):
        for index, depth in enumerate(DEPTHS):
            sample = build(tokenizer, name, length, depth, index)
            assert sample.meta["measured_tokens"] == len(sample.input_ids) + sample.max_new_tokens
            assert 0.98 * length <= sample.meta["measured_tokens"] <= length
            if name not in ("cwe", "fwe"):
                assert sample.meta["measured_tokens"] == length


@pytest.mark.parametrize("name", ALL_TASKS)
def test_the_answer_fits_its_budget(tokenizer, name):
    for index in range(20):
        sample = build(tokenizer, name, lengths(tokenizer, name)[0], 50, index)
        answer = " " + ", ".join(sample.references)
        assert len(tokenizer(answer, add_special_tokens=False)["input_ids"]) <= sample.max_new_tokens


@pytest.mark.parametrize("name", ALL_TASKS)
def test_prompt_tokens_are_what_the_text_tokenises_to(name):
    tokenizer = make_tokenizer("words")
    sample = build(tokenizer, name, lengths(tokenizer, name)[2], 50)
    again = tokenizer(tokenizer.decode(sample.input_ids, skip_special_tokens=True))["input_ids"]
    # The filler may begin inside a word; everywhere else assembling ids equals tokenising the text.
    assert sample.input_ids[0] == tokenizer.bos_token_id == again[0]
    assert sample.input_ids[-800:] == tuple(again[-800:])


@pytest.mark.parametrize("name", DEPTH_TASKS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_needle_stands_once_and_where_it_was_asked(tokenizer, name, depth):
    sample = build(tokenizer, name, 4000, depth)
    (start, end), reference = sample.meta["needle_spans"][0], sample.references[0]
    prompt = tokenizer.decode(sample.input_ids)
    assert reference in tokenizer.decode(sample.input_ids[start:end])
    assert prompt.count(reference) == 1
    assert abs(sample.meta["measured_depth"] - depth) < 2
    # From the prompt itself, not from what the sample says: characters stand in for tokens.
    head, tail = (0 if name in HELD_OUT else prompt.index("\n") + 1), prompt.rindex("\n") + 1
    at = prompt.rfind("\n", 0, prompt.index(reference)) + 1
    assert abs(100 * (at - head) / (tail - head) - depth) < 4


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_needle_spans_hold_the_references_in_order(tokenizer, name):
    sample = build(tokenizer, name, 3000, 30)
    assert len(sample.meta["needle_spans"]) == len(sample.references)
    for (start, end), reference in zip(sample.meta["needle_spans"], sample.references, strict=True):
        assert reference in tokenizer.decode(sample.input_ids[start:end])


@pytest.mark.parametrize("name", DEPTH_TASKS)
def test_an_oracle_with_a_window_succeeds_iff_the_needle_lies_inside(tokenizer, name):
    outcomes = set()
    for depth in range(0, 101, 10):
        sample = build(tokenizer, name, 3000, depth)
        start, end = sample.meta["needle_spans"][0]
        window = (len(sample.input_ids) - start + len(sample.input_ids) - end) // 2 + (-200 if depth % 20 else 200)
        seen = tokenizer.decode(sample.input_ids[-window:])
        inside = start >= len(sample.input_ids) - window
        assert score(sample, seen) == float(inside)
        outcomes.add(inside)
    fixed = [score(s := build(tokenizer, name, 3000, depth), tokenizer.decode(s.input_ids[-1200:])) for depth in DEPTHS]
    assert fixed == sorted(fixed), "a needle at a greater depth must lie nearer to the question"
    assert fixed[0] == 0.0
    assert fixed[-1] == 1.0
    assert outcomes == {True, False}


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_a_context_blind_model_scores_zero(tokenizer, name):
    task = get_task(name)
    length = task.min_length(tokenizer) + 300
    rng = random.Random(3)
    total = 0.0
    for index in range(40):
        sample = build(tokenizer, name, length, 50, index)
        question = tokenizer.decode(sample.input_ids).split("\n")[-1]
        guess = f"{question} {rng.choice(ADJECTIVES)} {rng.randrange(10**4, 10**5)} {rng.randrange(10**6, 10**7)}"
        total += score(sample, guess)
    # 40 guesses among 91 adjectives hit less than one in expectation; numbers and names are never hit.
    assert total <= (3 if name == "kv_recall" else 0)


@pytest.mark.parametrize("pairs", [2, 4, 8])
def test_a_guesser_among_the_values_seen_hits_one_in_k(pairs):
    tokenizer = make_tokenizer("words")
    rng, n = random.Random(5), 400
    hits = 0.0
    for index in range(n):
        sample = build(tokenizer, "kv_recall", 1200, 50, index, pairs=pairs)
        hits += score(sample, rng.choice([value for _, value in sample.meta["pairs"]]))
    # Four standard deviations of a binomial: fails by chance in one run of 16,000, and the draw is fixed.
    assert abs(hits / n - 1 / pairs) < 4 * math.sqrt((1 - 1 / pairs) / pairs / n)


@pytest.mark.parametrize("name", ALL_TASKS)
def test_too_short_a_length_is_refused_at_once(tokenizer, name):
    task = get_task(name)
    shortest = task.min_length(tokenizer)
    with pytest.raises(
        ArgumentError, match=rf"`length` must be at least {shortest} tokens, got {shortest - 1} .*{name}"
    ):
        task.build(tokenizer, shortest - 1, 50, random.Random(0))


@pytest.mark.parametrize("depth", [-1, 101])
def test_a_depth_outside_0_to_100_is_refused(tokenizer, depth):
    with pytest.raises(ArgumentError, match=r"`depth` must lie in 0\.\.100, got -?\d+ \(task 'passkey'\)"):
        build(tokenizer, "passkey", 4000, depth)


@pytest.mark.parametrize("name", ALL_TASKS)
def test_a_sample_depends_on_its_key_alone(tokenizer, name):
    length = lengths(tokenizer, name)[1]
    first = build(tokenizer, name, length, 50, 1)
    build(tokenizer, name, length, 50, 2)
    assert build(tokenizer, name, length, 50, 1) == first
    assert build(tokenizer, name, length, 50, 3).references != first.references


def test_sample_rng_is_the_documented_one():
    assert sample_rng(1, "vt", 512, 25, 3).random() == random.Random("1/vt/512/25/3").random()


def test_score_counts_references_without_regard_to_case(tokenizer):
    sample = build(tokenizer, "niah_multivalue", 3000, 50)
    assert score(sample, "") == 0.0
    assert score(sample, f"they are {sample.references[0]} and {sample.references[2]}") == 0.5
    word = build(tokenizer, "kv_recall", 3000, 50)
    assert score(word, word.references[0].upper()) == 1.0


# SHA-256 of prompts in noise as they were before there was any other haystack.
AS_EVER = {
    "copying": "97645887fd4735b7",
    "cwe": "96ba797444255c97",
    "fwe": "cc64e000d1d4b20a",
    "kv_recall": "e0d6c639e3ae4760",
    "niah_multikey": "14f7bf5d4246a46f",
    "niah_multiquery": "e9bd050f74a2ac18",
    "niah_multivalue": "0062e69c121cfcc9",
    "niah_single": "2430ee3def800030",
    "passkey": "acd76231ad6b4add",
    "vt": "f9bc531e1ef74826",
}


@pytest.mark.parametrize("name", AS_EVER)
def test_prompts_in_noise_are_what_they_always_were(name):
    tokenizer, digest = make_tokenizer("words"), hashlib.sha256()
    task = parse_task(name, "noise")
    for index, (more, depth) in enumerate(((0, 0), (700, 50), (1500, 83))):
        length = task.min_length(tokenizer) + more
        sample = task.build(tokenizer, length, depth, sample_rng(7, name, length, depth, index))
        parts = (sample.input_ids, sample.references, sample.max_new_tokens, sorted(sample.meta.items()))
        digest.update(repr(parts).encode())
    assert digest.hexdigest()[:16] == AS_EVER[name]


def in_text(tokenizer, name, length, depth, index=0, **settings):
    task = get_task(name, haystack=Text(), **settings)
    return task.build(tokenizer, length, depth, sample_rng(7, name, length, depth, index))


@pytest.mark.parametrize("name", NEEDLE_TASKS)
def test_in_text_an_oracle_scores_one_and_the_length_is_exact(tokenizer, name):
    shortest = get_task(name, haystack=Text()).min_length(tokenizer)
    for length in (shortest, shortest + 1, 2 * shortest):
        for index, depth in enumerate(DEPTHS):
            sample = in_text(tokenizer, name, length, depth, index)
            assert sample.meta["measured_tokens"] == len(sample.input_ids) + sample.max_new_tokens == length
            assert score(sample, oracle(tokenizer.decode(sample.input_ids, skip_special_tokens=True), name)) == 1.0


@pytest.mark.parametrize("name", DEPTH_TASKS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_in_text_a_needle_has_lines_of_its_own_and_stands_where_it_was_asked(tokenizer, name, depth):
    sample = in_text(tokenizer, name, 4000, depth)
    ids, (start, end) = sample.input_ids, sample.meta["needle_spans"][0]
    assert abs(sample.meta["measured_depth"] - depth) < 2
    needle = tokenizer.decode(ids[start:end])
    assert needle[0] == needle[-1] == "\n"
    assert sample.references[0] in needle
    prompt = tokenizer.decode(ids, skip_special_tokens=True)
    assert abs(100 * prompt.index(needle) / prompt.rindex("\n") - depth) < 10


@pytest.mark.parametrize("name", ["copying", "niah_single", "passkey"])
@pytest.mark.parametrize("depth", DEPTHS)
def test_around_a_needle_is_held_out_text_unchanged(tokenizer, name, depth):
    source = tokenizer.decode(tokenizer("\n".join(Text().documents()), add_special_tokens=False)["input_ids"])
    sample = in_text(tokenizer, name, 4000, depth)
    start, end = sample.meta["needle_spans"][0]
    around = ([(end, end + 60)] if depth < 100 else []) + ([(start - 60, start)] if depth > 0 else [])
    for first, last in around:
        assert tokenizer.decode(sample.input_ids[first:last]).strip("\ufffd") in source


def test_the_same_sample_says_and_asks_the_same_in_noise_and_in_text(tokenizer):
    for name in NEEDLE_TASKS:
        noise, text = build(tokenizer, name, 3000, 50), in_text(tokenizer, name, 3000, 50)
        assert noise.references == text.references
        assert "The grass is green." in tokenizer.decode(noise.input_ids)
        assert "The grass is green." not in tokenizer.decode(text.input_ids)


def test_every_sample_has_a_stretch_of_its_own_of_the_text(tokenizer):
    stretches = {tokenizer.decode(in_text(tokenizer, "passkey", 600, 100, n).input_ids)[150:300] for n in range(6)}
    assert len(stretches) == 6


def test_text_that_a_tokenizer_joins_across_lines_is_tokenised_as_it_stands(tmp_path):
    text = "".join(f"def f{n}(x):\n    return x\n" for n in range(400))
    (tmp_path / "mine.py").write_text(text)
    tokenizer = make_tokenizer("indents")
    task = get_task("capital", haystack=Text((str(tmp_path / "mine.py"),)))
    assert task.label == "capital in mine.py"
    ids = task.build(tokenizer, 900, 50, random.Random(1)).input_ids
    prompt = tokenizer.decode(ids, skip_special_tokens=True)
    said = re.findall(r"\n+(The capital of \w+ is \w+\.)\n", prompt)
    assert len(said) == 4
    for line in said:
        # Between lines, and never in the middle of one.
        before, after = prompt.split(f"\n{line}\n")
        assert re.search(r"(\(x\):|return x|is \w+\.)\n*$", before), before[-40:]
        assert re.match(r"\n*(    return|def f|The)", after), after[:40]


def test_a_text_of_one_long_line_takes_needles_where_they_are_asked(tokenizer, tmp_path):
    (tmp_path / "line.txt").write_text("once upon a time " * 2000)
    task = get_task("passkey", haystack=Text((str(tmp_path / "line.txt"),)))
    for depth in DEPTHS:
        sample = task.build(tokenizer, 2000, depth, random.Random(depth))
        assert abs(sample.meta["measured_depth"] - depth) < 0.1
        assert sample.meta["measured_tokens"] == 2000


@pytest.mark.parametrize(("text", "tokens"), [("word " * 100, 500), ("", 0)])
def test_a_text_shorter_than_the_length_is_refused_with_both_numbers(tmp_path, text, tokens):
    (tmp_path / "short.txt").write_text(text)
    task = get_task("capital", haystack=Text((str(tmp_path / "short.txt"),)))
    message = rf"`haystack` must hold at least 900 tokens, got {tokens} \(task 'capital in short.txt'\)\. Ask for"
    with pytest.raises(ArgumentError, match=message):
        task.build(make_tokenizer("bytes"), 900, 50, random.Random(0))
    missing = get_task("capital", haystack=Text((str(tmp_path / "none.txt"),)))
    with pytest.raises(ArgumentError, match="`haystack_files` must be a readable UTF-8 text"):
        missing.build(make_tokenizer("bytes"), 900, 50, random.Random(0))


def test_a_spec_says_settings_and_haystack():
    assert [parse_task(spec).label for spec in ("vt", "capital:pairs=8", "capital:haystack=text:pairs=8")] == [
        "vt",
        "capital:pairs=8",
        "capital:pairs=8 in text",
    ]
    assert parse_task("cwe", "text").label == "cwe"
    assert parse_task("passkey:haystack=noise", "text").label == "passkey"
    assert isinstance(parse_task("niah_single:haystack=noise", "text").haystack, Noise)
    with pytest.raises(ArgumentError, match=r"`haystack` must be a known kind, got 'hay'.*available: noise, text"):
        parse_task("passkey:haystack=hay")


@pytest.mark.parametrize("words", [0, 1000])
def test_a_wrong_number_of_words_is_refused(words):
    with pytest.raises(ArgumentError, match=rf"`words` must lie in 1\.\.\d+, got {words} \(task 'copying'\)"):
        get_task("copying", words=words)


@pytest.mark.parametrize("pairs", [0, 1000])
def test_a_wrong_number_of_pairs_is_refused(pairs):
    with pytest.raises(ArgumentError, match=rf"`pairs` must lie in 1\.\.\d+, got {pairs} \(task 'kv_recall'\)"):
        get_task("kv_recall", pairs=pairs)


def test_an_unknown_task_is_refused_with_the_names():
    with pytest.raises(ArgumentError, match=r"`name` must be a registered task, got 'nope'.*copying, cwe, default_ar"):
        get_task("nope")


def test_a_name_cannot_be_registered_twice():
    with pytest.raises(ArgumentError, match="`name` must be new, got 'passkey'"):

        @register_task
        class Other(Task):
            name = "passkey"
            needs_depth = True


def test_common_words_stand_thirty_times_and_others_three(tokenizer):
    sample = build(tokenizer, "cwe", lengths(tokenizer, "cwe")[2], 0)
    text = tokenizer.decode(sample.input_ids)
    counts = Counter(re.findall(r"\d+\. ([a-z-]+)\n", text))
    assert {counts[word] for word in sample.references} == {30}
    assert set(counts.values()) == {3, 30}
    assert [int(i) for i in re.findall(r"(\d+)\. [a-z]", text)] == list(range(1, sample.meta["words"] + 1))


def test_frequent_words_follow_a_zipf_law(tokenizer):
    sample = build(tokenizer, "fwe", 20000, 0)
    body = tokenizer.decode(sample.input_ids).split("\n")[1].split()
    ranked = Counter(body).most_common()
    assert ranked[0][0] == "...."
    assert [word for word, _ in ranked[1:4]] == list(sample.references)
    assert ranked[3][1] > ranked[4][1]
    assert ranked[1][1] / ranked[3][1] == pytest.approx(4.0, rel=0.05)


def test_no_word_contains_another():
    words = sorted({*NOUNS, *ADJECTIVES, *MADE_UP_KEYS, *MADE_UP_VALUES}, key=len)
    assert len(words) == len(NOUNS) + len(ADJECTIVES) + len(MADE_UP_KEYS) + len(MADE_UP_VALUES)
    assert not [(a, b) for i, a in enumerate(words) for b in words[i + 1 :] if a in b]
    assert not [(a, b) for a in COMMON for b in COMMON if a != b and a in b]
