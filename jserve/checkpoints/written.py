"""A folder that jserve wrote, as a checkpoint: ``jserve.json``, the tokenizer, and the arrays in a tree of Orbax."""

from __future__ import annotations

from pathlib import Path

from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.manifest import ARRAYS_FOLDER, MANIFEST_NAME, TOKENIZER_NAME, Manifest, check_ids, read_manifest
from jserve.checkpoints.names import resolve_member
from jserve.checkpoints.orbax.read import Kvstore, inner_kvstore, read_tree
from jserve.errors import CheckpointError
from jserve.text.tokenizer import Tokenizer

__all__ = ["open_written"]


def open_written(folder: Path, *, base: Kvstore | None = None) -> Checkpoint:
    """Open ``folder``. Raises CheckpointError that names the file at fault (see ``read_manifest``).

    ``base`` is where its arrays are, if ``folder`` is a copy without them.
    """
    manifest = read_manifest(folder, without=None if base is None else f"{ARRAYS_FOLDER}/")
    return Checkpoint(
        name=manifest.name,
        path=folder,
        layout=f"Orbax checkpoint (OCDBT) with {MANIFEST_NAME}",
        family=manifest.family,
        config=manifest.model_config(folder / MANIFEST_NAME),
        leaves=read_tree(
            folder / ARRAYS_FOLDER, base=None if base is None else inner_kvstore(base, ARRAYS_FOLDER)
        ).arrays,
        tokenizer=_tokenizer(folder, manifest) if TOKENIZER_NAME in manifest.files else None,
        chat_template=manifest.chat_template,
        generation=manifest.generation,
        eos_ids=tuple(manifest.eos_ids),
        source=manifest.source,
        digests=f"not checked; sizes match{'' if base is None else ', but for the arrays'} (--check reads every byte)",
        encoder=manifest.encoder,
    )


def _tokenizer(folder: Path, manifest: Manifest) -> Tokenizer:
    path = resolve_member(folder, TOKENIZER_NAME)
    try:
        tokenizer = Tokenizer.from_json(
            path.read_text(encoding="utf-8"),
            eos_ids=manifest.eos_ids,
            bos_id=manifest.bos_id,
            add_bos=manifest.add_bos,
        )
        check_ids(manifest.eos_ids, manifest.bos_id, vocab_size=tokenizer.vocab_size)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read the tokenizer {path}: {error}",
            fix=f"delete {folder} and convert it again from {manifest.source}",
        ) from None
    return tokenizer
