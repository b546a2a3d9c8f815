"""Bundles that chat: the causal starter with a chat template."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from maskdial.bundle import bundle
from maskdial.bundle.manifest import CHAT_TEMPLATE, GENERATION_CONFIG, TOOL_TEMPLATE
from maskdial.registry.catalog import STARTER_FOLDER

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"


def make_chat_bundle(
    folder: Path,
    template: str,
    *,
    tags: Sequence[str] = (),
    special: bool = True,
    tool_template: str | None = None,
    normalizer: object = None,
    **manifest: object,
) -> Path:
    """The causal starter with a chat template.

    Args:
        folder: where to make it.
        template: the chat template.
        tags: added tokens, which replace the last of the vocabulary: 11999, 11998 and so on.
        special: the tags are special tokens; else they are text, as Qwen's are.
        tool_template: the one for conversations with tools, if it is another.
        normalizer: of the tokenizer, as ``tokenizer.json`` describes it.
        manifest: changes of the manifest.
    """
    shutil.copytree(STARTER_FOLDER / "hybrid", folder, ignore=shutil.ignore_patterns("*.full.*"))
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["normalizer"] = normalizer
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__, reverse=True)
    for tag, token in zip(tags, tokens, strict=False):
        vocabulary[tag] = token_id = vocabulary.pop(token)
        tokenizer["model"]["merges"].pop()
        settings = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = {"id": token_id, "content": tag, "special": special} | settings
        tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (read,) = bundle.read_manifests("chat", folder)
    templates = [CHAT_TEMPLATE]
    if tool_template is not None:
        templates.append(TOOL_TEMPLATE)
        (folder / TOOL_TEMPLATE).parent.mkdir()
        (folder / TOOL_TEMPLATE).write_text(tool_template, encoding="utf-8")
    files = bundle.hash_files(folder, [*read.files, *templates])
    bundle.write_manifest(folder, read.model_copy(update={"files": files} | manifest))
    return folder


def set_defaults(folder: Path, **defaults: object) -> None:
    """Gives a bundle's model defaults of its own, in its generation_config.json."""
    (folder / GENERATION_CONFIG).write_text(json.dumps(defaults), encoding="utf-8")
    (read,) = bundle.read_manifests("chat", folder)
    files = bundle.hash_files(folder, read.files)
    bundle.write_manifest(folder, read.model_copy(update={"files": files}))
