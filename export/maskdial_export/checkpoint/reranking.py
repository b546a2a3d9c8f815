"""Rerankers that are causal language models: what they read, and which tokens answer.

sentence-transformers has the tokens in its LogitScore module, and the prompt in a chat template
for messages of the roles query and document. vLLM reads the tokens from ``classifier_from_token``
in config.json. Qwen's own checkpoints say neither, only their model card does (arXiv:2506.05176).
llama.cpp has a text named rerank among a GGUF file's templates, and writes the texts in place of
``{query}`` and ``{document}``.

Nothing here needs torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from maskdial.bundle.manifest import PairTemplate
from maskdial.causal.chat.renderer import prepare
from maskdial_export.checkpoint.files import Files, chat_templates
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.sentence import (
    MODULES,
    default_prompt,
    module_folders,
    transformer_settings,
)
from maskdial_export.errors import ExportError

TOKENS = "classifier_from_token"
"""The entry of config.json that names the tokens for none and for a match."""
QWEN = PairTemplate(
    before="<|im_start|>system\nJudge whether the Document meets the requirements based on the "
    'Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: ",
    between="\n<Document>: ",
    after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
_QWEN_TOKENS = ("no", "yes")
_PROBES = (("\ue000", "\ue001"), (" \ue002 b\n", "c \ue003 "))
_INSTRUCTION = "\ue004"
_OF_LLAMA_CPP = "rerank"
_QUERY, _DOCUMENT = "{query}", "{document}"


def is_reranker(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the files of a causal model say that it answers yes or no."""
    modules = folder / MODULES
    listed = modules.read_text(encoding="utf-8", errors="replace") if modules.is_file() else ""
    return TOKENS in config or "LogitScore" in listed


def read_template(source: Files) -> PairTemplate:
    """The prompt that a reranker reads, from the chat template, or Qwen's.

    Raises:
        ExportError: there is none that takes a query and a document as they are.
    """
    templates = chat_templates(source)
    found = _between_marks(templates.get(_OF_LLAMA_CPP, ""))
    if found is None and "default" in templates:
        found = _split(source, templates["default"])
    if found is not None:
        return found
    if source.read_json("config.json").get("model_type") == "qwen3":
        return QWEN
    raise ExportError(
        f"{source.name} has no chat template that writes messages of the roles query and document "
        "as they are, in this order; add one as chat_template.jinja"
    )


def _between_marks(text: str) -> PairTemplate | None:
    """The parts of llama.cpp's template; None if it is not one with each mark once, in order."""
    if text.count(_QUERY) != 1 or text.count(_DOCUMENT) != 1:
        return None
    before, _, rest = text.partition(_QUERY)
    between, document, after = rest.partition(_DOCUMENT)
    if not document:
        return None
    usual = QWEN.instruction or ""
    instruction = usual if before.count(usual) == 1 else None
    return PairTemplate(before=before, between=between, after=after, instruction=instruction)


def _split(source: Files, template: str) -> PairTemplate | None:
    """The parts of a template around its texts; None if it does not just insert them."""
    for structured in (False, True):
        prompt = default_prompt(source)
        parts = [_parts(source, template, prompt, probe, structured) for probe in _PROBES]
        if parts[0] is not None and parts[0] == parts[1]:
            other = _parts(source, template, _INSTRUCTION, _PROBES[0], structured)
            return _with_instruction(parts[0], other)
    return None


def _with_instruction(parts: PairTemplate, other: PairTemplate | None) -> PairTemplate:
    """The template with its instruction: what stands where another one stood in ``other``."""
    if other is None or (other.between, other.after) != (parts.between, parts.after):
        return parts
    start, _, end = other.before.partition(_INSTRUCTION)
    rest = parts.before.removeprefix(start)
    instruction = rest[: len(rest) - len(end)]
    fits = start + instruction + end == parts.before
    if not fits or not instruction or parts.before.count(instruction) != 1:
        return parts
    return parts.model_copy(update={"instruction": instruction})


def _parts(
    source: Files, template: str, prompt: str | None, probe: tuple[str, str], structured: bool
) -> PairTemplate | None:
    texts = dict(zip(("query", "document"), probe, strict=True))
    if prompt:
        texts = {"system": prompt} | texts
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text}] if structured else text}
        for role, text in texts.items()
    ]
    variables = {
        "messages": messages,
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        **_special_tokens(source),
        **_arguments(source),
    }
    render = prepare({"sources": {"": template}})
    rendered = render({"template": "", "variables": variables}).get("text")
    if rendered is None:  # it raises at roles or contents that it does not know
        return None
    before, _, rest = rendered.partition(probe[0])
    between, document, after = rest.partition(probe[1])
    return PairTemplate(before=before, between=between, after=after) if document else None


def _arguments(source: Files) -> dict[str, Any]:
    """What sentence-transformers hands the template."""
    processing = transformer_settings(source).get("processing_kwargs") or {}
    given = processing.get("chat_template") or {}
    return {key: each for key, each in given.items() if key != "restore_suffix"}


def _special_tokens(source: Files) -> dict[str, str]:
    """The texts of the special tokens that templates name."""
    settings = source.read_json("tokenizer_config.json")
    names = ("bos_token", "eos_token")
    given = [settings.get(name) or "" for name in names]
    texts = (each["content"] if isinstance(each, dict) else each for each in given)
    return dict(zip(names, texts, strict=True))


def answers(source: Files, tokenizer: Tokenizer) -> tuple[int, int | None]:
    """The ids of the tokens for a match and, where it counts, for none.

    Raises:
        ExportError: nothing says which, or the tokenizer does not have them.
    """
    for kind, folder in module_folders(source):
        if kind == "LogitScore":
            settings = read_json(folder / "config.json")
            right, wrong = (settings.get(f"{answer}_token_id") for answer in ("true", "false"))
            if type(right) is not int or type(wrong) not in (int, type(None)) or right == wrong:
                raise ExportError(
                    f"{folder / 'config.json'} has no true_token_id, or no other false_token_id"
                )
            return right, wrong
    config = source.read_json("config.json")
    given = config.get(TOKENS)
    if given is None and config.get("model_type") == "qwen3":
        given = _QWEN_TOKENS
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ExportError(
            f"{source.name} does not say which tokens stand for a match and for none; add "
            f'"{TOKENS}": ["no", "yes"] to config.json, with its own tokens'
        )
    wrong, right = (tokenizer.token_to_id(str(token)) for token in given)
    if wrong is None or right is None or wrong == right:
        raise ExportError(
            f"the tokenizer of {source.name} has no two tokens {given[0]!r} and {given[1]!r}"
        )
    return right, wrong


def last_tokens(
    source: Files, template: PairTemplate, tokenizer: Tokenizer, pad: int | None
) -> list[int]:
    """The tokens of the prompt's end, by the last of which a text is judged.

    Raises:
        ExportError: it is the padding token, so it would not be found.
    """
    ids = list(tokenizer.encode(f"a{template.after}", add_special_tokens=False).ids)
    if pad is not None and ids[-1] == pad:
        raise ExportError(f"the prompt of {source.name} ends with the padding token")
    return ids
