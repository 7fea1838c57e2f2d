"""The tokenizer of a Hugging Face folder, from whichever of its files are there."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from pjax.formats.files import read_json
from pjax.formats.tokenizer.fast import AddedToken, FastCodec, add_tokens, refused_as
from pjax.formats.tokenizer.spm import SentencePieceCodec, load_sentencepiece
from pjax.formats.tokenizer.tokenizer import Tokenizer

_USUAL_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
"""Entries of a vocab.json that no merge can make, in OPT and its relatives."""

_SETTINGS = "tokenizer_config.json"


def folder_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a model folder.

    It is tokenizer.json, else tokenizer.model, else vocab.json with merges.txt. A BOS id is put first if
    tokenizer_config.json says so (`add_bos_token`); else as tokenizer.json's post-processor or
    tokenizer.model does; without any, if config.json has a `bos_token_id`.

    Args:
        folder: the model's.

    Raises:
        FileNotFoundError: no such folder, or no tokenizer in it.
        ValueError: a broken file, or a package that is missing.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"The tokenizer's folder {folder} does not exist, or is no folder.")
    settings = _read_if_there(folder / _SETTINGS)
    named = _named_tokens(settings) or _named_tokens(_read_if_there(folder / "special_tokens_map.json"))
    if (folder / "tokenizer.json").is_file():
        codec = FastCodec(_load_json(folder / "tokenizer.json"))
    elif (folder / "tokenizer.model").is_file():
        # Meta's own tokenizer begins each stretch of text with a space; `legacy: false` only the first.
        spaces = settings.get("legacy") is not False
        added = _added_tokens(folder, settings, named)
        codec = load_sentencepiece(folder / "tokenizer.model", added, spaces)
        named = {**_own_names(codec), **named}
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        codec = FastCodec(_load_merges(folder, settings, named))
    else:
        raise FileNotFoundError(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt): "
            f"text cannot be read or written; prompts given as token ids still work."
        )
    return Tokenizer(codec, _bos_id(folder, codec, settings, named), _chat_template(folder, settings), named)


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _load_json(file: Path) -> tokenizers.Tokenizer:
    read_json(file)  # Says better than the library what is wrong with a file that is no JSON.
    with refused_as(f"{file} is not a tokenizer that the library `tokenizers` reads"):
        library = tokenizers.Tokenizer.from_file(str(file))
    library.no_truncation()  # A file may carry the limits of its training; a prompt is never cut.
    library.no_padding()
    return library


def _load_merges(folder: Path, settings: Mapping[str, Any], named: Mapping[str, str]) -> tokenizers.Tokenizer:
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    read_json(folder / "vocab.json")
    with refused_as(f"{files[0]} and {files[1]} do not fit together"):
        library = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
    prefix_space = settings.get("add_prefix_space") is True
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    library.decoder = tokenizers.decoders.ByteLevel()
    specials = dict.fromkeys([*_USUAL_SPECIALS, *named.values()])
    library.add_special_tokens([s for s in specials if library.token_to_id(s) is not None])
    add_tokens(library, _added_tokens(folder, settings, named), str(folder))
    return library


def _added_tokens(
    folder: Path, settings: Mapping[str, Any], named: Mapping[str, str]
) -> tuple[AddedToken, ...]:
    """Those of added_tokens.json and of tokenizer_config.json's `added_tokens_decoder`, which knows more."""
    found: dict[int, AddedToken] = {}
    file = folder / "added_tokens.json"
    for content, token_id in _read_if_there(file).items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0 or not content:
            raise ValueError(f"{file}: {content!r}: expected a token id, found {token_id!r}.")
        found[token_id] = AddedToken(token_id, content, special=content in named.values())
    file = folder / _SETTINGS
    known = settings.get("added_tokens_decoder") or {}
    if not isinstance(known, dict):
        raise ValueError(f"{file}: added_tokens_decoder: expected an object, found {known!r}.")
    for key, value in known.items():
        content = _content(value)
        if not key.isdecimal() or not content:
            raise ValueError(
                f"{file}: added_tokens_decoder: expected a token under its id, found {key!r}: {value!r}."
            )
        flags = [
            isinstance(value, dict) and value.get(flag) is True for flag in ("special", "lstrip", "rstrip")
        ]
        found[int(key)] = AddedToken(int(key), content, *flags)
    return tuple(found.values())


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a file calls by their role."""
    roles = ("bos_token", "eos_token", "unk_token", "pad_token")
    contents = {role: _content(settings.get(role)) for role in roles}
    return {role: content for role, content in contents.items() if content is not None}


def _content(token: Any) -> str | None:
    """The text of a special token, which a file gives as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _own_names(codec: SentencePieceCodec) -> dict[str, str]:
    model = codec.first
    ids = {"bos_token": model.bos_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    return {role: model.id_to_piece(token_id) for role, token_id in ids.items() if token_id >= 0}


def _bos_id(
    folder: Path, codec: FastCodec | SentencePieceCodec, settings: Mapping[str, Any], named: Mapping[str, str]
) -> int | None:
    """The id that is put before a text; the codec then puts nothing around it."""
    wanted = settings.get("add_bos_token")
    if isinstance(codec, SentencePieceCodec):
        wanted = ("bos_token" in named or None) if wanted is None else wanted
    elif wanted is not None:
        codec.library.post_processor = tokenizers.processors.Sequence([])
    elif codec.library.post_processor is not None:
        return None
    if wanted is False:
        return None
    if wanted:
        token = named.get("bos_token")
        bos_id = None if token is None else codec.id_of(token)
        if bos_id is None:
            raise ValueError(
                f"{folder / _SETTINGS}: bos_token: expected a token of the vocabulary, found {token!r}."
            )
        return bos_id
    bos_id = _read_if_there(folder / "config.json").get("bos_token_id")
    return bos_id if isinstance(bos_id, int) and codec.has(bos_id) else None


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """That of chat_template.jinja, else of tokenizer_config.json: one text, or several with names."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: expected a template, not UTF-8 at byte {error.start}.") from error
    found = settings.get("chat_template")
    if found is None or isinstance(found, str):
        return found
    try:
        templates = {entry["name"]: entry["template"] for entry in found}
    except (TypeError, KeyError):
        templates = {}
    if not templates or not all(isinstance(text, str) for entry in templates.items() for text in entry):
        raise ValueError(
            f"{folder / _SETTINGS}: chat_template: expected a text, or a list of objects with "
            "name and template."
        )
    if "default" not in templates:
        logging.warning(
            "%s: chat_template: none of %s is called default; the first is used.",
            folder / _SETTINGS,
            ", ".join(templates),
        )
    return templates.get("default", next(iter(templates.values())))
