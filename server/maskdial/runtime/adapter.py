"""Adapter: a low-rank adapter that is loaded for a base, perhaps with a head of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maskdial.bundle.adapter import AdapterBundle, Projection
from maskdial.errors import BundleError
from maskdial.kernels.adapters import PackedAdapter
from maskdial.kernels.installed import Kernels
from maskdial.runtime.head import Head


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in memory. Requests hold it, so it outlives their passes.

    Attributes:
        name: what requests call it.
        digest: what keys of caches and receipts have of it: the hash of its weights and its head.
        packed: the matrices; None if it has a head only.
        head: what its texts have in place of the base's output; None for that.
    """

    name: str
    digest: str
    packed: PackedAdapter | None
    head: Head | None = None

    @property
    def address(self) -> int:
        """What passes know it by; 0 if they compute what the base does."""
        return 0 if self.packed is None else self.packed.address

    @property
    def num_bytes(self) -> int:
        """The size of its matrices and its head in memory."""
        parts = (self.packed, self.head)
        return sum(each.num_bytes for each in parts if each is not None)


def load_adapter(
    bundle: AdapterBundle,
    kernels: Kernels,
    graphs: Sequence[Mapping[str, Projection]],
    base: str,
    columns: int | None = None,
) -> Adapter:
    """Packs an adapter for the graphs of its base, and loads its head.

    Args:
        bundle: the adapter.
        kernels: those that run the graphs.
        graphs: of each, the layers that adapters may add to.
        base: the name of the base, for messages.
        columns: of the base's hidden states; None if it does not return them.

    Raises:
        BundleError: it has a layer that a graph does not compute so, or of another size, or a head
            that the base has no hidden states for.
    """
    head = None
    if bundle.head is not None and bundle.manifest.head is not None:
        if columns is None:
            raise BundleError(
                f"adapter {bundle.name!r}: its head reads hidden states, which model {base!r} does "
                "not return; export that with --task embed-all"
            )
        head = Head(bundle.name, bundle.manifest.head, bundle.head, columns)
    packed = PackedAdapter(kernels.path)
    places = set()
    for layer, own in bundle.matrices.items():
        for projections in graphs:
            if layer not in projections:
                raise BundleError(
                    f"adapter {bundle.name!r}: layer {layer!r} is none of model {base!r} that an "
                    "adapter can change; merge the adapter with `maskdial export --adapter`"
                )
            size = projections[layer]
            if (size.num_inputs, size.num_outputs) != (own.num_inputs, own.num_outputs):
                raise BundleError(
                    f"adapter {bundle.name!r}: layer {layer!r} has {own.num_inputs} inputs and "
                    f"{own.num_outputs} outputs, but {size.num_inputs} and {size.num_outputs} in "
                    f"model {base!r}"
                )
            if (size.product, size.first) not in places:  # graphs of one model have the same
                places.add((size.product, size.first))
                packed.add(own, size)
    digest = bundle.manifest.digest
    return Adapter(bundle.name, digest, packed if places else None, head)


def address_of(adapter: Adapter | None) -> int:
    """What passes know a text's adapter by; 0 for none."""
    return 0 if adapter is None else adapter.address
