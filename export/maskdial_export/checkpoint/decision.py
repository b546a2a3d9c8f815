"""Decision models: a head that scores the options of questions, and the settings of checkpoints.

transformers 5 loads the head from a checkpoint of its own, or from files next to the weights of
another model (`AutoModelForDecision`). Other checkpoints may say how they are to be asked, in
``decision.json`` and ``decision_template.jinja``.
"""

import warnings
from pathlib import Path
from typing import Any, cast

import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import Tensor, nn
from transformers import JevForDecision, PreTrainedModel
from transformers.decision import DecisionConfig
from transformers.modeling_outputs import TokenClassifierOutput

from maskdial.bundle.manifest import DECISION_TEMPLATE, Decision
from maskdial.extras import how_to_install
from maskdial_export.checkpoint.files import check_link
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError, first_line

_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SETTINGS = "decision.json"


class Decider:
    """The forward function of a body with such a head: scores at every token.

    Soft caps are left to the server: ONNX Runtime's tanh rounds an element by its place in a batch.
    """

    model: PreTrainedModel
    scores: nn.Linear

    def forward(self, input_ids: Tensor, **settings: Any) -> TokenClassifierOutput:
        """The scores (batch, length, num_scores)."""
        output = self.model(input_ids=input_ids, **settings)
        return TokenClassifierOutput(logits=self.scores(output.last_hidden_state))


def as_scorer(decider: Any) -> PreTrainedModel:
    """A decision model as one that scores every token, in a class of its body's own file, whose
    functions the tracing replaces.
    """
    body = decider.model
    family = next(each for each in type(body).__mro__ if each.__name__.endswith("PreTrainedModel"))
    names = {"__module__": type(body).__module__, "base_model_prefix": "model"}
    scorer: Any = type(f"{type(body).__name__}ForDecision", (Decider, family), names)(body.config)
    scorer.model = body
    scorer.scores = decider.proj
    return cast(PreTrainedModel, scorer.eval())


def load_decider(source: Source, **settings: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The decision model of a checkpoint, and what `from_pretrained` says of its weights.

    An adapter that the checkpoint names is merged into them.

    Raises:
        ExportError: the adapter cannot be merged.
    """
    config, _ = JevForDecision.checkpoint_config(str(source.path), local_files_only=True)
    # Not the class's own function, which does not return what was loaded
    load = PreTrainedModel.from_pretrained.__func__
    model, info = load(JevForDecision, config=config, **settings)
    folder = adapter_folder(source.path)
    if folder is not None:
        _merge(model, folder)
    return model, info


def adapter_folder(path: Path) -> Path | None:
    """The folder of the adapter that a checkpoint names; None if it names none."""
    name: str | None = _config(path).adapter
    if name is None:
        return None
    folder = path / name
    if not folder.resolve().is_relative_to(path.resolve()):
        raise ExportError(f"the checkpoint names an adapter outside its folder, {name}")
    return folder


def _merge(model: Any, folder: Path) -> None:
    """Adds the adapter to the weights, by the names that transformers finds for them."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise ExportError(
            f"the checkpoint has an adapter, which needs peft ({error}): "
            f"{how_to_install('adapter')}"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_adapter(str(folder), adapter_kwargs={"local_files_only": True})
    except Exception as error:  # peft has no common error class
        raise ExportError(
            f"the adapter {folder} does not fit the model: {first_line(error)}"
        ) from error
    for name, module in [*model.named_modules()]:
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.get_base_layer())


def _config(path: Path) -> DecisionConfig:
    _, found = JevForDecision.checkpoint_config(str(path), local_files_only=True)
    if found is not None:
        return cast(DecisionConfig, found)
    return DecisionConfig.from_pretrained(str(path), local_files_only=True)


def _settings(source: Source) -> DecisionConfig:
    try:
        return _config(source.path)
    except Exception as error:  # of damaged files, many types
        raise ExportError(
            f"{_SETTINGS} of {source.name} cannot be read: {first_line(error)}"
        ) from error


def asks_together(source: Source) -> bool:
    """Whether the checkpoint's template asks all questions in one prompt.

    Raises:
        ExportError: the settings are damaged.
    """
    template = _settings(source).chat_template
    if template is None:
        return False
    try:
        tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateError:
        return False  # the server tells what is wrong with it
    return "questions" in jinja2.meta.find_undeclared_variables(tree)


def read_decision(source: Source) -> tuple[Decision | None, str | None]:
    """How a checkpoint answers questions, and its template; None for what it does not say.

    Raises:
        ExportError: the settings are damaged, or do not fit the head.
    """
    files = (_SETTINGS, DECISION_TEMPLATE)
    says_so = any((source.path / name).is_file() for name in files)
    if source.task not in ("decide", "generate", "fill-mask") or source.both_ways:
        return None, None
    if source.task != "decide" and not says_so:
        return None, None
    for name in files:
        check_link(source.path, source.path / name)
    config = _settings(source)
    tokenizer_settings = source.read_json("tokenizer_config.json")
    control = tokenizer_settings.get("chat_control_tokens")
    head: dict[str, Any] = {}
    if source.task == "decide":
        found, _ = JevForDecision.checkpoint_config(str(source.path), local_files_only=True)
        own = found or JevForDecision.config_class.from_pretrained(source.path)
        head = {
            "offsets": own.offsets,
            "num_scores": own.num_verbalizers,
            "softcap": own.softcap,
        }
    decision = Decision(
        labels={kind: tuple(labels) for kind, labels in config.labels.items()},
        temperature={kind: float(each) for kind, each in config.temperature.items()},
        noul_options=tuple(config.noul_options),
        keeps_control_tokens=not config.sanitize_control_tokens,
        control_tokens=None if control is None else tuple(control),
        special_tokens=_special_tokens(source.path),
        **head,
    )
    if any(temperature <= 0 for temperature in decision.temperature.values()):
        raise ExportError(f"a temperature of {source.name} is not above 0 ({_SETTINGS})")
    for kind, offset in decision.offsets.items():
        labels = decision.labels.get(kind) or ("",) * (2 if kind == "noul" else 1)
        if offset + len(labels) > (decision.num_scores or 0):
            raise ExportError(
                f"{source.name} has {len(labels)} labels for a {kind}, more than its head scores"
            )
    return decision, config.chat_template


def _special_tokens(path: Path) -> dict[str, str]:
    """The tokens that templates may name, such as ``cls_token``."""
    found: dict[str, str] = {}
    for file_name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_json(path / file_name)
        for role in _ROLES:
            token = content.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[f"{role}_token"] = token
    return found
