"""Bundle: an exported model folder, read and checked.

A bundle holds everything the server needs and nothing else::

    maskdial.json     the manifest: what the model is, how to feed it, how it was checked
    card.json         what `maskdial eval --card` measured, if anything; the manifest lists it not
    model.onnx        the graph (its weights are in model.onnx.data)
    tokenizer.json    a `tokenizers` file
    encoder.onnx      the encoder's graph of an encoder-decoder model
    kernel_check.onnx if any layer is int8: a product that shows whether a processor adds exactly
    chat_template.jinja, generation_config.json      if the checkpoint has them
    decision_template.jinja                          likewise
    additional_chat_templates/NAME.jinja              others by name: tool_use, with tools
    draft.onnx        of a causal model with a layer or a head that drafts for it: its graph
    draft_tokens.npy  the tokens that the columns of its logits stand for, if those are not all
    counts.onnx       of a model that finds what a schema names: the queries of its fields
    boundaries.onnx   or, if it pairs boundaries: the spans of its fields
    labels/           of a model that finds entities, if another one encodes the labels: a bundle
    adapters/NAME/    of a model of embeddings for several tasks: an adapter (`AdapterBundle`)

A model that works with both masks has a second graph, of the masked family, over the same weights:
``model.full.onnx``, with a manifest of its own, ``maskdial.full.json``.

Graph inputs, by family (the server feeds the ones that the graph declares):

* masked: ``input_ids`` int64 (batch, length), right-padded; ``lengths`` int32 (batch,), the number
  of valid tokens per row; ``token_type_ids`` int64 (batch, length); for the tasks on tokens
  (fill-mask, token-classify, entities, extract, question-answering, embed-all, embed-hybrid,
  decide) ``rows`` int64 (num_rows,), flat indices ``b * length + position`` of the tokens in
  question; for entities whose scores are those of tokens also ``pairs`` int64 (num_pairs, 2), of a
  word and a label by their places in ``rows``; for block-diffusion ``rows``, the last tokens of
  each text, which are its canvas, ``canvas`` int32 (batch,), how many these are, ``soft`` float32
  (num_rows, hidden_size), what the pass before gave of each, or zeros, and ``temperatures``
  float32 (num_rows,).
  One output, float32. ``logits``: fill-mask (num_rows, vocab_size), token-classify (num_rows,
  num_labels), entities (num_rows, num_columns) or (num_pairs, 3), extract (num_rows, num_columns)
  of `Extraction`, decide (num_rows, num_scores), block-diffusion (num_rows, vocab_size +
  hidden_size): logits, and the mean embedding by the softmax of the logits divided by the
  temperature, which the next pass reads as ``soft``,
  question-answering (num_rows, 2) for start and end,
  classify (batch, num_labels), multiple-choice (batch, 1), where each text is a prompt with one
  choice, rerank (batch, 1), where it is a query and a document in the manifest's `PairTemplate`.
  ``embeddings``: embed (batch, dimension), pooled, and normalized if ``Embedding.normalized``;
  embed-all (num_rows, dimension), also of rows after the valid tokens; embed-hybrid (num_rows,
  dimension + token_dimension + 1), `maskdial.masked.tasks.hybrid_rows`.
  ``counts.onnx`` takes ``fields`` float32 (num_fields, hidden_size) and ``steps`` int64
  (num_steps,), 0 to n - 1, and returns ``queries`` float32 (num_steps, num_fields,
  4 * hidden_size + 1). ``boundaries.onnx`` takes ``words`` float32 (num_words, hidden_size) and
  ``fields``, and ``forced`` int64 (num_forced, 2), spans to be among the candidates; and returns
  ``spans`` float32 (num_fields, num_candidates, 3): the boundaries before and after a span, as
  words before them, both 0 where there is none, and its logit.
* causal: ``input_ids`` int64 (batch, new_tokens); ``position_ids`` int64 (batch, new_tokens);
  ``seqlens_k`` int32 (batch,), tokens in the cache after this pass minus one;
  ``total_sequence_length`` int32 (), the maximum of ``seqlens_k`` plus one; ``rows`` int64
  (num_rows,), flat indices of the tokens to compute logits for; ``past_key.I`` and
  ``past_value.I``, in `KVLayout.dtype`, (batch, num_heads, max_length, head_dim). Outputs
  ``logits`` float32 (num_rows, vocab_size), or (num_rows, num_scores) of a decision model whose
  prompts ask one question each, ``present_key.I`` and ``present_value.I``, which may
  share their past's memory. With a non-empty past, batch is 1 or new_tokens is 1. With recurrent
  layers also ``lengths`` int32 (batch,), the valid new tokens of each row, perhaps none, and
  ``past_state.I``, float32 of the shapes `KVLayout.states`, zero before a text's first token; the
  outputs ``present_state.I`` may share their memory. With ``draft.onnx`` there is an output
  ``hidden`` float32 (tokens, hidden_size), what that reads of all tokens, padding included: for
  ``mtp`` the hidden states after the last norm, for ``eagle`` a projection of those before some
  layers. ``draft.onnx`` is a causal graph over a cache of its own (`DraftHead.kv`): its tokens are
  a text's from the second one on, and its input ``previous_hidden`` float32 (batch, new_tokens,
  hidden_size) has the ``hidden`` of the token before each. Its own output ``hidden`` stands for
  those that the model has not computed yet. Its logits have `DraftHead.vocab_size` columns, and
  ``draft_tokens.npy``, int64 (vocab_size,), the token that each stands for.
* encoder-decoder, ``model.onnx``: the decoder, as causal with new_tokens 1, and also
  ``cross_key.I`` and ``cross_value.I``, which are only read, (batch, num_heads,
  max_source_length, head_dim), with ``source_seqlens_k`` int32 (batch,), tokens of the source text
  minus one, and ``total_source_length`` int32 (), their maximum plus one. ``encoder.onnx`` takes
  ``input_ids`` and ``lengths`` as masked, and returns ``cross_key.I`` and ``cross_value.I``,
  float32 (batch, num_heads, length, head_dim).
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pydantic
from numpy.typing import NDArray

from maskdial.bundle.adapter import ADAPTER_MANIFEST, ADAPTER_WEIGHTS
from maskdial.bundle.card import Card, read_card
from maskdial.bundle.manifest import (
    ADDITIONAL_TEMPLATES,
    DRAFT_GRAPH,
    DRAFT_TOKENS,
    ENCODER_GRAPH,
    FULL_MANIFEST,
    GRAPH,
    LABEL_ENCODER,
    MANIFEST,
    QUERY_WEIGHTS,
    SCHEMA_VERSION,
    TASK_ADAPTERS,
    TOKENIZER,
    Manifest,
)
from maskdial.bundle.verified import known_sha256, remember_sha256
from maskdial.errors import BundleError, ConfigError, io_reason

# Fusions that make a graph slower on the CPU: in ONNX Runtime 1.31, SkipLayerNormalization takes
# six times as long as the Add and the LayerNormalization that it replaces.
UNWANTED_FUSIONS = frozenset({"SkipLayerNormFusion"})

LARGE_GRAPH = 400_000
"""Bytes of a graph without its weights, some 3,000 nodes, from which ONNX Runtime is not to plan
which values share memory: it compares the shape of each value with those of all before it, which
takes minutes for 16 layers of 64 experts. What is not planned is freed after its last use.
"""


# A manifest with the labels and languages of the largest models has less than a tenth of this.
_MAX_MANIFEST_BYTES = 16 * 2**20
_LARGE = 2**25
"""Bytes of a file that are hashed in a thread: weights. A tokenizer has less."""


_log = logging.getLogger("maskdial.models")


class Stamp(NamedTuple):
    """What tells that a file was written to since it was read, without reading it again."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> "Stamp":
        """Raises: OSError: there is no such file."""
        found = path.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A model folder with a valid manifest and verified files.

    ``stamps`` are those of its files when they were verified, ``hashing`` the large files of which
    that is still under way. ``sha256`` is the manifest's own, which has those of all others.
    ``card`` has what was measured of it.
    """

    name: str
    path: Path
    manifest: Manifest
    stamps: dict[str, Stamp] = field(default_factory=dict)
    hashing: dict[str, "Future[str]"] = field(default_factory=dict)
    sha256: str = ""
    card: Card = field(default_factory=Card)

    @property
    def graph(self) -> Path:
        return self.path / self.manifest.graph

    @property
    def encoder(self) -> Path:
        """The encoder's graph of an encoder-decoder model."""
        return self.path / ENCODER_GRAPH

    @property
    def draft_graph(self) -> Path:
        """The graph of what drafts by the model's hidden states."""
        return self.path / DRAFT_GRAPH

    def draft_tokens(self) -> NDArray[np.int64] | None:
        """The token that each column of its logits stands for; None if that is the column's number.

        Raises:
            BundleError: the file is no such list.
        """
        head = self.manifest.draft_head
        if head is None or DRAFT_TOKENS not in self.manifest.files:
            return None
        token_ids = self._array(DRAFT_TOKENS)
        if token_ids.dtype != np.int64 or token_ids.shape != (head.vocab_size,):
            raise BundleError(
                f"model {self.name!r}: {DRAFT_TOKENS} is not a list of {head.vocab_size} tokens"
            )
        if token_ids.min() < 0 or token_ids.max() >= self.manifest.vocab_size:
            raise BundleError(
                f"model {self.name!r}: {DRAFT_TOKENS} has tokens that the model does not have"
            )
        return token_ids

    def query_weights(self) -> NDArray[np.float32] | None:
        """The weight of each token of a query, which needs no pass; None if queries are read as
        documents are.

        Raises:
            BundleError: the file is no such list.
        """
        if QUERY_WEIGHTS not in self.manifest.files:
            return None
        weights = self._array(QUERY_WEIGHTS)
        count = self.manifest.vocab_size
        if (
            weights.dtype != np.float32
            or weights.shape != (count,)
            or not np.isfinite(weights).all()
        ):
            raise BundleError(
                f"model {self.name!r}: {QUERY_WEIGHTS} is not a list of {count} finite weights"
            )
        return weights

    def task_adapter(self, name: str) -> Path:
        """The folder of an adapter that it brings."""
        return self.path / TASK_ADAPTERS / name

    def label_encoder(self) -> "Bundle | None":
        """The bundle that turns labels into vectors, whose files were verified with its own.

        Raises:
            BundleError: its manifest is invalid.
        """
        entities = self.manifest.entities
        if entities is None or not entities.encodes_labels:
            return None
        path = self.path / LABEL_ENCODER
        return Bundle(f"{self.name}:labels", path, _read_manifest(self.name, path / MANIFEST))

    @property
    def label(self) -> str:
        """The model's name, or ``NAME:full`` for the second graph under one name."""
        return self.name if self.manifest.graph == GRAPH else f"{self.name}:full"

    @property
    def tokenizer(self) -> Path:
        return self.path / TOKENIZER

    def finish_verifying(self) -> None:
        """Waits until all files are known to be those of the export.

        Raises:
            BundleError: one has changed, or cannot be read.
        """
        with _explain_reading(self.name):
            for file_name, sha256 in self.hashing.items():
                _compare(self.name, file_name, sha256.result(), self.manifest)

    def find_overwritten(self) -> str | None:
        """The name of a file with other content than when it was verified; None if there is none.

        Only files that were written to in place count: weights are mapped into memory, so a served
        model sees that. It does not see a file that was deleted or replaced by a rename.
        """
        for name, stamp in self.stamps.items():
            try:
                now = Stamp.of(self.path / name)
                if now == stamp or now.inode != stamp.inode:
                    continue
                if file_sha256(self.path / name) != self.manifest.files[name]:
                    return name
                self.stamps[name] = now
            except OSError:
                continue
        return None

    @property
    def num_bytes(self) -> int:
        """The size of its files, which is about what the graph and its weights take in memory."""
        return num_bytes(self.path, self.manifest)

    def _array(self, name: str) -> NDArray[Any]:
        """The array in a file of NumPy's; `numpy.load` also takes archives and pickles."""
        try:
            with (self.path / name).open("rb") as file:
                found: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        except (OSError, ValueError, MemoryError) as error:
            raise BundleError(f"model {self.name!r}: {name}: {error}") from error
        return found


def num_bytes(folder: Path, manifest: Manifest) -> int:
    """The size of the files that a manifest lists; one that is missing has none."""
    paths = (folder / name for name in manifest.files)
    return sum(path.stat().st_size for path in paths if path.is_file())


def file_sha256(path: Path) -> str:
    """The hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """File name to hex SHA-256, for ``Manifest.files``."""
    return {name: file_sha256(folder / name) for name in sorted(names)}


def write_manifest(folder: Path, manifest: Manifest, file_name: str = MANIFEST) -> None:
    """Writes the manifest into the folder and syncs it, so that the folder can be renamed."""
    with (folder / file_name).open("w", encoding="utf-8") as file:
        file.write(manifest.model_dump_json(indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def remember_hashes(path: Path) -> None:
    """Remembers the hashes of a bundle that an export of this process has just written.

    Raises:
        BundleError: there is no manifest, or it is invalid.
        OSError: a file is missing.
    """
    for file_name, sha256 in _read_manifest(path.name, path / MANIFEST).files.items():
        if (path / file_name).stat().st_size >= _LARGE:
            remember_sha256(path / file_name, sha256)


def load_bundle(name: str, path: Path) -> Bundle:
    """Reads and verifies a model folder; of a model with two graphs, the first one.

    Raises:
        BundleError: the manifest or a file is missing, invalid or changed.
    """
    with _Hashes() as hashes:
        bundle = _verify(name, path, _read_manifest(name, path / MANIFEST), hashes)
    bundle.finish_verifying()
    return bundle


def load_bundles(name: str, path: Path, *, in_background: bool = False) -> tuple[Bundle, ...]:
    """Reads and verifies a model folder: one bundle for each of its graphs.

    Args:
        in_background: whether a thread goes on reading large files, whose SHA-256 takes a second
            for 300 MB on some processors. Nothing that is made of them may be used before
            `Bundle.finish_verifying` has returned.

    Raises:
        BundleError: as `load_bundle`.
    """
    manifests = read_manifests(name, path)
    with _explain_reading(name), _Hashes() as hashes:  # both graphs share the weights
        bundles = tuple(_verify(name, path, manifest, hashes) for manifest in manifests)
    if not in_background:
        for bundle in bundles:
            bundle.finish_verifying()
    return bundles


def read_manifests(name: str, path: Path) -> list[Manifest]:
    """The manifests of a model folder; its other files are not read.

    Raises:
        BundleError: there is no manifest, or one is invalid.
    """
    paths = [path / MANIFEST]
    with _explain_reading(name):
        if (path / FULL_MANIFEST).is_file():
            paths.append(path / FULL_MANIFEST)
        return [_read_manifest(name, each) for each in paths]


@contextlib.contextmanager
def _explain_reading(name: str) -> Iterator[None]:
    """Has a file or folder that cannot be read be a sentence."""
    try:
        yield
    except OSError as error:
        raise BundleError(
            f"model {name!r}: {error.filename} cannot be read: {io_reason(error)}"
        ) from error


class _Hashes:
    """SHA-256 of files, each read once: of small ones at once, of large ones in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "maskdial-hash")
        self._found: dict[Path, tuple[Future[str], Stamp]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False)  # what was asked for is done

    def of(self, file: Path) -> tuple["Future[str]", Stamp]:
        """The hash of a file, perhaps a later one, and the file's stamp.

        Raises:
            OSError: it cannot be read.
        """
        if file not in self._found:
            stamp = Stamp.of(file)  # before it is read: what is written later must be noticed
            if stamp.size >= _LARGE:
                sha256 = self._pool.submit(known_sha256, file, file_sha256)
            else:
                sha256 = Future()
                sha256.set_result(file_sha256(file))
            self._found[file] = sha256, stamp
        return self._found[file]


def _compare(name: str, file_name: str, sha256: str, manifest: Manifest) -> None:
    if sha256 != manifest.files[file_name]:
        raise BundleError(
            f"model {name!r}: {file_name} has changed since it was exported (SHA-256 differs)"
        )


def _verify(name: str, path: Path, manifest: Manifest, hashes: _Hashes) -> Bundle:
    stamps: dict[str, Stamp] = {}
    hashing: dict[str, Future[str]] = {}
    others: tuple[str, ...] = () if manifest.text_to_text is None else (ENCODER_GRAPH,)
    if manifest.extraction is not None:
        others = (manifest.extraction.graph,)
    head = manifest.draft_head
    if head is not None:
        others = (DRAFT_GRAPH,)
        others += () if head.vocab_size == manifest.vocab_size else (DRAFT_TOKENS,)
    if manifest.entities is not None and manifest.entities.encodes_labels:
        own = (MANIFEST, GRAPH, TOKENIZER)
        others = tuple(f"{LABEL_ENCODER}/{each}" for each in own)
    for adapter in manifest.task_adapters:
        names = (ADAPTER_MANIFEST, ADAPTER_WEIGHTS)
        others += tuple(f"{TASK_ADAPTERS}/{adapter}/{each}" for each in names)
    for required in (manifest.graph, TOKENIZER, *others):
        if required not in manifest.files:
            raise BundleError(f"model {name!r}: the manifest does not list {required}")
    for file_name in manifest.files:
        file = path / file_name
        if Path(file_name).name != _below(file_name, manifest):
            raise BundleError(f"model {name!r}: {file_name!r} is outside the bundle")
        if not file.is_file():
            raise BundleError(f"model {name!r}: {file_name} is missing from {path}")
        sha256, stamps[file_name] = hashes.of(file)
        if stamps[file_name].size >= _LARGE:
            hashing[file_name] = sha256
        else:
            _compare(name, file_name, sha256.result(), manifest)
    manifest_file = path / (MANIFEST if manifest.graph == GRAPH else FULL_MANIFEST)
    identity = file_sha256(manifest_file)
    card = _read_card(path).of(identity)
    return Bundle(name, path, manifest, stamps, hashing, identity, card)


def _read_card(path: Path) -> Card:
    """The quality card; one that cannot be read keeps no model from being served."""
    try:
        return read_card(path)
    except ConfigError as error:
        _log.warning("%s", error.message)
        return Card()


def _below(file_name: str, manifest: Manifest) -> str:
    """A file's name within the folder of a bundle that it may lie in."""
    adapters = (f"{TASK_ADAPTERS}/{each}" for each in manifest.task_adapters)
    for folder in (LABEL_ENCODER, ADDITIONAL_TEMPLATES, *adapters):
        file_name = file_name.removeprefix(f"{folder}/")
    return file_name


def _read_manifest(name: str, path: Path) -> Manifest:
    if not path.is_file():
        raise BundleError(
            f"model {name!r}: {path.parent} has no {path.name}; create a bundle with "
            "`maskdial export`"
        )
    try:
        if (size := path.stat().st_size) > _MAX_MANIFEST_BYTES:
            raise BundleError(
                f"model {name!r}: {path.name} has {size:,} bytes; "
                f"a manifest has at most {_MAX_MANIFEST_BYTES:,}"
            )
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = io_reason(error)
        raise BundleError(f"model {name!r}: {path} is not readable JSON: {reason}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"model {name!r}: the bundle has schema version {version!r}, but this server reads "
            f"{SCHEMA_VERSION}; export the model again"
        )
    try:
        return Manifest.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BundleError(f"model {name!r}: {path.name}: {where}: {first['msg']}") from error
