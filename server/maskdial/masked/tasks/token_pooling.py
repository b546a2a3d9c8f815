"""Token pooling: vectors of a document's tokens that are alike become one, and fewer are stored.

Clavié, Chaffin and Adams 2024, "Reducing the Footprint of Multi-Vector Retrieval with Minimal
Performance Impact via Token Pooling", as sentence-transformers 6 has it in
`HierarchicalTokenPooling`: Ward's clusters by cosine distance, and the mean of each.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Embedding, TokenPooling
from maskdial.errors import ValidationError, about

Floats = NDArray[np.float32]
_Merge = tuple[int, int, float]

MAX_TOKENS = 2048
"""Of a document whose tokens are pooled: all their distances are in memory at once, 0.1 GB."""
SECONDS_PER_TOKEN = 150e-6
_SHORTEST = 1e-12


def pooling_of(
    embedding: Embedding, *, is_query: bool, factor: float | None = None
) -> TokenPooling | None:
    """How vectors of a text's tokens are pooled; None: they are not.

    Args:
        embedding: of the model.
        is_query: what the text is.
        factor: what a request asks for in place of the model's.
    """
    settings = None if embedding.multi_vector is None else embedding.multi_vector.pooling
    if settings is None and factor is None:
        return None
    pooling = settings or TokenPooling()
    if not (pooling.queries if is_query else pooling.documents):
        return None
    return pooling if factor is None else pooling.model_copy(update={"factor": factor})


def check_sizes(sizes: Sequence[int], pooling: TokenPooling | None) -> float:
    """Seconds that pooling so many tokens of each text will take.

    Raises:
        ValidationError: one has too many.
    """
    if pooling is None or pooling.factor == 1:
        return 0.0
    for index, size in enumerate(sizes):
        if size > MAX_TOKENS:
            with about("texts", index):
                raise ValidationError(
                    f"the text has vectors of {size} tokens, and {MAX_TOKENS} are pooled at most; "
                    "split it, or send no pool_factor"
                )
    return sum(sizes) * SECONDS_PER_TOKEN


def pool_tokens(vectors: Floats, pooling: TokenPooling | None) -> Floats:
    """The vectors of a text, fewer of them.

    Args:
        vectors: float32 (num_tokens, dimension), of length 1.
        pooling: how; None: not at all.

    Returns:
        float32 (num_pooled, dimension): the first ones, which are not pooled, and the means of
        clusters.
    """
    if pooling is None:
        return vectors
    kept, rest = vectors[: pooling.protected], vectors[pooling.protected :]
    num_clusters = max(int(len(rest) // pooling.factor), 1)
    found = vectors
    if num_clusters < len(rest):
        clusters = _clusters(rest, num_clusters)
        sums = np.zeros((clusters.max() + 1, vectors.shape[1]), np.float32)
        np.add.at(sums, clusters, rest)
        counts = np.bincount(clusters).astype(np.float32)
        found = np.concatenate([kept, sums / counts[:, None]])
    if pooling.normalizes:
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        found = found / np.maximum(lengths, np.float32(_SHORTEST))
    return found


def _clusters(vectors: Floats, most: int) -> NDArray[np.int64]:
    """The cluster of each vector, (num_vectors,), of at most so many; numbered as SciPy does."""
    upper = np.triu(np.clip(1 - vectors @ vectors.T, 0, 2), 1).astype(np.float64)
    merges = sorted(_merges(upper + upper.T), key=lambda merge: merge[2])
    return _cut(merges, most)


def _merges(distances: NDArray[np.float64]) -> Iterator[_Merge]:
    """Ward's clusters by chains of nearest neighbors (Murtagh 1983): two and their distance each
    time, whichever is found first. A cluster is called as its last member; ``distances`` change.
    """
    count = len(distances)
    sizes = np.ones(count)
    np.fill_diagonal(distances, np.inf)
    chain: list[int] = []
    for _ in range(count - 1):
        if not chain:
            chain.append(int(np.argmax(sizes > 0)))
        while True:
            last = chain[-1]
            nearest = int(np.argmin(distances[last]))
            if len(chain) > 1 and not distances[last, nearest] < distances[last, chain[-2]]:
                break
            chain.append(nearest)
        first, second = sorted((chain.pop(), chain.pop()))
        apart = float(distances[first, second])
        yield first, second, apart
        of_first, of_second = sizes[first], sizes[second]
        sizes[first], sizes[second] = 0, of_first + of_second
        share = 1 / (of_first + of_second + sizes)
        row = (
            (sizes + of_first) * share * distances[first] ** 2
            + (sizes + of_second) * share * distances[second] ** 2
            - sizes * share * apart**2
        )
        row = np.where(sizes > 0, np.sqrt(np.maximum(row, 0)), np.inf)
        row[second] = np.inf
        distances[second], distances[:, second] = row, row
        distances[first], distances[:, first] = np.inf, np.inf


def _cut(merges: list[_Merge], most: int) -> NDArray[np.int64]:
    """The clusters of at most so many that are farthest apart: SciPy's criterion ``maxclust``.

    Equal distances are cut together. Clusters are numbered along the tree, in which what was
    merged earlier stands first, and single members of a node behind its other branches.
    """
    count = len(merges) + 1
    cutoff = merges[count - most - 1][2]
    nodes, above = list[list[int]](), dict[int, int]()

    def root(node: int) -> int:
        """Of equal distances, a node may be cut before its branches: names alone do not tell."""
        while node in above:
            node = above[node]
        return node

    for first, second, _ in merges:
        branches = sorted((root(first), root(second)))
        above |= dict.fromkeys(branches, count + len(nodes))
        nodes.append(branches)
    found = np.full(count, -1, np.int64)
    number = -1
    waiting = [(2 * count - 2, False)]
    while waiting:
        node, within = waiting.pop()
        if node < count:
            number += not within
            found[node] = number
            continue
        branches = nodes[node - count]
        is_cluster = not within and merges[node - count][2] <= cutoff
        number += is_cluster
        ordered = sorted(branches, key=lambda each: each < count)  # single members last
        waiting += [(each, within or is_cluster) for each in reversed(ordered)]
    return found
