"""SentencePiece models: the library's own ids, special tokens only where they are written out."""

import json
import shutil
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pjax.formats import load_tokenizer
from tests.cases import find_case
from tests.tiny_tokenizer import SAMPLES, stream_pieces

sentencepiece = pytest.importorskip("sentencepiece", reason="the extra pjax[sentencepiece] is not installed")
model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="protobuf is not installed")


def model(normalizer="identity", **normal):
    """A small model of LLaMA's kind, written piece by piece."""
    proto = model_pb2.ModelProto()
    proto.trainer_spec.model_type = model_pb2.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.normalizer_spec.name = normalizer
    proto.normalizer_spec.add_dummy_prefix = True
    proto.normalizer_spec.remove_extra_whitespaces = False
    types = model_pb2.ModelProto.SentencePiece
    pieces = [("<unk>", types.UNKNOWN), ("<s>", types.CONTROL), ("</s>", types.CONTROL)]
    pieces += [(f"<0x{b:02X}>", types.BYTE) for b in range(256)]
    pieces += [(p, types.NORMAL) for p in ["▁▁", "▁a", "th", "the", "▁the", "aa", "aaa", "▁▁▁"]]
    pieces += [(p, types.NORMAL) for p in "▁abcdefghijklmnopqrstuvwxyz"]
    for i, (piece, kind) in enumerate(pieces):
        proto.pieces.add(piece=piece, score=-float(i), type=kind)
    return proto


def save(folder, proto, **config):
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save(tmp_path_factory.mktemp("spm"), model())


@pytest.fixture(scope="module")
def library():
    return sentencepiece.SentencePieceProcessor(model_proto=model().SerializeToString())


@pytest.mark.parametrize("text", [*SAMPLES, "</s>", "a<s>b", "aaaaaaa", "\x00", "▁a"])
def test_ids_are_the_library_s(tokenizer, library, text):
    ids = tokenizer.encode(text)
    assert ids == [1, *library.encode(text)]
    assert tokenizer.decode(ids) == library.decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_stream_is_the_text(tokenizer, library, text):
    ids = tokenizer.encode(text)
    pieces = stream_pieces(tokenizer, ids)
    assert "".join(pieces) == library.decode(ids[1:])
    assert sum(p.count("\ufffd") for p in pieces) == text.count("\ufffd")


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(-1, 400), max_size=40))
def test_stream_of_any_ids(tokenizer, library, ids):
    """Special ids and such as do not exist give no text and break nothing."""
    shown = [i for i in ids if 2 < i < library.get_piece_size()]
    assert "".join(stream_pieces(tokenizer, ids)) == tokenizer.decode(ids) == library.decode(shown)


def test_byte_tokens_are_bytes(tokenizer, library):
    """<0x0A> is a line's end, and three bytes are one character."""
    newline = library.piece_to_id("<0x0A>")
    assert tokenizer.decode(tokenizer.encode("a\nb")) == "a\nb"
    assert tokenizer.encode("\n")[-1] == newline
    spread = [library.piece_to_id(f"<0x{b:02X}>") for b in "日".encode()]
    assert stream_pieces(tokenizer, spread) == ["", "", "日", ""]
    assert stream_pieces(tokenizer, spread[:2])[-1] == "\ufffd\ufffd"


@pytest.mark.parametrize(
    "config, beside, expected",
    [
        ({}, {}, [1]),
        ({"add_bos_token": False}, {}, []),
        ({"add_bos_token": True, "bos_token": "</s>"}, {}, [2]),
        ({}, {"bos_token_id": 2}, [1]),
        ({"bos_token": {"content": "</s>"}}, {}, [2]),
    ],
)
def test_bos_exactly_once(tmp_path, config, beside, expected):
    (tmp_path / "config.json").write_text(json.dumps(beside))
    assert save(tmp_path, model(), **config).encode("")[:2] == expected


def test_model_without_bos(tmp_path):
    """A model that knows no BOS leaves it to config.json."""
    proto = model()
    proto.trainer_spec.bos_id = -1
    proto.trainer_spec.bos_piece = "<none>"
    assert save(tmp_path, proto).encode("") == []
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 2}))
    assert load_tokenizer(tmp_path).encode("") == [2]


@pytest.mark.parametrize("legacy, space", [(None, True), (True, True), (False, False)])
def test_special_tokens_that_are_written_out(tmp_path, library, legacy, space):
    """They are found in a chat; `legacy` says whether the text after them begins with a space."""
    tokenizer = save(tmp_path, model(), **({} if legacy is None else {"legacy": legacy}))
    start = library.piece_to_id("▁a" if space else "a")
    assert tokenizer.encode_marked("<s>a</s>a") == [1, start, 2, start]
    assert tokenizer.encode_marked("a</s>") == [library.piece_to_id("▁a"), 2]
    assert tokenizer.encode("a</s>")[:2] == [1, library.piece_to_id("▁a")]
    assert 2 not in tokenizer.encode("a</s>")
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("legacy", [True, False])
def test_added_tokens(tmp_path, library, legacy):
    """They are found in any text, the longer first, and written again unless special."""
    size = library.get_piece_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<im>": size + 5, "<im>x": size}))
    tokenizer = save(
        tmp_path,
        model(),
        legacy=legacy,
        add_bos_token=False,
        added_tokens_decoder={str(size + 5): {"content": "<im>", "special": True}},
    )
    b = library.encode("b") if legacy else [library.piece_to_id("b")]
    assert tokenizer.encode("a<im>xb<im>") == [*library.encode("a"), size, *b, size + 5]
    assert tokenizer.decode(tokenizer.encode("a<im>x<im>")) == "a<im>x"
    assert "".join(stream_pieces(tokenizer, tokenizer.encode("a<im>x b<im>"))) == "a<im>x b"


def test_wrong_files(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="id 3 is '<0x00>', but the files beside it call it '<pad>'"):
        save(tmp_path, model(), added_tokens_decoder={"3": {"content": "<pad>"}})
    for content in (b"", b"x", b"version https://git-lfs.github.com/spec/v1\n", b"{}", b"\x0a\xff\xff\xff"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ValueError, match="tokenizer.model: expected a SentencePiece model; the file"):
            load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=r"pip install 'pjax\[sentencepiece\]'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("settings_too", [True, False])
def test_real_life_llama(tmp_path, settings_too):
    """LLaMA's kind of ids, text and pieces, with its tokenizer.model alone too."""
    case = find_case("tok_llama_spm")
    for name in ["tokenizer.model", *(["tokenizer_config.json"] if settings_too else [])]:
        shutil.copy(case / name, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for golden in json.loads((case / "golden_tok.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(golden["text"]) == golden["ids"]
        assert tokenizer.decode(golden["ids"]) == golden["decoded"]
        assert stream_pieces(tokenizer, golden["ids"]) == [*golden["stream"], ""]
