"""The commands under ``kvboost-rag store``, and what their help says.

Knows typer and the commands' names; what they do is in ``commands/store.py``, loaded when one runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvboost_rag.cli import options, printing

stores = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=options.flowing("""Look at a store, check it, and take things out of it. No model is loaded.

    Example:

        kvboost-rag store show
    """),
)


@options.command(stores, "show")
def store_show(
    store: options.Store = options.STORE, max_cache_bytes: options.MaxCacheBytes = None, json: options.Json = False
) -> None:
    """Say what a store holds.

    Prints the model it was made with, its passages by source, the size of its KV and the budget. Writes nothing.

    Example:

        kvboost-rag store show --json
    """
    from kvboost_rag.cli.commands.store import show, show_said

    found = show(store, max_cache_bytes)
    printing.document(found) if json else show_said(found)


@options.command(stores, "check")
def store_check(
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is broken.")] = False,
    store: options.Store = options.STORE,
    json: options.Json = False,
) -> None:
    """Read every KV file of a store.

    Prints which are broken, and which are of a model the store was never used with; the exit code is 1 if there are
    any. Deletes broken ones if told to.

    Examples:

        kvboost-rag store check
        kvboost-rag store check --delete
    """
    from kvboost_rag.cli.commands.store import check, check_said

    found = check(store, delete)
    printing.document(found) if json else check_said(found)
    raise typer.Exit(0 if found["ok"] else 1)


@options.command(stores, "forget")
def store_forget(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help="As store show names them, or folders.")],
    store: options.Store = options.STORE,
    json: options.Json = False,
) -> None:
    """Take sources out of a store: their passages, vectors and KV, every model's.

    Prints what was dropped. Rewrites passages.jsonl and vectors.safetensors, and deletes files in kv/.

    Example:

        kvboost-rag store forget docs/old.md
    """
    from kvboost_rag.cli.commands.store import forget

    done = forget(store, sources)
    said = f"dropped {done['num_passages']} passages and {done['num_kv_files']} KV files: {', '.join(done['sources'])}"
    printing.document(done) if json else print(said)


@options.command(stores, "clear")
def store_clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: options.Store = options.STORE,
    json: options.Json = False,
) -> None:
    """Delete a store; other files in its folder stay.

    Asks first. Prints what was deleted.

    Example:

        kvboost-rag store clear --yes
    """
    from kvboost_rag.cli.commands.store import clear

    if not yes and not printing.confirmed(f"Delete the store in {store}?"):
        printing.note("nothing was deleted")
        raise typer.Exit(1)
    done = clear(store)
    printing.document(done) if json else print(f"deleted {done['store']}, {done['num_kv_files']} KV files")
