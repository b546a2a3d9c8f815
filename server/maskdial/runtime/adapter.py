"""Adapter: a low-rank adapter that is loaded for a base."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maskdial.bundle.adapter import AdapterBundle, Projection
from maskdial.errors import BundleError
from maskdial.kernels.adapters import PackedAdapter
from maskdial.kernels.installed import Kernels


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter in memory. Requests hold it, so it outlives their passes.

    Attributes:
        name: what requests call it.
        digest: what the keys of the prefix cache have of it: the hash of its weights.
        num_bytes: the size of its matrices.
        packed: the matrices.
    """

    name: str
    digest: str
    num_bytes: int
    packed: PackedAdapter

    @property
    def address(self) -> int:
        """What passes know it by."""
        return self.packed.address


def load_adapter(
    bundle: AdapterBundle,
    kernels: Kernels,
    graphs: Sequence[Mapping[str, Projection]],
    base: str,
) -> Adapter:
    """Packs an adapter for the graphs of its base.

    Args:
        bundle: the adapter.
        kernels: those that run the graphs.
        graphs: of each, the layers that adapters may add to.
        base: the name of the base, for messages.

    Raises:
        BundleError: it has a layer that a graph does not compute so, or of another size.
    """
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
    return Adapter(bundle.name, bundle.manifest.weights_sha256, bundle.num_bytes, packed)


def address_of(adapter: Adapter | None) -> int:
    """What passes know a text's adapter by; 0 for none."""
    return 0 if adapter is None else adapter.address
