"""Damage for `experiments.fuzz_formats`: bytes, JSON, GGUF containers and pickles, where it matters."""

import copy
import io
import json
import math
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf

_COUNTS = (0, 1, 2, 3, 7, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
"""Where lengths, offsets and sizes overflow, or ask for more memory than there is."""

_WORDS = (
    "",
    "x",
    "relu",
    "fatrelu",
    "linear",
    "yarn",
    "llama",
    "opt",
    "falcon",
    "gpt2",
    "model",
    "../x",
    "\0",
)
_LONG = ("x" * 300, "▁a" * 2000)

_DEEP, _DIGITS, _HALF = "@deep", "@digits", "@half"
_NOT_JSON = {_DEEP: "[" * 100_000 + "]" * 100_000, _DIGITS: "9" * 5000, _HALF: '"\\ud800"'}
"""What `json.dumps` does not write: more nesting than Python's stack, a number beyond its limit of digits."""

_WRONG = (
    (None, True, False, 0, 1, -1, 2, 3, 4, 16, 17, 10**5, 10**9, 2**31, 2**63, 10**30, 10**400)
    + (0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, math.nan, math.inf, -math.inf)
    + ([], [1], [1.5], ["x"], [[]], [None], [2**63, 2**63], [0, 2**62, 2**62], [1] * 70)
    + ({}, {"a": 1}, {"content": 1}, {"rope_type": "linear"}, _DEEP, _DIGITS, _HALF)
    + _WORDS
    + _LONG
)
"""JSON of every type, and every kind of number."""

# A tuple of two of a tuple of two ...: small in the file, endless for what looks at all of it.
_LAUGHS = b")q\xfe" + b"h\xfeh\xfe\x86q\xfe" * 60
_OPCODES = (
    _LAUGHS, b"N", b"]", b"}", b")", b"(", b"\x85", b"\x86", b"R", b"b", b"Q", b"s", b"t", b"a", b"h\x00",
    b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8b\x00\x10\x00\x00",
    b"r\xff\xff\xff\x00", b"X\xff\xff\xff\x7f", b"cos\nsystem\n", b"ctorch\nHalfStorage\n",
)  # fmt: skip


def damage_bytes(rng: random.Random, data: bytes, head: int) -> bytes:
    """Returns bytes with a few of the first `head` of them changed, cut, or put elsewhere."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, kind = rng.randrange(max(1, min(head, len(found)))), rng.randrange(7)
        if kind == 0:
            found[at : at + 1] = rng.randbytes(1)
        elif kind == 1 and found:
            found[at] ^= 1 << rng.randrange(8)
        elif kind in (2, 3):
            width = rng.choice((1, 2, 4, 8))
            found[at : at + width] = (rng.choice(_COUNTS) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 4:
            start, length = rng.randrange(max(1, head)), rng.randrange(1, 64)
            found[at : at + rng.choice((0, length))] = found[start : start + length]
        elif kind == 5:
            del found[at : at + rng.randrange(1, 16)]
        elif rng.random() < 0.3:
            del found[rng.randrange(len(found) + 1) :]
    return bytes(found)


def damage_json(rng: random.Random, text: bytes, keys: Sequence[str] = ()) -> bytes:
    """Returns a JSON object with values of wrong types, keys gone, twice or exchanged, or its text damaged.

    Args:
        rng: where the damage comes from.
        text: the object.
        keys: that may be added to it.
    """
    tree = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        slots = _slots(tree)
        if not slots or (keys and rng.random() < 0.2):
            tree[rng.choice(keys or ("x",))] = copy.deepcopy(rng.choice(_WRONG))
            continue
        (parent, key), (other, other_key) = rng.choice(slots), rng.choice(slots)
        kind = rng.randrange(6)
        if kind < 3:
            parent[key] = copy.deepcopy(rng.choice(_WRONG))
        elif kind == 3:
            del parent[key]
        elif kind == 4:
            parent[key] = json.loads(json.dumps(other[other_key]))
        elif isinstance(parent[key], int | float):
            parent[key] *= rng.choice((-1, 2, 3, 1000, 10**6))
    found = json.dumps(tree)
    for name, raw in _NOT_JSON.items():
        found = found.replace(f'"{name}"', raw)
    if isinstance(tree, dict) and tree and rng.random() < 0.1:
        found = f"{{{json.dumps(rng.choice(list(tree)))}: {json.dumps(rng.choice(_WORDS))}, {found[1:]}"
    raw = found.encode()
    return damage_bytes(rng, raw, len(raw)) if rng.random() < 0.2 else raw


def _slots(tree: Any) -> list[tuple[Any, Any]]:
    """Every place of a value in a tree, as (container, key)."""
    own = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [slot for key, value in own for slot in [(tree, key), *_slots(value)]]


class GgufPieces(NamedTuple):
    """A GGUF file cut where its own grammar cuts it.

    Attributes:
        magic: the first four bytes.
        keys: one entry of the metadata each.
        tensors: one description of a tensor each.
        data: all behind the header.
    """

    magic: bytes
    keys: list[bytes]
    tensors: list[bytes]
    data: bytes

    @classmethod
    def of(cls, file: Path) -> "GgufPieces":
        """Cuts a file, as the package `gguf` understands it."""
        raw = file.read_bytes()
        file.write_bytes(b"GGUF" + raw[4:])  # the package does not know PowerInfer's
        reader = gguf.GGUFReader(file)
        fields = [f for f in reader.fields.values() if not f.name.startswith("GGUF.")]
        spans = [
            [(f.offset, f.offset + sum(array.nbytes for array in f.parts)) for f in part]
            for part in (fields, [tensor.field for tensor in reader.tensors])
        ]
        keys, tensors = ([raw[a:b] for a, b in span] for span in spans)
        return cls(raw[:4], keys, tensors, raw[reader.data_offset :])

    def joined(self) -> bytes:
        """Returns the file again, with counts that are right."""
        head = self.magic + struct.pack("<IQQ", 3, len(self.tensors), len(self.keys))
        head += b"".join(self.keys) + b"".join(self.tensors)
        return head + bytes(-len(head) % 32) + self.data


def damage_gguf(rng: random.Random, pieces: GgufPieces, other: GgufPieces) -> bytes:
    """Returns a GGUF file with entries damaged, gone, twice, or taken from another file."""
    found = pieces._replace(keys=[*pieces.keys], tensors=[*pieces.tensors])
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        is_key = not found.tensors or rng.random() < 0.6
        entries, others = (found.keys, other.keys) if is_key else (found.tensors, other.tensors)
        if not entries:
            continue
        at, kind = rng.randrange(len(entries)), rng.randrange(6)
        if kind == 0:
            del entries[at]
        elif kind == 1:
            entries.insert(rng.randrange(len(entries) + 1), rng.choice([entries[at], *others]))
        elif kind == 2 and not is_key:
            found = found._replace(data=found.data[: rng.randrange(len(found.data) + 1)])
        else:
            entries[at] = (_damage_key if is_key else _damage_tensor)(rng, entries[at])
    raw = found.joined()
    head = len(raw) - len(found.data)
    return damage_bytes(rng, raw, head) if raw == pieces.joined() or rng.random() < 0.3 else raw


def _damage_key(rng: random.Random, entry: bytes) -> bytes:
    end = 8 + struct.unpack_from("<Q", entry)[0]
    if rng.random() < 0.15:
        new = rng.choice(("split.count", "general.alignment", "general.type", "tokenizer.ggml.pre")).encode()
        return struct.pack("<Q", len(new)) + new + _gguf_value(rng)
    return entry[:end] + _gguf_value(rng)


def _gguf_value(rng: random.Random, depth: int = 0) -> bytes:
    """A value of any type, behind its type."""
    kind = rng.randrange(13)
    return struct.pack("<I", kind) + _gguf_content(rng, kind, depth)


def _gguf_content(rng: random.Random, kind: int, depth: int) -> bytes:
    if kind == 8:
        raw = rng.choice((*_WORDS, *_LONG)).encode() if rng.random() < 0.8 else rng.randbytes(9)
        return struct.pack("<Q", len(raw)) + raw
    if kind == 9:
        item, length = rng.randrange(13 if depth < 6 else 8), rng.choice((0, 1, 2, 3, 320))
        length = min(length, 2) if item == 9 else length
        items = b"".join(_gguf_content(rng, item, depth + 1) for _ in range(length))
        return struct.pack("<IQ", item, length if rng.random() < 0.8 else rng.choice(_COUNTS)) + items
    width = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)[kind]
    if kind in (6, 12) and rng.random() < 0.7:
        value = rng.choice((0.0, -1.0, 1.0, 2.5, 1e-38, 3e38, math.inf, -math.inf, math.nan))
        return struct.pack("<f" if kind == 6 else "<d", value)
    return (rng.choice((*_COUNTS, rng.getrandbits(64))) % (1 << 8 * width)).to_bytes(width, "little")


def _damage_tensor(rng: random.Random, entry: bytes) -> bytes:
    """A tensor's description with a size, its type, its offset or the number of its sizes changed."""
    start = 8 + struct.unpack_from("<Q", entry)[0]
    found, kind = bytearray(entry), rng.randrange(4)
    if kind == 0:
        struct.pack_into("<I", found, start, rng.randrange(7))
    elif kind == 1:
        struct.pack_into("<I", found, len(found) - 12, rng.randrange(42))
    else:
        at = len(found) - 8 if kind == 2 else start + 4
        struct.pack_into("<Q", found, at, rng.choice((*_COUNTS, 32, 64, 4096)))
    return bytes(found)


def damage_pickle(rng: random.Random, pickled: bytes) -> bytes:
    """Returns a pickle with operations gone, twice, exchanged, or with others between them."""
    starts = [at for _, _, at in pickletools.genops(pickled) if at is not None]
    cuts = list(zip(starts, [*starts[1:], len(pickled)], strict=True))
    operations = [pickled[a:b] for a, b in cuts]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, kind = rng.randrange(len(operations)), rng.randrange(5)
        if kind == 0 and len(operations) > 1:
            del operations[at]
        elif kind == 1:
            operations.insert(at, rng.choice(operations))
        elif kind == 2:
            operations[at] = rng.choice(operations)
        elif kind == 3:
            operations[at] = rng.choice(_OPCODES)
        else:
            operations.insert(at, rng.choice(_OPCODES))
    raw = b"".join(operations)
    return damage_bytes(rng, raw, len(raw)) if rng.random() < 0.3 else raw


def damage_archive(rng: random.Random, archive: bytes) -> bytes:
    """Returns an archive of PyTorch's, its pickle damaged under a right check sum, or all of it anywhere."""
    if rng.random() < 0.3:
        return damage_bytes(rng, archive, len(archive))
    return _with_member(archive, "data.pkl", lambda raw: damage_pickle(rng, raw))


def _with_member(archive: bytes, name: str, change_fn: Callable[[bytes], bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(stream, "w") as new:
        for info in old.infolist():
            raw = old.read(info)
            new.writestr(
                zipfile.ZipInfo(info.filename), change_fn(raw) if info.filename.endswith(name) else raw
            )
    return stream.getvalue()
