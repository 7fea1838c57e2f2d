"""The token loop: with an executor that plays given ids, with a tiny decoder, and with real-life cases."""

import codecs
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pjax.base import DecodeState
from pjax.executor import OneProgram
from pjax.generate import cache_capacity, generate, read_ids, stream
from pjax.sampling import NOT_A_TOKEN
from pjax.storage import load_model
from tests.cases import find_case
from tests.tiny_model import tiny_config, tiny_decoder

EOS, OTHER_EOS = 2, 7


class Bytes:
    """A tokenizer of given pieces: id 10 + i is the i-th; a piece may be a part of a character."""

    def __init__(self, pieces=()):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]

    def encode(self, text):
        return [10] * len(text)

    def stream(self):
        return ByteStream(self.pieces)


class ByteStream:
    """Decodes the pieces incrementally, by the standard library."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id, /):
        return self.decoder.decode(self.pieces[token_id - 10])

    def flush(self):
        return self.decoder.decode(b"", final=True)


class Player:
    """An executor that plays given ids for each sequence, and checks that it has room for them."""

    def __init__(self, *scripts, **config):
        self.config = tiny_config(eos_ids=(EOS, OTHER_EOS), **({"context": 400} | config))
        self.scripts, self.num_steps, self.capacities = scripts, 0, []

    def prefill(self, ids, lengths, *, capacity, sample_fn, sampler):
        assert capacity >= ids.shape[1] <= self.config.context
        self.prompt_shape, self.num_steps = ids.shape, 0
        self.capacities.append(capacity)
        return self.play(lengths, sampler)

    def step(self, state, *, sample_fn):
        self.num_steps += 1
        running = [len(script) > self.num_steps for script in self.scripts]
        lengths = np.asarray(state.lengths) + 1
        assert lengths[running].max(initial=0) <= self.capacities[-1]
        return self.play(jnp.asarray(lengths), state.sampler)

    def reserve(self, state, capacity):
        self.capacities.append(capacity)
        return state

    def play(self, lengths, sampler):
        ids = [script[min(self.num_steps, len(script) - 1)] for script in self.scripts]
        return DecodeState((), lengths, jnp.array(ids, jnp.int32), sampler, jnp.zeros(3))


def play(pieces, ids=None, **settings):
    """Generates from a player of all pieces in order, or of the given ids; checks that the stream agrees."""
    ids = [10 + i for i in range(len(pieces))] if ids is None else ids
    settings = {"max_new_tokens": len(ids)} | settings
    player, tokenizer, heard = Player(ids), Bytes(pieces), []
    generation = generate(player, tokenizer, "a", on_text=heard.append, **settings)
    assert heard == list(stream(player, tokenizer, "a", **settings))
    assert "".join(heard) == generation.text and "" not in heard
    return generation


@pytest.mark.parametrize(
    "pieces, stop, text, num_ids",
    [
        (["Hello", " wor", "ld", "!"], (), "Hello world!", 4),
        (["Hello", " wor", "ld", "!"], "o w", "Hell", 2),  # Across tokens, beginning inside one.
        (["xENDy", "z"], ["END"], "x", 1),  # Inside the first token.
        (["a", "b", "a", "b", "c", "d"], ["abc"], "ab", 5),  # After a false beginning.
        (["a", "aa", "ab", "c"], ["aab"], "aa", 3),
        (["one", "\n", "\n", "two"], ["\n\nQ", "\n\nt"], "one", 4),
        (["one", "\n", "\n", "Z"], ["\n\nQ"], "one\n\nZ", 4),  # Held back, then let go.
        (["one", "EN"], ["END"], "oneEN", 2),  # Held back to the end.
        (["END"], ["END"], "", 1),
        (["caf", b"\xc3", b"\xa9", "!"], ["é"], "caf", 3),  # A stop string of a split character.
        (["x", b"\xe6\x97", b"\xa5", b"\xe6\x9c", b"\xac"], (), "x日本", 5),
        (["x", b"\xe6\x97"], (), "x\ufffd", 2),  # Cut inside a character: told, at the end only.
    ],
)
def test_text_and_ids_end_at_a_stop_string(pieces, stop, text, num_ids):
    generation = play(pieces, stop=stop)
    assert generation.text == text
    assert generation.ids == tuple(10 + i for i in range(num_ids))
    is_stopped = bool(stop) and not text.endswith(("Z", "EN"))
    assert generation.finish_reason == ("stop" if is_stopped else "length")


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_any_end_of_text_id_ends(eos):
    generation = play(["a", "b"], [10, 11, eos, 10, 10])
    assert (generation.text, generation.ids, generation.finish_reason) == ("ab", (10, 11), "stop")
    assert generation.timings.tokens == 3


def test_held_back_text_comes_out_at_the_end_of_text():
    assert play(["a", "EN"], [10, 11, EOS, 10], stop="END").text == "aEN"


def test_end_of_text_at_once():
    generation = play([], [EOS, 10], max_new_tokens=2)
    assert (generation.text, generation.ids, generation.finish_reason) == ("", (), "stop")


def test_sequences_of_a_batch_end_on_their_own():
    player = Player([10, 11, 10, 11], [10, EOS], [11, 11, 11, 11, 11, EOS])
    generations = generate(player, Bytes(["a", "b"]), ["x", "xxx", "xx"], max_new_tokens=20, stop="abab")
    assert [g.text for g in generations] == ["", "a", "bbbbb"]
    assert [g.finish_reason for g in generations] == ["stop"] * 3
    assert player.num_steps == 5
    assert [g.timings.tokens for g in generations] == [4, 2, 6]
    assert [g.timings.prompt_tokens for g in generations] == [1, 3, 2]


def test_new_tokens_end_at_the_context():
    player = Player([10] * 100, context=40)
    for length, num_new in ((39, 1), (24, 16)):
        generation = generate(player, None, [5] * length)
        assert len(generation.ids) == num_new and generation.finish_reason == "length"
    assert player.prompt_shape == (1, 32)
    assert len(generate(player, None, [5] * 24, max_new_tokens=10**18).ids) == 16


@pytest.mark.parametrize("length, limit", [(40, None), (40, 5), (1, 0)])
def test_nothing_to_generate(length, limit):
    player = Player([10], context=40)
    generation = generate(player, Bytes(["a"]), [5] * length, max_new_tokens=limit)
    assert (generation.text, generation.ids, generation.finish_reason) == ("", (), "length")
    assert not player.capacities
    assert generation.timings.tokens_per_s is None and generation.timings.prefill_tokens_per_s is None
    assert list(stream(player, Bytes(["a"]), [5] * length, max_new_tokens=limit)) == []


def test_a_full_prompt_beside_one_with_room():
    player = Player([10] * 40, [11] * 40, context=40)
    full, other = generate(player, None, [[5] * 40, [5] * 38])
    assert (full.ids, full.finish_reason) == ((), "length")
    assert (other.ids, other.finish_reason) == ((11, 11), "length")


def test_caches_grow_in_buckets_before_they_overflow():
    player = Player([10] * 900, context=2000)
    generate(player, None, [5] * 10, max_new_tokens=900)
    assert player.capacities == [256, 512, 1024]
    player = Player([10], context=2000)
    generate(player, None, [5] * 256, max_new_tokens=2)
    assert player.capacities == [512]


def test_closing_a_stream_ends_the_work():
    player = Player([10] * 300)
    pieces = stream(player, Bytes(["a"]), "x")
    assert [next(pieces) for _ in range(3)] == ["a"] * 3
    pieces.close()
    assert player.num_steps == 2


def test_text_comes_before_the_next_step():
    player, num_steps = Player([10] * 5), []
    generate(
        player, Bytes(["a"]), "x", max_new_tokens=5, on_text=lambda _: num_steps.append(player.num_steps)
    )
    assert num_steps == [0, 1, 2, 3, 4]


def test_one_host_read_a_token(monkeypatch):
    reads = []
    monkeypatch.setattr("pjax.generate.read_ids", lambda state: reads.append(1) or read_ids(state))
    generate(Player([10] * 50, [10] * 50), None, [[5], [6]], max_new_tokens=50)
    assert len(reads) == 50


def test_timings_add_up():
    timings = generate(Player([10] * 30), None, [5] * 20, max_new_tokens=30).timings
    assert 0 < timings.prefill_s <= timings.first_token_s and timings.decode_s > 0
    assert (timings.tokens, timings.prompt_tokens) == (30, 20)
    assert timings.tokens_per_s == pytest.approx(29 / timings.decode_s)
    assert timings.prefill_tokens_per_s == pytest.approx(20 / timings.prefill_s)


def test_nan_logits_are_an_error_for_running_sequences_only():
    finished, running = [EOS, NOT_A_TOKEN], [10, 10, 10]
    assert len(generate(Player(finished, running), None, [[5], [5]], max_new_tokens=3)) == 2
    with pytest.raises(ValueError, match="logits are NaN after 3 tokens"):
        generate(Player([10, NOT_A_TOKEN]), None, [5, 5], max_new_tokens=3)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_new_tokens": -1}, "max_new_tokens: expected an integer of at least 0"),
        ({"max_new_tokens": True}, "max_new_tokens: expected"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: expected"),
        ({"temperature": -1}, "temperature: expected"),
        ({"top_p": float("nan")}, "top_p: expected"),
        ({"seed": "1"}, "seed: expected"),
        ({"stop": [""]}, "stop: expected"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(settings, message):
    player = Player([10])
    for call in (generate, stream):
        with pytest.raises(ValueError, match=message):
            call(player, Bytes(["a"]), "x", **settings)
    assert not player.capacities


def test_what_needs_a_tokenizer_or_one_prompt_says_so():
    player = Player([10])
    with pytest.raises(ValueError, match="^stop: .* no tokenizer"):
        generate(player, None, [1], stop="x")
    with pytest.raises(ValueError, match="^on_text: "):
        generate(player, None, [1], on_text=print)
    with pytest.raises(ValueError, match="^on_text: "):
        generate(player, Bytes(), ["a"], on_text=print)
    with pytest.raises(ValueError, match="^prompt: "):
        stream(player, Bytes(), ["a"])


MODEL = tiny_decoder(context=400, eos_ids=())


@pytest.fixture(scope="module")
def decoder():
    """The executor of MODEL."""
    return OneProgram(MODEL)


def argmax_ids(model, prompt, num_new):
    """Greedy ids without any cache: the whole text is read again for each token."""
    ids = list(prompt)
    for _ in range(num_new):
        padded = jnp.asarray([ids + [0] * (32 - len(ids))], jnp.int32)
        ids.append(int(jnp.argmax(model(padded)[0, len(ids) - 1])))
    return tuple(ids[len(prompt) :])


PROMPTS = [[3, 9, 27], list(range(5, 29)), [8]]


def test_greedy_ids_are_those_without_a_cache(decoder):
    model = jax.jit(MODEL)
    for prompt in PROMPTS[:2]:
        assert generate(decoder, None, prompt, max_new_tokens=6).ids == argmax_ids(model, prompt, 6)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0, "seed": 11, "top_p": 0.95, "repetition_penalty": 1.3}]
)
def test_a_padded_batch_equals_single_runs(decoder, settings):
    together = generate(decoder, None, PROMPTS, max_new_tokens=12, **settings)
    alone = [generate(decoder, None, prompt, max_new_tokens=12, **settings) for prompt in PROMPTS]
    assert [g.ids for g in together] == [g.ids for g in alone]
    assert len({g.ids for g in alone}) == 3


def test_the_seed_gives_the_text_again(decoder):
    settings = {"max_new_tokens": 12, "temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.3}
    first, second = (generate(decoder, None, PROMPTS[0], **settings) for _ in range(2))
    assert first.seed != second.seed and first.ids != second.ids
    assert generate(decoder, None, PROMPTS[0], seed=first.seed, **settings).ids == first.ids


def test_nothing_compiles_after_the_second_token(decoder):
    sizes = []
    for num_new in (2, 200):
        generate(decoder, None, PROMPTS[0], max_new_tokens=num_new)
        sizes.append((decoder._prefill._cache_size(), decoder._step._cache_size()))
    assert sizes[0] == sizes[1]


def test_ids_are_the_same_when_the_cache_grows(decoder):
    prompt = [(7 * i) % 50 for i in range(250)]
    longer = generate(decoder, None, prompt, max_new_tokens=12).ids
    expected = jnp.argmax(jax.jit(MODEL)(jnp.asarray([prompt + list(longer)]))[0], axis=-1)
    assert longer == tuple(expected[len(prompt) - 1 : -1].tolist())


GOLDEN = ["llama_mha", "llama_gqa", "llama_mqa", "llama_tied", "opt_base", "opt_no_bias", "opt_full_context"]
GOLDEN += ["q_llama_bfloat16", "q_opt_lm_head_too"]


@pytest.mark.parametrize("case", GOLDEN)
def test_greedy_ids_are_golden(case):
    folder = find_case(case)
    golden = np.load(folder / "golden.npz")
    executor = OneProgram(load_model(folder))
    # The golden ids go on after an end of text.
    executor.config = tiny_config(context=executor.config.context, vocab=executor.config.vocab, eos_ids=())
    generations = generate(executor, None, golden["ids"], max_new_tokens=16)
    np.testing.assert_array_equal([g.ids for g in generations], golden["greedy"])


def test_one_token_more_than_the_context_is_refused():
    executor = OneProgram(load_model(find_case("opt_full_context")))
    with pytest.raises(ValueError, match="41 tokens, expected at most the model's context of 40"):
        generate(executor, None, [5] * 41)
    assert generate(executor, None, [5] * 40).finish_reason == "length"


def test_nothing_is_left_after_closed_streams(decoder):
    tokenizer = Bytes(["."] * 50)

    def run():
        pieces = stream(decoder, tokenizer, PROMPTS[0])
        next(pieces)
        pieces.close()
        gc.collect()
        return len(jax.live_arrays())

    num_arrays = run()
    assert [run() for _ in range(3)] == [num_arrays] * 3


def test_capacities_double():
    assert [cache_capacity(n) for n in (1, 256, 257, 1000)] == [256, 256, 512, 1024]
