"""Chats: the text that a template means, errors in its own words, and nothing beyond what it may do."""

import datetime
import json

import pytest

from pjax import LLM, Generation
from pjax.chat import encode_chat, render_chat
from pjax.formats.tokenizer import Tokenizer
from pjax.formats.tokenizer.fast import FastCodec
from tests.tiny import tiny_llama
from tests.tiny_tokenizer import byte_level

CHATML = (
    "{% for message in messages %}\n"
    "    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a < b & é?"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template, messages=CHAT, tokens=TOKENS):
    return render_chat(template, messages, tokens)


def test_a_real_template():
    """Lines with nothing but a tag leave nothing behind; letters are not escaped."""
    text = render(CHATML)
    expected = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in CHAT)
    assert text.replace("    ", "").replace("\n\n", "\n") == expected + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template, expected",
    [
        ("{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}", "<s>a < b & é?</s>"),
        ("[{{ unk_token }}]", "[]"),
        ("{{ messages[1] | tojson }}", json.dumps(CHAT[1], ensure_ascii=False)),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{{ tools is none and documents is none }}", "True"),
        ("{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.length }}{% endfor %}", "2"),
        ("{% generation %}{{ 'kept' }}{% endgeneration %}!", "kept!"),
        (
            "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}",
            "2",
        ),
        ("{% for k, v in messages[0].items() if k == 'role' %}{{ v }}{% else %}none{% endfor %}", "system"),
        ("{{ 2 ** 3 * 2 }}{{ '-' * 3 }}", "16---"),
        ("{{ messages[0].name }}", "n"),
    ],
)
def test_what_templates_use(template, expected):
    messages = [{**CHAT[0], "name": "n"}, CHAT[1]] if "name }" in template else CHAT
    assert render(template, messages) == expected


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("one\n{% if %}", "chat template, line 2: Expected an expression"),
        ("{{ messages[0].x.y }}", "chat template: 'dict object' has no attribute 'x'"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{% include 'file' %}", "chat template: no loader for this environment"),
        (
            "{{ messages.append(1) }}",
            "chat template: access to attribute 'append' of 'list' object is unsafe",
        ),
        ("{{ cycler.__init__.__globals__ }}", "access to attribute '__init__' of 'type' object is unsafe"),
        ("{{ raise_exception.__globals__.sys.modules }}", "is undefined|unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages[0]['content'].format.__func__() }}", "unsafe|no attribute"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "is too large a number"),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            "more than 20,000 steps",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "more than",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'a' * 10 ** 10 }}", "10000000000 is too much"),
        ("{{ 9 ** 9 ** 9 }}", "is too much"),
        ("{{ [1] * 2000000 }}", "is too much"),
    ],
)
def test_refusals_and_hostile_templates(template, message, monkeypatch):
    """The template's own words reach the caller; Python's insides and endless work stay out of its reach."""
    monkeypatch.setattr("pjax.chat.MAX_STEPS", 20_000)
    with pytest.raises(ValueError, match=message):
        render(template)


@pytest.mark.parametrize(
    "messages, message",
    [
        ("hello", "messages: expected a list of at least one message, got 'hello'"),
        ([], "messages: expected a list of at least one message"),
        (None, "messages: expected a list"),
        (["hello"], r"messages\[0\]: expected {\"role\": ..., \"content\": ...}, got 'hello'"),
        ([CHAT[0], {"role": "user"}], r"messages\[1\]: content: expected a text, got no such key"),
        ([{"content": "a"}], r"messages\[0\]: role: expected a text, got no such key"),
        ([{"role": "user", "content": None}], r"messages\[0\]: content: expected a text, got None"),
        ([{"role": "user", "content": [1]}], r"messages\[0\]: content: expected a text"),
        ([{"role": "user", "content": "a", "x": object()}], "messages: expected what JSON can express"),
    ],
)
def test_wrong_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        render(CHATML, messages)


def chat_tokenizer(template):
    return Tokenizer(FastCodec(byte_level()), 0, template, TOKENS)


def test_bos_as_the_template_writes_it():
    """Special tokens in the text are ids, and BOS comes from the template alone."""
    content = byte_level().encode("a").ids
    once = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    assert encode_chat([{"role": "user", "content": "a"}], chat_tokenizer(once)) == [0, *content, 2]
    never = "{{ messages[0].content }}"
    assert encode_chat([{"role": "user", "content": "a"}], chat_tokenizer(never)) == content


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model whose vocabulary is as large as its tokenizer's."""
    library = byte_level()
    monkeypatch.setattr("tests.tiny.VOCAB", library.get_vocab_size())
    tiny_llama(tmp_path / "m", max_position_embeddings=256)
    library.save(str(tmp_path / "m" / "tokenizer.json"))
    settings = {"chat_template": CHATML, **TOKENS}
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path / "m"


def test_llm_chat(folder):
    """An answer is what generate gives for the template's text as ids."""
    llm = LLM(folder)
    answer = llm.chat([{"role": "user", "content": "a"}], max_new_tokens=4)
    assert isinstance(answer, Generation)
    text = render(CHATML, [{"role": "user", "content": "a"}])
    assert answer.ids == llm.generate(byte_level().encode(text).ids, max_new_tokens=4).ids
    pieces = []
    llm.chat([{"role": "user", "content": "a"}], max_new_tokens=4, on_text=pieces.append)
    assert "".join(pieces) == answer.text


def test_end_of_turn(folder):
    """The answer ends where the model's end ids say, each of them, and without it."""
    llm = LLM(folder)
    chat = [{"role": "user", "content": "a"}]
    ids = llm.chat(chat, max_new_tokens=8).ids
    end = next(i for i, token in enumerate(ids) if token not in ids[:i] and i > 0)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, ids[end]]}))
    answer = LLM(folder).chat(chat, max_new_tokens=8)
    assert answer.ids == ids[:end] and answer.finish_reason == "stop"


def test_models_that_cannot_chat(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="this model has no chat template .*use generate with a text"):
        LLM(folder).chat(CHAT)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="this model has no tokenizer; use generate with token ids"):
        LLM(folder).chat(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'abc' | slice(3000000) | list | length }}",
        "{{ 'abc' | batch(10**9) | list | length }}",
        "{{ 'abc' | center(99999999) }}",
        "{{ '%099999999d' % 1 }}",
        "{{ '%*d' % (99999999, 1) }}",
        "{{ '{:>99999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 99999999) }}",
        "{{ '%099999999d' | format(1) }}",
        "{{ 'a'.ljust(99999999) }}",
    ],
)
def test_no_number_makes_a_huge_text(source):
    with pytest.raises(ValueError, match="chat template: .* is too "):
        render_chat(source, [{"role": "user", "content": "x"}], {})


def test_large_numbers_in_messages_are_only_text():
    message = {"role": "user", "content": "call {1234567890} at 100% of 12345678"}
    template = "{{ messages[0].content | trim }} {{ messages[0] | tojson }} {{ '%s' % 7 }}"
    assert "12345678 {" in render_chat(template, [message], {})
