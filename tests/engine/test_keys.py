"""Keys: the paper's two hashes, over bytes that anyone can compute by hand."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from kvboost_rag.engine.chunking import chunk_prompt
from kvboost_rag.engine.keys import chunk_keys, content_hash, id_bytes, prefix_hash
from kvboost_rag.engine.types import Chunk, ChunkKeys, Segment

FINGERPRINT = hashlib.sha256(b"some model").digest()


def by_hand(ids: tuple[int, ...]) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


def chunks_of(*parts: tuple[int, ...]) -> list[Chunk]:
    return chunk_prompt([Segment(part, document=True) for part in parts], 128)


def test_ids_are_little_endian_int64():
    assert id_bytes((1, 258)) == b"\x01\0\0\0\0\0\0\0" + b"\x02\x01\0\0\0\0\0\0"
    assert id_bytes((0, 128255, 2**40)) == by_hand((0, 128255, 2**40))
    assert id_bytes(()) == b""


def test_lists_tuples_and_arrays_of_ids_are_the_same_bytes():
    kinds = [(5, 300), [5, 300], np.array([5, 300], dtype=np.int32), np.array([5, 300], dtype=">i8")]
    assert {id_bytes(ids) for ids in kinds} == {by_hand((5, 300))}


def test_a_known_chunk_has_the_hash_computed_by_hand():
    assert content_hash((1, 2, 3), b"") == hashlib.sha256(b"content" + by_hand((1, 2, 3))).digest()
    assert content_hash((1, 2, 3), b"").hex() == "2e31779644e841186bd94931ba09c5fc6cdd0dd704848a59aab8cbdb20b48c21"


def test_the_hashes_are_the_papers_equations_4_and_5():
    first, second, third = (7, 8, 9), (1,), (7, 8, 9)
    keys = chunk_keys(chunks_of(first, second, third), FINGERPRINT)
    previous = b""
    for ids, key in zip((first, second, third), keys, strict=True):
        previous = hashlib.sha256(b"prefix" + FINGERPRINT + previous + by_hand(ids)).digest()
        content = hashlib.sha256(b"content" + FINGERPRINT + by_hand(ids)).digest()
        assert key == ChunkKeys(prefix=previous, content=content)


def test_the_content_hash_does_not_know_the_position_and_the_prefix_hash_does():
    a, b = (1, 2, 3), (4, 5)
    (a_first, b_second), (b_first, a_second) = (chunk_keys(chunks_of(*o), FINGERPRINT) for o in ((a, b), (b, a)))
    assert a_first.content == a_second.content == content_hash(a, FINGERPRINT)
    assert b_first.content == b_second.content
    assert len({k.prefix for k in (a_first, a_second, b_first, b_second)}) == 4


def test_the_same_chunk_twice_differs_by_prefix_only():
    first, second = chunk_keys(chunks_of((1, 2), (1, 2)), FINGERPRINT)
    assert first.content == second.content
    assert first.prefix != second.prefix


def test_a_prefix_hash_depends_on_every_chunk_before_and_none_behind():
    base = chunk_keys(chunks_of((1,), (2,), (3,)), FINGERPRINT)
    changed = chunk_keys(chunks_of((9,), (2,), (3,)), FINGERPRINT)
    longer = chunk_keys(chunks_of((1,), (2,), (3,), (4,)), FINGERPRINT)
    assert all(old.prefix != new.prefix for old, new in zip(base, changed, strict=True))
    assert base[1:] != changed[1:] and [k.content for k in base[1:]] == [k.content for k in changed[1:]]
    assert longer[:3] == base


def test_where_a_prompt_is_cut_is_part_of_the_prefix():
    assert chunk_keys(chunks_of((1, 2), (3,)), b"")[-1].prefix != chunk_keys(chunks_of((1,), (2, 3)), b"")[-1].prefix


def test_the_fingerprint_separates_engines():
    other = hashlib.sha256(b"another model").digest()
    ours, theirs = (chunk_keys(chunks_of((1, 2), (3,)), fingerprint) for fingerprint in (FINGERPRINT, other))
    assert not {h for k in ours for h in (k.prefix, k.content)} & {h for k in theirs for h in (k.prefix, k.content)}


@pytest.mark.parametrize("ids", [(), (1,), (1, 2, 3)])
def test_the_two_hashes_of_a_chunk_never_meet(ids: tuple[int, ...]):
    assert content_hash(ids, FINGERPRINT) != prefix_hash(ids, b"", FINGERPRINT)


@pytest.mark.parametrize("a, b", [((1, 2), (2, 1)), ((1,), (1, 0)), ((256,), (1,)), ((0,), ())])
def test_different_ids_have_different_hashes(a: tuple[int, ...], b: tuple[int, ...]):
    assert content_hash(a, b"") != content_hash(b, b"")
    assert prefix_hash(a, b"", b"") != prefix_hash(b, b"", b"")


def test_no_chunks_have_no_keys():
    assert chunk_keys([], FINGERPRINT) == []
