"""Writes ``docs/settings.md``: every setting of the server, from `maskdial.config.Config`.

    make format

A test fails when the page is out of date.
"""

from pathlib import Path

from maskdial import settings
from maskdial.config import HEADINGS, SETTINGS, Config, default_text, repeated

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
_INTRODUCTION = """# Settings

Generated from `server/maskdial/config.py` by `make format`; `maskdial serve --help-all` shows the \
same.

Each setting is a flag of `maskdial serve` (`--api-key`), a variable (`MASKDIAL_API_KEY`) and a \
key of a TOML file (`api_key`). Flags override variables, variables override the file.

```toml
# maskdial serve --config maskdial.toml, or MASKDIAL_CONFIG=maskdial.toml
host = "0.0.0.0"
api_key_file = "keys.txt"
max_context = 8192
log_format = "json"
allowed_host = ["llm.example.org"]  # a flag that may be repeated is a list

[model]  # by the names under which they are served
chat = "./bundles/qwen3"
search = "./bundles/minilm"
```

In a variable, what may be repeated is separated by commas. An empty value and an unknown name are \
errors at the start, so that a misspelled key leaves no server open.
"""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRODUCTION]
    for name, field_name in SETTINGS.items():
        if field_name in HEADINGS:
            heading = HEADINGS[field_name]
            parts.append(
                f"\n## {heading[0].upper()}{heading[1:]}\n\n| | default | |\n|---|---|---|\n"
            )
        description = str(Config.model_fields[field_name].description).replace("|", "\\|")
        default = "none; may be repeated" if repeated(field_name) else default_text(field_name)
        parts.append(f"| `{settings.flag(name)}` | {default or 'none'} | {description} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
