"""Tokenizers: one BOS, every text back, and a stream that never shows half a character."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors

from pjax.formats import load_tokenizer
from pjax.formats.tokenizer import Tokenizer
from pjax.formats.tokenizer.fast import FastCodec
from tests.cases import find_case
from tests.tiny_tokenizer import LIBRARIES, SAMPLES, byte_level, stream_pieces


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("text", SAMPLES)
def test_text_returns(kind, text):
    """Encode and decode are inverses; the library's own decoding of the whole agrees."""
    tokenizer = Tokenizer(FastCodec(LIBRARIES[kind]))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text == LIBRARIES[kind].decode(ids)


@pytest.mark.parametrize("kind", LIBRARIES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_stream_never_shows_half_a_character(kind, text):
    """Each piece is final: together the pieces are the text, and none invents a replacement."""
    tokenizer = Tokenizer(FastCodec(LIBRARIES[kind]))
    ids = LIBRARIES[kind].encode(text, add_special_tokens=False).ids
    pieces = stream_pieces(tokenizer, ids)
    assert "".join(pieces) == LIBRARIES[kind].decode(ids)
    assert sum(p.count("\ufffd") for p in pieces) == text.count("\ufffd")


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(-2, 330) | st.just(1 << 40), max_size=60))
def test_stream_of_any_ids(ids):
    """Ids that are no text, special or out of range too: the stream agrees with the library's decoding."""
    tokenizer = Tokenizer(FastCodec(LIBRARIES["byte_level"]))
    possible = [i for i in ids if 0 <= i < 1 << 32]
    expected = LIBRARIES["byte_level"].decode(possible)
    assert "".join(stream_pieces(tokenizer, ids)) == tokenizer.decode(ids) == expected


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("unit", ["a", " ", "日", "bytes that are none", "</s>", "no such id"])
def test_push_costs_the_same_at_the_end(kind, unit, monkeypatch):
    """However long the text, a push decodes a few ids only."""
    library = LIBRARIES[kind]
    continuation = (
        "<0x97>" if kind == "byte_fallback" else pre_tokenizers.ByteLevel().pre_tokenize_str("é")[0][0][1]
    )
    special = {"bytes that are none": [library.token_to_id(continuation)], "no such id": [9999]}
    ids = library.encode("a", add_special_tokens=False).ids
    ids += 300 * (special.get(unit) or library.encode(f"a{unit}", add_special_tokens=False).ids[-1:])
    widths = []
    decode = FastCodec.decode
    monkeypatch.setattr(FastCodec, "decode", lambda self, w: widths.append(len(w)) or decode(self, w))
    assert "".join(stream_pieces(Tokenizer(FastCodec(library)), ids)) == library.decode(ids)
    assert max(widths) < 32


def test_special_ids_do_not_disturb_the_text():
    """A special id between words, or inside a character, leaves the text as it was."""
    for kind, library in LIBRARIES.items():
        tokenizer = Tokenizer(FastCodec(library))
        end = library.token_to_id("</s>")
        ids = library.encode("a a 日 a", add_special_tokens=False).ids
        spread = [i for pair in zip([end] * len(ids), ids, strict=True) for i in pair]
        assert tokenizer.decode(spread) == "a a 日 a", kind


def save(folder, library, **settings):
    """A folder with tokenizer.json and tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    "own, settings, config, expected",
    [
        (None, {}, {}, []),
        (None, {}, {"bos_token_id": 2}, [2]),
        (None, {}, {"bos_token_id": None}, []),
        (None, {"add_bos_token": True, "bos_token": "<s>"}, {"bos_token_id": 2}, [0]),
        (None, {"add_bos_token": True, "bos_token": {"content": "</s>"}}, {}, [2]),
        (None, {"add_bos_token": False, "bos_token": "</s>"}, {"bos_token_id": 2}, []),
        ("</s>", {}, {"bos_token_id": 2}, [2]),
        ("</s>", {"add_bos_token": True, "bos_token": "</s>"}, {"bos_token_id": 2}, [2]),
        ("</s>", {"add_bos_token": False}, {}, []),
    ],
)
def test_bos_exactly_once(tmp_path, own, settings, config, expected):
    """Whoever asks for a BOS id, it comes once, and before an empty text as well."""
    library = byte_level()
    plain = library.encode("the fox").ids
    if own:
        pairs = [(own, library.token_to_id(own))]
        library.post_processor = processors.TemplateProcessing(single=f"{own} $A", special_tokens=pairs)
    folder = save(tmp_path / "m", library, **settings)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("the fox") == expected + plain
    assert tokenizer.encode("") == expected
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"


def test_limits_of_training_are_dropped(tmp_path):
    """A tokenizer.json that truncates or pads does neither to a prompt."""
    library = byte_level()
    plain = library.encode("the quick brown fox").ids
    library.enable_truncation(2)
    library.enable_padding(length=64)
    assert load_tokenizer(save(tmp_path / "m", library)).encode("the quick brown fox") == plain


def test_vocabulary_and_merges(tmp_path):
    """OPT's older pair of files is the same tokenizer."""
    library = byte_level()
    settings = {"add_bos_token": True, "bos_token": "</s>"}
    expected = load_tokenizer(save(tmp_path / "m", library, **settings))
    (tmp_path / "m" / "tokenizer.json").unlink()
    library.model.save(str(tmp_path / "m"))
    found = load_tokenizer(tmp_path / "m")
    for text in [*SAMPLES, "a</s>b", "<pad>"]:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))


def test_wrong_folders(tmp_path):
    """Whatever is missing or broken, the message says what still works."""
    with pytest.raises(FileNotFoundError, match="nope does not exist"):
        load_tokenizer(tmp_path / "nope")
    with pytest.raises(FileNotFoundError, match="has no tokenizer .*token ids still work"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="file.txt: expected a GGUF file, but it begins b'text'"):
        (tmp_path / "file.txt").write_text("text")
        load_tokenizer(tmp_path / "file.txt")
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="tokenizer.json:1:1: .*LFS pointer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer that the library"):
        load_tokenizer(tmp_path)
    folder = save(tmp_path / "m", byte_level(), add_bos_token=True, bos_token="<bos>")
    with pytest.raises(ValueError, match="tokenizer_config.json: bos_token: .*found '<bos>'"):
        load_tokenizer(folder)
    with pytest.raises(ValueError, match="half a surrogate pair at character 1"):
        Tokenizer(FastCodec(byte_level())).encode("a\ud800")


@pytest.mark.parametrize("style", ["added_tokens.json", "added_tokens_decoder"])
def test_added_tokens_by_id(tmp_path, style):
    """Tokens beside vocab.json have the ids that their file says, in whatever order it says them."""
    library = byte_level()
    size = library.get_vocab_size()
    library.model.save(str(tmp_path))
    named = {"eos_token": "<end>"}
    if style == "added_tokens.json":
        added = {"<word>": size + 1, "<end>": size}
        (tmp_path / style).write_text(json.dumps(added))
    else:
        named[style] = {
            str(size + 1): {"content": "<word>", "special": False},
            str(size): {"content": "<end>", "special": True},
        }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer(tmp_path)
    a, b = library.encode("a").ids, library.encode("b").ids
    assert tokenizer.encode("a<word>b<end>") == [*a, size + 1, *b, size]
    assert tokenizer.decode([*a, size + 1, *b, size]) == "a<word>b"
    assert tokenizer.named_tokens == {"eos_token": "<end>"}


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "added_tokens.json",
            {"<a>": 9999},
            "'<a>' should have the id 9999, but the vocabulary leaves it 320",
        ),
        ("added_tokens.json", {"<a>": "1"}, "added_tokens.json: '<a>': expected a token id, found '1'"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, None),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder: expected an object"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"x": {}}},
            "expected a token under its id, found",
        ),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "chat_template: expected a text, or"),
    ],
)
def test_wrong_added_tokens(tmp_path, name, content, message):
    """A token that cannot have its id is refused, never moved."""
    byte_level().model.save(str(tmp_path))
    (tmp_path / name).write_text(json.dumps(content))
    if message is None:
        assert load_tokenizer(tmp_path).encode("a")
        return
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "found, expected",
    [
        (None, None),
        ("one", "one"),
        ([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}], "b"),
        ([{"name": "only", "template": "a"}], "a"),
    ],
)
def test_chat_template(tmp_path, found, expected):
    """It comes from a file of its own, or from the settings: one text, or several with names."""
    folder = save(tmp_path / "m", byte_level(), chat_template=found, bos_token="<s>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == expected
    assert tokenizer.named_tokens == {"bos_token": "<s>"}
    (folder / "chat_template.jinja").write_text("é", encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "é"


def test_marked_text_has_no_other_bos(tmp_path):
    """A text that writes its special tokens gets those and no more."""
    folder = save(tmp_path / "m", byte_level(), add_bos_token=True, bos_token="<s>")
    tokenizer = load_tokenizer(folder)
    plain = byte_level().encode("the fox").ids
    assert tokenizer.encode_marked("<s>the fox</s>") == [0, *plain, 2]
    assert tokenizer.encode_marked("the fox") == plain
    with pytest.raises(ValueError, match="half a surrogate pair"):
        tokenizer.encode_marked("\ud800")


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json merges.txt"])
def test_real_life_opt(tmp_path, files):
    """OPT's ids, text and pieces are those of the library it was made with."""
    case = find_case("tok_opt")
    for name in [*files.split(), "tokenizer_config.json"]:
        shutil.copy(case / name, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for golden in json.loads((case / "golden_tok.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(golden["text"]) == golden["ids"]
        assert tokenizer.decode(golden["ids"]) == golden["decoded"]
        assert stream_pieces(tokenizer, golden["ids"]) == [*golden["stream"], ""]
