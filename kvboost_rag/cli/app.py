"""The command line: which commands there are and what their help says.

Knows typer and the commands' names; what they do is in ``commands``, loaded when one runs, so that help is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvboost_rag._version import __version__
from kvboost_rag.cli import options, printing
from kvboost_rag.cli.choices import Common
from kvboost_rag.cli.group import Commands
from kvboost_rag.cli.stores import stores

app = typer.Typer(
    name="kvboost-rag",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=options.flowing("""RAG with a local language model that has read your documents.

    Documents are read once (warm), their KV is kept in a folder, and questions (ask, chat) reuse it in any order.

    Examples:

        kvboost-rag warm docs/
        kvboost-rag ask "Who built the lighthouse?"
    """),
)


def _version(asked: bool) -> None:
    if asked:
        print(f"kvboost-rag {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None: ...


@options.command(app)
def demo(
    repair: Annotated[options.RepairName, typer.Option(help="What is computed again.")] = options.RepairName.QUERY,
    recompute_ratio: options.Ratio = None,
    questions: Annotated[int, typer.Option(min=1, help="How many to ask.")] = 8,
    json: Annotated[Path | None, typer.Option(metavar="PATH", help="Write the table here.", show_default=False)] = None,
) -> None:
    """Ask a small corpus questions on the bundled model, and compare times to first token (TTFT).

    Prints a table: answers, tokens reused, TTFT of full prefill, of a perfect prefix cache and of reuse. Writes nothing
    but what --json asks for, and the model's folder the first time.

    Example:

        kvboost-rag demo --questions 2
    """
    from kvboost_rag.demo import main

    ratio = [] if recompute_ratio is None else ["--recompute-ratio", str(recompute_ratio)]
    written = [] if json is None else ["--json", str(json)]
    raise typer.Exit(main(["--repair", repair.value, "--questions", str(questions), *ratio, *written]))


@options.command(app)
def warm(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", exists=True, help="Files and folders.")],
    passage_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=2048, help="How long a passage may be. If not given: the store's, else 512.", show_default=False
        ),
    ] = None,
    remove_missing: Annotated[
        bool, typer.Option("--remove-missing", help="Drop what is from files that are gone.")
    ] = False,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave broken files out instead of stopping.")
    ] = False,
    store: options.Store = options.STORE,
    model: options.Model = None,
    embedder: options.Embedder = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    kv_dtype: options.KVDtype = None,
    max_cache_bytes: options.MaxCacheBytes = None,
    max_packed_bytes: options.MaxPackedBytes = None,
    json: options.Json = False,
) -> None:
    """Read files and folders once, and keep what the model made of them.

    Reads .txt .md .markdown .rst .pdf .jsonl (lines such as {"text": "...", "source": "..."}); in folders other files
    are skipped and counted, and names that begin with a dot passed over. Run again, it adds what is new, replaces what
    was changed and skips the rest; interrupted, the next run goes on.

    Prints what was added, changed and read. Writes store.json, passages.jsonl, vectors.safetensors and kv/ into the
    store.

    Examples:

        kvboost-rag warm docs/ notes.pdf
        kvboost-rag warm docs/ --remove-missing --kv-dtype int8
    """
    from kvboost_rag.cli.commands.warm import Plan, run, said

    common = Common(store, model, embedder, dtype, device, kv_dtype, max_cache_bytes, max_packed_bytes)
    done = run(common, Plan(paths, passage_tokens, remove_missing, skip_unreadable))
    printing.document(done) if json else print(said(done))


@options.command(app)
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    k: options.K = 4,
    max_new_tokens: options.MaxNewTokens = 128,
    repair: options.Repair = None,
    recompute_ratio: options.Ratio = None,
    quality: options.Quality = None,
    compare: Annotated[bool, typer.Option("--compare", help="Run full prefill too, and print both TTFTs.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print a strip of the prompt: what was reused.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write that strip as a page.", show_default=False)
    ] = None,
    store: options.Store = options.STORE,
    model: options.Model = None,
    embedder: options.Embedder = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    kv_dtype: options.KVDtype = None,
    max_cache_bytes: options.MaxCacheBytes = None,
    max_packed_bytes: options.MaxPackedBytes = None,
    json: options.Json = False,
) -> None:
    """Answer a question from the passages of a store.

    Prints the answer as it is generated; then, on standard error, documents hit, tokens computed and the time to first
    token. Writes KV of what was not read before into the store, and the page --html asks for.

    Examples:

        kvboost-rag ask "Who built the lighthouse?"
        kvboost-rag ask "Who built the lighthouse?" --k 6 --compare --html strip.html
    """
    from kvboost_rag.cli.commands.ask import Plan, run

    common = Common(store, model, embedder, dtype, device, kv_dtype, max_cache_bytes, max_packed_bytes)
    reuse = options.reuse(repair, recompute_ratio, quality)
    answer = run(common, question, Plan(k, max_new_tokens, reuse, compare, html, show), quiet=json)
    if json:
        printing.document(answer.to_dict())


@options.command(app)
def chat(
    k: options.K = 4,
    max_new_tokens: options.MaxNewTokens = 128,
    repair: options.Repair = None,
    recompute_ratio: options.Ratio = None,
    quality: options.Quality = None,
    store: options.Store = options.STORE,
    model: options.Model = None,
    embedder: options.Embedder = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    kv_dtype: options.KVDtype = None,
    max_cache_bytes: options.MaxCacheBytes = None,
    max_packed_bytes: options.MaxPackedBytes = None,
    json: options.Json = False,
) -> None:
    """Talk about a store: a question a line, until Ctrl-D or /quit.

    Passages are retrieved for every question; earlier questions and answers stay in the prompt while they fit.
    /sources names where the last answer is from, /strip draws its prompt, /new forgets the conversation. Ctrl-C breaks
    off an answer.

    Prints answers; a line about each on standard error; with --json all of them at the end. Writes KV of what was not
    read before into the store.

    Examples:

        kvboost-rag chat
        echo "Who built the lighthouse?" | kvboost-rag chat --json
    """
    from kvboost_rag.cli.commands.ask import Plan
    from kvboost_rag.cli.commands.chat import run

    common = Common(store, model, embedder, dtype, device, kv_dtype, max_cache_bytes, max_packed_bytes)
    reuse = options.reuse(repair, recompute_ratio, quality)
    talk = run(common, Plan(k, max_new_tokens, reuse), quiet=json)
    if json:
        printing.document({"turns": [answer.to_dict() for answer in talk.answers], "num_failed": talk.num_failed})
    raise typer.Exit(1 if talk.num_failed else 0)


@options.command(app)
def bench(
    questions: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="One question a line, each with what is retrieved for it. If not given: drawn passages.",
            show_default=False,
        ),
    ] = None,
    num: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 4,
    k: options.K = 4,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    repair: options.Repair = None,
    recompute_ratio: options.Ratio = None,
    quality: options.Quality = None,
    store: options.Store = options.STORE,
    model: options.Model = None,
    embedder: options.Embedder = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    kv_dtype: options.KVDtype = None,
    max_cache_bytes: options.MaxCacheBytes = None,
    max_packed_bytes: options.MaxPackedBytes = None,
    json: options.Json = False,
) -> None:
    """Measure what reuse saves and changes on a store's own passages, or on the sample corpus where there is no store.

    Each prompt is computed in full and with reuse, once, with its documents in memory. Prints a table: TTFT of both,
    their ratio, KL from full prefill in nats a token, and for how many of 24 tokens both have the same most likely one.
    Writes KV of what was not read before into the store.

    Examples:

        kvboost-rag bench
        kvboost-rag bench --questions questions.txt --num 10 --repair none
    """
    from kvboost_rag.cli.commands.bench import Plan, run, show

    common = Common(store, model, embedder, dtype, device, kv_dtype, max_cache_bytes, max_packed_bytes)
    found = run(common, Plan(questions, num, k, seed, options.reuse(repair, recompute_ratio, quality)))
    printing.document(found) if json else show(found)


@options.command(app)
def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A hub name, a folder, or bundled.", show_default=False)
    ] = None,
    dtype: options.Dtype = None,
    json: options.Json = False,
) -> None:
    """Say whether a model can be served, what this machine has, and what to do.

    Prints what the probe found in the model, devices, free memory, versions and missing extras. Writes nothing. The
    exit code is 1 if the model cannot be served.

    Examples:

        kvboost-rag doctor
        kvboost-rag doctor Qwen/Qwen2.5-0.5B-Instruct
    """
    from kvboost_rag.cli.commands.doctor import run

    account = run(model, dtype)
    printing.document(account.to_dict()) if json else print(account)
    raise typer.Exit(0 if account.served else 1)


app.add_typer(stores, name="store")
