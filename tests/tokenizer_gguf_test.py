"""Tokenizers from GGUF metadata: the ids of the library that the vocabulary came from."""

import json
import logging
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from pjax.formats import load_tokenizer
from pjax.formats.gguf_file import GgufFile
from pjax.formats.tokenizer.from_gguf import gguf_tokenizer
from pjax.formats.tokenizer.pretokenizers import PRE_TOKENIZERS
from tests.cases import find_case
from tests.tiny_tokenizer import SAMPLES, byte_fallback, byte_level, stream_pieces

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def file_of(metadata):
    return GgufFile(Path("m.gguf"), 3, b"GGUF", metadata, {})


def bpe_metadata(library, pre="gpt-2", **more):
    """What a converter writes for a byte-level library."""
    vocab = library.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {i for i, token in library.get_added_tokens_decoder().items() if token.special}
    merges = json.loads(library.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": np.array(
            [CONTROL if i in special else NORMAL for i in range(len(tokens))]
        ),
        "tokenizer.ggml.merges": tuple(" ".join(merge) for merge in merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def spm_metadata(pieces, **more):
    """What a converter writes for a SentencePiece model; pieces as (text, score, type)."""
    tokens, scores, types = zip(*pieces, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(types),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def spm_pieces():
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)]
    return pieces + [(p, -float(i), NORMAL) for i, p in enumerate(["▁a", "▁", *"abcdefghijklmnopqrstuvwxyz"])]


@pytest.mark.parametrize("text", [*SAMPLES, "a</s>b", "<pad>", "it's 1234"])
def test_byte_level(text):
    """A byte-level vocabulary gives the ids of the library that it was taken from."""
    library = byte_level()
    tokenizer = gguf_tokenizer(file_of(bpe_metadata(library)))
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == library.decode(ids)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    pre=st.sampled_from(sorted(PRE_TOKENIZERS)),
)
def test_every_way_to_cut_words_keeps_the_text(text, pre):
    tokenizer = gguf_tokenizer(file_of(bpe_metadata(byte_level(), pre, add_bos_token=False)))
    ids = tokenizer.encode(text)
    assert "".join(stream_pieces(tokenizer, ids)) == tokenizer.decode(ids)
    if not PRE_TOKENIZERS[pre].composed:
        assert tokenizer.decode(ids) == text


def test_whole_words():
    """LLaMA 3 takes a word of its vocabulary even if no merges lead there."""
    metadata = bpe_metadata(byte_level(), "llama-bpe")
    metadata["tokenizer.ggml.tokens"] += ("zqz",)
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], NORMAL)
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert gguf_tokenizer(file_of(metadata)).encode("zqz") == [0, last]
    assert last not in gguf_tokenizer(file_of(metadata | {"tokenizer.ggml.pre": "gpt-2"})).encode("zqz")


@pytest.mark.parametrize("text", [*SAMPLES, "é日", "▁a", "a</s>b"])
def test_sentencepiece_by_hand(text):
    """Scores become merges; what no piece spells is written in bytes; special tokens are found."""
    library = byte_fallback()
    tokenizer = gguf_tokenizer(file_of(spm_metadata(spm_pieces(), add_bos_token=False)))
    ids = tokenizer.encode(text)
    tokens = [tokenizer.codec.library.id_to_token(i) for i in ids]
    assert tokens == library.encode(text).tokens
    assert tokenizer.decode(ids) == library.decode(library.encode(text).ids)


def read_pieces(model):
    model_pb2 = pytest.importorskip(
        "sentencepiece.sentencepiece_model_pb2", reason="needs pjax[sentencepiece]"
    )
    proto = model_pb2.ModelProto()
    proto.ParseFromString(model)
    return [(piece.piece, piece.score, piece.type) for piece in proto.pieces]


def test_real_life_llama():
    """The pieces of a real model give its ids, its text and its stream."""
    case = find_case("tok_llama_spm")
    tokenizer = gguf_tokenizer(file_of(spm_metadata(read_pieces((case / "tokenizer.model").read_bytes()))))
    for golden in json.loads((case / "golden_tok.json").read_text(encoding="utf-8")):
        if "<" not in golden["text"]:  # a GGUF's special tokens are found in any text
            assert tokenizer.encode(golden["text"]) == golden["ids"]
        assert tokenizer.decode(golden["ids"]) == golden["decoded"]
        assert stream_pieces(tokenizer, golden["ids"]) == [*golden["stream"], ""]


def test_sentencepiece_s_own_order():
    """Merges in the order of scores join what SentencePiece joins, runs of one letter and ties included."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs pjax[sentencepiece]")
    model = (find_case("tok_llama_spm") / "tokenizer.model").read_bytes()
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = gguf_tokenizer(file_of(spm_metadata(read_pieces(model), add_bos_token=False)))
    random = np.random.default_rng(0)
    for alphabet in ("a b", "x", " \n", "the in erandouls", "日aé "):
        for _ in range(200):
            text = "".join(random.choice(list(alphabet), random.integers(1, 16)))
            assert tokenizer.encode(text) == library.encode(text), text


@pytest.mark.parametrize("prefix, decoded", [(True, "a b"), (False, " a b")])
def test_space_prefix(prefix, decoded):
    """A file says whether a text begins with a space; SentencePiece's do by default."""
    tokenizer = gguf_tokenizer(file_of(spm_metadata(spm_pieces(), add_space_prefix=prefix)))
    ids = [i for i, piece in enumerate(spm_pieces()) if piece[0] == "▁a"]
    assert (tokenizer.encode("a")[1:] == ids) == prefix
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert tokenizer.decode(tokenizer.encode(" a b" if not prefix else "a b")) == decoded
    spaced = gguf_tokenizer(file_of(bpe_metadata(byte_level(), add_space_prefix=prefix)))
    assert spaced.encode("the") == byte_level().encode(" the" if prefix else "the").ids


@pytest.mark.parametrize(
    "metadata, expected",
    [
        (spm_metadata(spm_pieces()), 1),
        (spm_metadata(spm_pieces(), add_bos_token=False), None),
        (spm_metadata(spm_pieces(), bos_token_id=2), 2),
        (bpe_metadata(byte_level()), None),
        (bpe_metadata(byte_level(), add_bos_token=True), 0),
        (bpe_metadata(byte_level(), "llama-bpe"), 0),
        (bpe_metadata(byte_level(), "llama-bpe", add_bos_token=False), None),
    ],
)
def test_bos(metadata, expected):
    """The flag decides; where there is none, the kind of tokenizer."""
    tokenizer = gguf_tokenizer(file_of(metadata))
    assert tokenizer.bos_id == expected
    assert tokenizer.encode("") == ([] if expected is None else [expected])
    assert tokenizer.encode_marked("") == []
    del metadata["tokenizer.ggml.bos_token_id"]
    if "tokenizer.ggml.add_bos_token" not in metadata:
        assert gguf_tokenizer(file_of(metadata)).bos_id is None


def test_token_types():
    """Control tokens are no text, user-defined ones are, and both are found whole."""
    pieces = [*spm_pieces(), ("<im>", 0.0, CONTROL), ("[INST]", 0.0, USER_DEFINED)]
    tokenizer = gguf_tokenizer(file_of(spm_metadata(pieces, add_bos_token=False)))
    control, defined = len(pieces) - 2, len(pieces) - 1
    ids = tokenizer.encode("<im>a[INST]")
    assert ids[0] == control and ids[-1] == defined
    assert tokenizer.decode(ids) == "a[INST]"
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_twice_the_same_token(caplog):
    """Padding that repeats a token is read, with a word about it."""
    tokenizer = gguf_tokenizer(file_of(spm_metadata([*spm_pieces(), ("a", -1.0, NORMAL)])))
    assert "1 tokens occur more than once" in caplog.text
    assert tokenizer.encode("ba")[-1] == spm_pieces().index(next(p for p in spm_pieces() if p[0] == "a"))


@pytest.mark.parametrize("pre", [None, "no-such"])
def test_unknown_words(pre, caplog):
    """A way to cut words that is not known is said, and what is assumed."""
    metadata = bpe_metadata(byte_level(), pre)
    assert gguf_tokenizer(file_of(metadata)).encode("a b") == byte_level().encode("a b").ids
    assert "tokenizer.ggml.pre" in caplog.text and "as GPT-2 does" in caplog.text


BPE = bpe_metadata(byte_level())
SPM = spm_metadata(spm_pieces())


@pytest.mark.parametrize(
    "metadata, changes, message",
    [
        (BPE, {"model": "bert"}, "tokenizer.ggml.model: expected one of the supported kinds, .*found 'bert'"),
        (BPE, {"model": 3}, "tokenizer.ggml.model: expected a text, found 3"),
        (BPE, {"tokens": ()}, "tokenizer.ggml.tokens: expected at least one token"),
        (BPE, {"tokens": np.arange(3)}, "tokenizer.ggml.tokens: expected an array of texts, found array"),
        (
            BPE,
            {"token_type": np.arange(3)},
            "tokenizer.ggml.token_type: expected 320 numbers, .*found 3 values",
        ),
        (BPE, {"token_type": 1}, "tokenizer.ggml.token_type: expected 320 numbers, one a token, found 1"),
        (BPE, {"merges": ...}, "tokenizer.ggml.merges: expected an array of texts, found no such key"),
        (BPE, {"merges": ("ab",)}, "tokenizer.ggml.merges: expected two tokens with a space .*found 'ab'"),
        (BPE, {"merges": ("a b c",)}, "tokenizer.ggml.merges: expected two tokens with a space"),
        (BPE, {"merges": ("a zzz",)}, "tokenizer.ggml.merges and tokenizer.ggml.tokens do not fit together"),
        (
            BPE,
            {"bos_token_id": 320},
            "tokenizer.ggml.bos_token_id: expected a token id from 0 to 319, found 320",
        ),
        (BPE, {"eos_token_id": -1}, "tokenizer.ggml.eos_token_id: expected a token id"),
        (BPE, {"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id: expected a token id"),
        (BPE, {"unknown_token_id": 1 << 32}, "tokenizer.ggml.unknown_token_id: expected a token id"),
        (BPE, {"add_bos_token": 1}, "tokenizer.ggml.add_bos_token: expected true or false, found 1"),
        (BPE, {"add_bos_token": True, "bos_token_id": ...}, "bos_token_id: expected an id, since"),
        (BPE, {"pre": 1}, "tokenizer.ggml.pre: expected a text, found 1"),
        (SPM, {"scores": ...}, "tokenizer.ggml.scores: expected 287 numbers, one a token, found no such key"),
        (SPM, {"scores": np.zeros(3)}, "tokenizer.ggml.scores: expected 287 numbers"),
        (SPM, {"add_space_prefix": "yes"}, "add_space_prefix: expected true or false"),
    ],
)
def test_wrong_metadata(metadata, changes, message):
    """Every wrong value is named by its key."""
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    wrong = {key: value for key, value in (metadata | changes).items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer(file_of(wrong))


JUNK = st.sampled_from(
    [
        None,
        -1,
        1.5,
        True,
        "",
        "x",
        (),
        ("",),
        ("a", "a"),
        ("a", 1),
        np.arange(5),
        np.full(320, 7),
        np.full(287, 6),
    ]
)


@st.composite
def damaged_metadata(draw):
    """Metadata with keys gone, values of other types, and entries of the lists replaced."""
    metadata = dict(draw(st.sampled_from([BPE, SPM])))
    for key in draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=3, unique=True)):
        value = metadata.pop(key)
        if isinstance(value, tuple):
            entries = list(value)
            for index in draw(st.lists(st.integers(0, len(value) - 1), max_size=4)):
                entries[index] = draw(st.sampled_from(["", " ", "a", " a", "a ", "▁", "<s>", "Ġ b", "日"]))
            metadata[key] = tuple(entries)
        elif draw(st.booleans()):
            metadata[key] = draw(JUNK)
    return metadata


@settings(max_examples=300, deadline=None)
@given(metadata=damaged_metadata())
def test_damaged_metadata(metadata):
    """Whatever is in it, there is a tokenizer that works or an error that names the file."""
    try:
        tokenizer = gguf_tokenizer(file_of(metadata))
    except (ValueError, FileNotFoundError) as error:
        assert "m.gguf" in str(error)
    else:
        assert isinstance(tokenizer.decode(tokenizer.encode("the 日 a</s> \n  b")), str)


def test_chat_template_must_be_a_text():
    assert gguf_tokenizer(file_of(BPE | {"tokenizer.chat_template": "x"})).chat_template == "x"
    with pytest.raises(ValueError, match="tokenizer.chat_template: expected a text"):
        gguf_tokenizer(file_of(BPE | {"tokenizer.chat_template": 1}))


def test_a_file_without_tokenizer():
    with pytest.raises(FileNotFoundError, match="m.gguf has no tokenizer .*token ids still work"):
        gguf_tokenizer(file_of({}))


def test_a_file_written_by_the_gguf_package(tmp_path, caplog):
    """The whole way from a file."""
    caplog.set_level(logging.WARNING)
    library = byte_level()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    metadata = bpe_metadata(library)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(metadata["tokenizer.ggml.tokens"]))
    writer.add_token_types(metadata["tokenizer.ggml.token_type"].tolist())
    writer.add_token_merges(list(metadata["tokenizer.ggml.merges"]))
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ bos_token }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert tokenizer.encode("the fox") == library.encode("the fox").ids
    assert tokenizer.chat_template == "{{ bos_token }}"
    assert not caplog.text
