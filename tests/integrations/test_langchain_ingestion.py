"""Ways in: what is added, indexed or handed over is read, what is deleted is forgotten; in stores on disk too."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import build_model, build_tokenizer, document, embed
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_kvboost import ChatKVBoost, KVBoostDocumentWarmer, KVBoostRetriever, KVBoostVectorStore, warm_documents
from stores import Words

from kvboost_rag import KVBoost, OptionError, PromptTooLongError
from kvboost_rag.errors import ClosedEngineError

TEXTS = [document(i) for i in range(6)]
TOO_LONG = document(9, words=400)
ORDERS = list(itertools.permutations(range(4)))[::11]


class Mute(InMemoryVectorStore):
    """Cannot look documents up by their ids, as many stores."""

    def get_by_ids(self, ids: Any, /) -> list[Document]:
        raise NotImplementedError


def documents(*numbers: int) -> list[Document]:
    return [Document(page_content=document(n), metadata={"source": f"{n}.txt"}) for n in numbers]


def new_engine(**options: Any) -> KVBoost:
    return KVBoost(build_model(), build_tokenizer(), max_cache_bytes="64MB", **options)


def warm_ones(engine: KVBoost) -> set[int]:
    return {n for n in range(12) if engine.is_warm(document(n))}


def asked(engine: KVBoost, texts: list[str]) -> dict[str, Any]:
    """The engine's report on a question behind ``texts``."""
    message = ChatKVBoost(engine=engine, max_tokens=2).invoke("Read:\n" + "\n\n".join(texts) + "\n\nwhich?")
    return message.response_metadata["kvboost"]


@pytest.fixture
def store(boost: KVBoost) -> KVBoostVectorStore:
    return KVBoostVectorStore(InMemoryVectorStore(Words()), boost)


# Documents without a store


def test_documents_of_any_iterable_are_warmed_once(boost: KVBoost) -> None:
    report = warm_documents((d for d in documents(0, 1, 2)), ChatKVBoost(engine=boost), progress=False)
    assert (report.num_documents, report.num_warmed) == (3, 3)
    assert warm_documents(documents(0, 1, 2, 3), boost, progress=False).num_already_warm == 3
    assert warm_ones(boost) == {0, 1, 2, 3}
    with pytest.raises(OptionError, match=r"on_error='ignore' is not valid; on_error takes one of 'warn', 'raise'"):
        warm_documents(documents(4), boost, on_error="ignore")
    with pytest.raises(OptionError, match="engine="):
        warm_documents(documents(4), object())


async def test_the_warmer_hands_the_same_documents_on(boost: KVBoost) -> None:
    warmer = KVBoostDocumentWarmer(boost, progress=False)
    given = documents(0, 1)
    assert warmer.transform_documents(given) is given
    assert warmer.report.num_warmed == 2
    more = documents(2, 3)
    assert await warmer.atransform_documents(more) is more
    assert warm_ones(boost) == {0, 1, 2, 3}
    with pytest.raises(OptionError, match="chunking='other'"):
        warmer.transform_documents(documents(4), chunking="other")


def test_one_document_too_long_keeps_no_other_from_being_read(boost: KVBoost) -> None:
    given = [*documents(0), Document(page_content=TOO_LONG), *documents(1)]
    with pytest.warns(UserWarning, match=r"1 of 3 documents were not read: the document '\w+word9x0"):
        report = warm_documents(given, boost, progress=False)
    assert (report.num_documents, report.num_warmed, report.num_rejected) == (3, 2, 1)
    assert warm_ones(boost) == {0, 1}
    boost.clear()
    with pytest.raises(PromptTooLongError):
        warm_documents(given, boost, progress=False, on_error="raise")
    assert warm_ones(boost) == {0, 1}


# Adding


@pytest.mark.parametrize("on_error", ["warn", "raise"])
async def test_embeddings_are_kept_whatever_becomes_of_the_reading(boost: KVBoost, on_error: str) -> None:
    store = KVBoostVectorStore(InMemoryVectorStore(Words()), boost, on_error=on_error)
    given = [*documents(0), Document(page_content=TOO_LONG), *documents(1)]
    for add in (store.add_documents, store.aadd_documents):
        expected = pytest.warns(UserWarning) if on_error == "warn" else pytest.raises(PromptTooLongError)
        with expected:
            found = add(given)
            if inspect.isawaitable(found):
                await found
    assert len(store.inner.store) == 6
    assert warm_ones(boost) == {0, 1}
    boost.close()
    with pytest.raises(ClosedEngineError):
        store.add_documents(documents(2))
    assert len(store.inner.store) == 7


async def test_the_event_loop_never_reads(boost: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    warm, forget = boost.warm, boost.forget

    def spy(read: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (threads.add(threading.current_thread()), read(*args, **kwargs))[1]

    monkeypatch.setattr(boost, "warm", spy(warm))
    monkeypatch.setattr(boost, "forget", spy(forget))
    store = await KVBoostVectorStore.afrom_texts([TEXTS[0]], Words(), ids=["0"], engine=boost)
    await store.aadd_texts([TEXTS[1]])
    await store.adelete(["0"])
    await KVBoostDocumentWarmer(boost).atransform_documents(documents(2))
    assert warm_ones(boost) == {1, 2}
    assert threads
    assert threading.main_thread() not in threads


async def test_building_reads_in_every_variant(boost: KVBoost) -> None:
    for ids in (None, ["a", "b"]):
        given = [Document(page_content=TEXTS[i], id=ids and ids[i]) for i in range(2)]
        for build in (KVBoostVectorStore.from_documents, KVBoostVectorStore.afrom_documents):
            built = build(given, Words(), engine=ChatKVBoost(engine=boost), vectorstore_cls=Mute)
            store = await built if inspect.isawaitable(built) else built
            assert isinstance(store.inner, Mute)
            assert warm_ones(boost) == {0, 1}
            keys = list(store.store)  # the inner store's dict
            assert ids is None or keys == ids
            twin = store.add_documents(documents(0))
            store.delete(twin)
            assert warm_ones(boost) == {0, 1}
            store.delete(keys)
            assert warm_ones(boost) == set()
    with pytest.raises(OptionError, match="needs engine="):
        await KVBoostVectorStore.afrom_texts(["x"], Words())
    with pytest.raises(OptionError, match="on_error=3"):
        KVBoostVectorStore.from_texts(["x"], Words(), engine=boost, on_error=3)


def test_options_of_warming_are_passed_on(boost: KVBoost) -> None:
    header = "You are kind."
    options = {"header": header, "first": True}
    KVBoostVectorStore.from_texts([TEXTS[0]], Words(), engine=boost, warm_kwargs=options)
    assert boost.order([TEXTS[1], TEXTS[0]], header=header) == [1, 0]
    assert boost.order([TEXTS[1], TEXTS[0]], header="Another.") == [0, 1]


# Deleting


def test_a_text_stays_while_any_id_has_it(store: KVBoostVectorStore) -> None:
    store.add_texts([TEXTS[0], f"  {TEXTS[0]}\n", TEXTS[1]], ids=["a", "b", "c"])
    store.delete(["a"])
    assert warm_ones(store.engine) == {0, 1}
    store.add_texts([TEXTS[2]], ids=["b"])  # replaces
    assert warm_ones(store.engine) == {1, 2}
    store.delete(["nothing"])
    store.delete([])
    assert warm_ones(store.engine) == {1, 2}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_ids_of_an_earlier_process_are_looked_up(boost: KVBoost, asynchronous: bool) -> None:
    inner = InMemoryVectorStore(Words())
    inner.add_texts([TEXTS[0], TEXTS[1], TEXTS[1], TEXTS[2]], ids=["a", "b", "twin", "c"])
    boost.warm(TEXTS[:3], progress=False)
    store = KVBoostVectorStore(inner, boost)

    async def delete(*ids: str) -> None:
        _ = await store.adelete(list(ids)) if asynchronous else store.delete(list(ids))

    async def add(text: str, key: str) -> None:
        _ = await store.aadd_texts([text], ids=[key]) if asynchronous else store.add_texts([text], ids=[key])

    await delete("a", "b")
    assert warm_ones(boost) == {1, 2}  # the twin has text 1
    await add(TEXTS[3], "c")
    assert warm_ones(boost) == {1, 3}
    await add(TEXTS[1], "new")
    await delete("twin")
    assert warm_ones(boost) == {1, 3}  # counted here
    await delete("new")
    assert warm_ones(boost) == {3}


def test_a_store_that_cannot_tell_keeps_texts_warm(boost: KVBoost) -> None:
    boost.warm(TEXTS[:2], progress=False)
    for inner, known in ((Mute(Words()), False), (InMemoryVectorStore(Words()), True)):
        inner.add_texts(TEXTS[:2], ids=["a", "b"])
        store = KVBoostVectorStore(inner, boost)
        store.delete(["a"])
        assert warm_ones(boost) == ({1} if known else {0, 1})
        assert list(inner.store) == ["b"]


def test_deleting_by_a_filter_evicts_what_is_gone(store: KVBoostVectorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add_texts(TEXTS[:2], ids=["a", "b"])
    store.delete()  # InMemoryVectorStore deletes nothing then
    assert warm_ones(store.engine) == {0, 1}
    monkeypatch.setattr(store.inner, "delete", lambda ids=None, where=None: store.inner.store.pop(where))
    store.delete(where="a")
    assert warm_ones(store.engine) == {1}
    monkeypatch.setattr(store.inner, "delete", lambda ids=None: False)
    assert store.delete(["b"]) is False
    assert warm_ones(store.engine) == {1}


# Delegating


async def test_everything_else_is_the_inner_stores(store: KVBoostVectorStore) -> None:
    store.add_documents(documents(*range(4)), ids=list("abcd"))
    query, inner = "word2x3 word2x5", store.inner
    vector = embed(query)
    for name, args in {
        "similarity_search": (query, 2),
        "similarity_search_with_score": (query,),
        "similarity_search_by_vector": (vector,),
        "max_marginal_relevance_search": (query,),
        "max_marginal_relevance_search_by_vector": (vector,),
        "search": (query, "similarity"),
        "get_by_ids": (["b", "c"],),
    }.items():
        expected = getattr(inner, name)(*args)
        assert expected
        assert getattr(store, name)(*args) == expected
        assert await getattr(store, f"a{name}")(*args) == expected
    assert store.embeddings is inner.embedding
    assert store.store is inner.store  # by __getattr__
    with pytest.raises(AttributeError, match="nothing"):
        _ = store.nothing
    with pytest.raises(NotImplementedError):
        store.similarity_search_with_relevance_scores(query)


def test_copies_work_and_unfinished_objects_do_not_recurse(store: KVBoostVectorStore) -> None:
    twin = copy.copy(store)
    assert (twin.inner, twin.engine) == (store.inner, store.engine)
    with pytest.raises(AttributeError):
        _ = KVBoostVectorStore.__new__(KVBoostVectorStore).anything
    with pytest.raises(TypeError, match="pickle"):  # an engine is of this process
        pickle.dumps(store)


def test_documents_of_a_filled_store_are_read_by_their_ids(boost: KVBoost) -> None:
    inner = InMemoryVectorStore(Words())
    inner.add_texts(TEXTS[:3], ids=["a", "b", "c"])
    report = KVBoostVectorStore(inner, boost).warm(["a", "c"])
    assert (report.num_warmed, warm_ones(boost)) == (2, {0, 2})


# LangChain's index()


@pytest.fixture
def records() -> InMemoryRecordManager:
    manager = InMemoryRecordManager(namespace="kvboost")
    manager.create_schema()
    return manager


@pytest.mark.parametrize("cleanup", ["full", "incremental"])
async def test_indexing_again_evicts_what_changed(
    store: KVBoostVectorStore, records: InMemoryRecordManager, cleanup: Any
) -> None:
    options: dict[str, Any] = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
    assert index(documents(0, 1, 2), records, store, **options)["num_added"] == 3
    assert warm_ones(store.engine) == {0, 1, 2}
    changed = [*documents(0, 1), Document(page_content=document(7), metadata={"source": "2.txt"})]
    result = index(changed, records, store, **options)
    assert (result["num_added"], result["num_deleted"], result["num_skipped"]) == (1, 1, 2)
    assert warm_ones(store.engine) == {0, 1, 7}
    result = await aindex([*changed[:2], *documents(8)], records, store, **options)
    assert warm_ones(store.engine) == ({0, 1, 8} if cleanup == "full" else {0, 1, 7, 8})
    for order in ORDERS:
        assert asked(store.engine, [changed[i % 2].page_content for i in order[:2]])["num_document_hits"] == 2


def test_a_second_run_over_a_cold_engine_is_warmed_on_miss(boost: KVBoost, records: InMemoryRecordManager) -> None:
    options: dict[str, Any] = {"cleanup": "full", "key_encoder": "sha256"}
    inner = InMemoryVectorStore(Words())
    index(documents(0, 1, 2), records, KVBoostVectorStore(inner, boost), **options)
    with new_engine() as cold:
        store = KVBoostVectorStore(inner, cold)
        assert index(documents(0, 1, 2), records, store, **options)["num_skipped"] == 3
        assert warm_ones(cold) == set()
        KVBoostRetriever(store.as_retriever(search_kwargs={"k": 2}), cold).invoke("word1x2")
        assert len(warm_ones(cold)) == 2
        assert store.warm(records.list_keys()).num_already_warm == 2
        assert warm_ones(cold) == {0, 1, 2}


def test_a_second_run_over_a_folder_has_nothing_to_read(tmp_path: Path, records: InMemoryRecordManager) -> None:
    options: dict[str, Any] = {"cleanup": "full", "key_encoder": "sha256"}
    inner = InMemoryVectorStore(Words())
    with new_engine(cache_dir=tmp_path) as first:
        index(documents(0, 1, 2), records, KVBoostVectorStore(inner, first), **options)
    with new_engine(cache_dir=tmp_path) as second:
        store = KVBoostVectorStore(inner, second)
        index(documents(0, 1, 2), records, store, **options)
        assert warm_documents(documents(0, 1, 2), second, progress=False).num_already_warm == 3
        assert index(documents(0, 1), records, store, **options)["num_deleted"] == 1
    with new_engine(cache_dir=tmp_path) as third:
        assert warm_ones(third) == {0, 1}


# Stores that outlive the process


def open_chroma(folder: Path) -> tuple[VectorStore, Callable[[], None]]:
    import chromadb
    from chromadb.api.shared_system_client import SharedSystemClient
    from langchain_chroma import Chroma

    settings = chromadb.config.Settings(anonymized_telemetry=False, is_persistent=True)
    client = chromadb.PersistentClient(str(folder), settings=settings)
    # forgets the folder, as a new process has
    return Chroma("documents", Words(), client=client), SharedSystemClient.clear_system_cache


def open_qdrant(folder: Path) -> tuple[VectorStore, Callable[[], None]]:
    from langchain_qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(folder))
    if not client.collection_exists("kv"):
        client.create_collection("kv", models.VectorParams(size=64, distance=models.Distance.COSINE))
    return QdrantVectorStore(client, "kv", Words()), client.close


@pytest.mark.usefixtures("socket_disabled")
@pytest.mark.parametrize("opened", [open_chroma, open_qdrant])
def test_both_stores_reopened_hit_everything_from_disk(opened: Any, tmp_path: Path) -> None:
    keys = [f"00000000-0000-0000-0000-{n:012}" for n in range(6)]
    with new_engine(cache_dir=tmp_path / "kv") as first:
        inner, close = opened(tmp_path / "vectors")
        store = KVBoostVectorStore(inner, first)
        assert store.add_documents(documents(*range(6)), ids=keys) == keys
        store.add_documents([Document(page_content=TEXTS[5])], ids=[keys[5].replace("0000-0000", "1111-1111")])
        store.delete([keys[4]])
        assert warm_ones(first) == {0, 1, 2, 3, 5}
        close()
    for number, order in enumerate(ORDERS):
        with new_engine(cache_dir=tmp_path / "kv") as engine:
            inner, close = opened(tmp_path / "vectors")
            store = KVBoostVectorStore(inner, engine)
            found = {d.page_content for d in store.similarity_search("word1x2 word2x2", k=9)}
            assert found == {document(n) for n in (0, 1, 2, 3, 5)}
            report = asked(engine, [TEXTS[i] for i in order])
            assert [d["tier"] for d in report["documents"]] == ["disk"] * 4
            if number == 2:
                store.delete([keys[5], keys[0]])
                assert warm_ones(engine) == {1, 2, 3, 5}  # text 5 has another id
            close()
