"""Model: a masked bundle, loaded, of which engines are made as the server makes them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loadtests.errors import LoadTestError
from maskdial.config import Config
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.request import MaskedInput
from maskdial.metrics import EngineMetrics
from maskdial.models.bundle import Bundle, load_bundle
from maskdial.models.tokenizer import Tokenizer
from maskdial.runtime.placement import place
from maskdial.runtime.session import Session, SessionOptions


@dataclass(frozen=True, slots=True)
class Model:
    """One session for all engines, which never run at the same time."""

    bundle: Bundle
    tokenizer: Tokenizer
    session: Session
    config: Config

    @classmethod
    def load(cls, path: Path, config: Config) -> "Model":
        """Reads a bundle and loads its graph.

        Raises:
            LoadTestError: the bundle is not masked.
            BundleError: it cannot be read.
        """
        bundle = load_bundle(path.resolve().name, path)
        manifest = bundle.manifest
        if manifest.family != "masked":
            raise LoadTestError(
                f"{path} holds a {manifest.family} model; this measures masked ones"
            )
        tokenizer = Tokenizer.from_file(bundle.tokenizer, manifest.special_tokens)
        provider = place(bundle, config.provider).provider.name
        session = Session(
            bundle.graph, SessionOptions(provider, config.threads, config.spins(alone=True))
        )
        return cls(bundle, tokenizer, session, config)

    def inputs(self, texts: Iterable[str]) -> tuple[list[MaskedInput], int]:
        """The texts as the engine takes them, and how many were cut to the model's length.

        Of a graph that gathers rows, one row of each text is wanted, as for one mask.
        """
        longest = self.bundle.manifest.max_length
        inputs: list[MaskedInput] = []
        num_cut = 0
        for text in texts:
            encoding = self.tokenizer.encode(text)
            if len(encoding) > longest:
                num_cut += 1
                encoding = self.tokenizer.encode_cut(text, max_length=longest)
            inputs.append(MaskedInput(tuple(encoding.ids), (0,), tuple(encoding.type_ids)))
        return inputs, num_cut

    def engine(self, kind: type[MaskedEngine], metrics: EngineMetrics) -> MaskedEngine:
        """An engine of that class, not started."""
        return kind(
            self.session,
            max_batch_tokens=self.config.max_batch_tokens,
            max_queue=self.config.max_queue,
            pad_token_id=self.bundle.manifest.special_tokens.pad or 0,
            metrics=metrics,
            name=self.bundle.name,
        )
