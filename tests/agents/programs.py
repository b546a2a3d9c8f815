"""The programs: how each is told where the model is, and what it is made to do.

Nothing of a program is changed: it gets an address, a key that means nothing, and a task.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.agents.script import RESULT, Call, Step

TASK = "calc.py adds wrongly. Fix it."
BEFORE = "def add(a, b):\n    return a - b\n"
AFTER = "def add(a, b):\n    return a + b\n"
NOTES = "notes.txt"
DONE = "The sum is right now."
_OLD, _NEW = "return a - b", "return a + b"
_SED = "sed -i 's/a - b/a + b/' calc.py"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program runs.

    Attributes:
        url: of the server.
        model: its name there.
        home: the program's own home.
        work: the folder with ``calc.py``.
        programs: the environments' folder.
        context: how long the program is to think the context is, in tokens; None for its own idea.
    """

    url: str
    model: str
    home: Path
    work: Path
    programs: Path
    context: int | None = None

    @property
    def file(self) -> str:
        return str(self.work / "calc.py")

    def node(self, name: str) -> str:
        """A program of npm's."""
        return str(self.programs / "node" / "node_modules" / ".bin" / name)

    def python(self, environment: str, name: str) -> str:
        """A program of PyPI's."""
        return str(self.programs / environment / "bin" / name)

    def write(self, name: str, content: object) -> None:
        """A settings file in the home."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Program:
    """A program and its script.

    Attributes:
        command: its command line; it may write settings.
        steps: what the model does.
        environment: variables that it gets.
        without_tools: whether its prompts describe no tools.
        result: what its prompts have once for each result of a tool.
        notes: how it is made to read a long file; it sums up the conversation when that is too
            long. None if it does not.
        stumbles: it says by its exit status that a prompt was too long, although it went on.
    """

    command: Callable[[Place], Sequence[str]]
    steps: Callable[[Place], Sequence[Step]]
    environment: Callable[[Place], Mapping[str, str]] = field(default=lambda place: {})
    without_tools: bool = False
    result: str = RESULT
    notes: Callable[[Place], Call] | None = None
    stumbles: bool = False


def _claude(place: Place) -> Sequence[str]:
    return [place.node("claude"), "-p", TASK, "--permission-mode", "acceptEdits"]


def _claude_environment(place: Place) -> Mapping[str, str]:
    kinds = ("HAIKU", "SONNET", "OPUS")
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": place.model,
        **{f"ANTHROPIC_DEFAULT_{kind}_MODEL": place.model for kind in kinds},
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _codex(place: Place) -> Sequence[str]:
    place.write(
        ".codex/config.toml",
        f'model = "{place.model}"\nmodel_provider = "local"\n'
        f"{f'model_context_window = {place.context}' if place.context else ''}\n"
        f'[model_providers.local]\nname = "local"\nbase_url = "{place.url}/v1"\n'
        'wire_api = "responses"\n',
    )
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return [place.node("codex"), "exec", *flags, TASK]


def _opencode(place: Place) -> Sequence[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
        "models": {place.model: {"name": place.model}},
    }
    settings = {"provider": {"local": provider}, "autoupdate": False, "share": "disabled"}
    place.write(".config/opencode/opencode.json", settings)
    return [place.node("opencode"), "run", "--model", f"local/{place.model}", TASK]


def _pi(place: Place) -> Sequence[str]:
    provider = {
        "baseUrl": f"{place.url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": place.model}],
    }
    place.write(".pi/agent/models.json", {"providers": {"local": provider}})
    return [place.node("pi"), "-p", "--provider", "local", "--model", place.model, TASK]


def _qwen(place: Place) -> Sequence[str]:
    return [place.node("qwen"), "--yolo", "--auth-type", "openai", "-p", TASK]


def _openai_environment(place: Place) -> Mapping[str, str]:
    return {
        "OPENAI_BASE_URL": f"{place.url}/v1",
        "OPENAI_API_BASE": f"{place.url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": place.model,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


# These ask a proxy also for this machine, whatever NO_PROXY says.
_NO_PROXY = {"HTTP_PROXY": "", "HTTPS_PROXY": ""}


def _qwen_environment(place: Place) -> Mapping[str, str]:
    return {**_openai_environment(place), **_NO_PROXY}


def _cline(place: Place) -> Sequence[str]:
    where = f"--provider openai-compatible --apikey none --baseurl {place.url}/v1"
    program = place.node("cline")
    auth = f"{program} auth {where} --modelid {place.model}"
    return ["sh", "-c", f"{auth} && exec {program} --provider openai-compatible '{TASK}'"]


def _aider(place: Place) -> Sequence[str]:
    flags = ("--yes-always", "--no-git", "--no-stream", "--no-show-model-warnings")
    quiet = ("--no-check-update", "--analytics-disable", "--edit-format", "diff")
    model = f"openai/{place.model}"
    program = place.python("aider", "aider")
    return [program, "--model", model, *flags, *quiet, "--message", TASK, "calc.py"]


def _mini(place: Place) -> Sequence[str]:
    output = str(place.home / "trajectory.json")
    program = place.python("mini", "mini")
    return [program, "-m", f"openai/{place.model}", "-t", TASK, "-y", "--exit-immediately",
            "--cost-limit", "0", "-o", output]  # fmt: skip


def _mini_environment(place: Place) -> Mapping[str, str]:
    return {
        **_openai_environment(place),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
    }


def _continue(place: Place) -> Sequence[str]:
    model = {"name": place.model, "provider": "openai", "model": place.model,
             "apiBase": f"{place.url}/v1", "apiKey": "none",
             "capabilities": ["tool_use"]}  # fmt: skip
    settings = {"name": "local", "version": "1.0.0", "schema": "v1", "models": [model]}
    place.write("config.yaml", settings)
    return [place.node("cn"), "--config", str(place.home / "config.yaml"), "--auto", "-p", TASK]


_READ = Call("read_file", {"path": "calc.py"})
_EDIT = Call("edit_file", {"path": "calc.py", "old": _OLD, "new": _NEW})


def _framework(name: str, kind: str) -> Program:
    """A script of ``frameworks``, with the two tools that are the same in all of them."""
    script = str(Path(__file__).with_name("frameworks") / f"run_{name}.py")

    def command(place: Place) -> Sequence[str]:
        python = place.python("frameworks", "python")
        return [python, script, kind, place.url, place.model, TASK]

    return Program(command, lambda place: [_READ, _EDIT, DONE], lambda place: _NO_PROXY)


def _smolagents(kind: str) -> Program:
    """It gives results back as a user's messages, and answers by a tool."""
    calls = [_READ, _EDIT, Call("final_answer", {"answer": DONE})]
    steps: Sequence[Step] = [_as_code(call) for call in calls] if kind == "code" else calls
    return replace(
        _framework("smolagents", kind),
        steps=lambda place: steps,
        without_tools=kind == "code",
        result="<|im_start|>user\nObservation:\n",
    )


def _as_code(call: Call) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
    return f"Thought: a step.\n<code>\nprint({call.name}({arguments}))\n</code>"


def _shell(name: str, argument: str) -> Callable[[Place], Sequence[Step]]:
    """A script for a program whose tool is a shell."""
    commands = ("cat calc.py", _SED)
    return lambda place: [*(Call(name, {argument: each}) for each in commands), DONE]


_BLOCK = (
    f"calc.py\n```python\n<<<<<<< SEARCH\n    {_OLD}\n=======\n    {_NEW}\n>>>>>>> REPLACE\n```"
)
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

PROGRAMS: Mapping[str, Program] = {
    "claude": Program(
        _claude,
        lambda place: [
            Call("Read", {"file_path": place.file}),
            Call("Edit", {"file_path": place.file, "old_string": _OLD, "new_string": _NEW}),
            DONE,
        ],
        _claude_environment,
        notes=lambda place: Call("Read", {"file_path": str(place.work / NOTES)}),
    ),
    "codex": Program(
        _codex,
        _shell("exec_command", "cmd"),
        notes=lambda place: Call("exec_command", {"cmd": f"cat {NOTES}"}),
    ),
    "opencode": Program(
        _opencode,
        lambda place: [
            Call("read", {"filePath": place.file}),
            Call("edit", {"filePath": place.file, "oldString": _OLD, "newString": _NEW}),
            DONE,
        ],
        notes=lambda place: Call("read", {"filePath": str(place.work / NOTES)}),
        stumbles=True,
    ),
    "pi": Program(
        _pi,
        lambda place: [
            Call("read", {"path": "calc.py"}),
            Call("edit", {"path": "calc.py", "edits": [{"oldText": _OLD, "newText": _NEW}]}),
            DONE,
        ],
    ),
    "qwen": Program(
        _qwen,
        lambda place: [
            Call("read_file", {"file_path": place.file}),
            Call("edit", {"file_path": place.file, "old_string": _OLD, "new_string": _NEW}),
            DONE,
        ],
        _qwen_environment,
    ),
    "cline": Program(
        _cline,
        lambda place: [
            Call("run_commands", {"commands": ["cat calc.py"]}),
            Call("run_commands", {"commands": [_SED]}),
            DONE,
        ],
        lambda place: _NO_PROXY,
    ),
    "aider": Program(_aider, lambda place: [_BLOCK], _openai_environment, without_tools=True),
    "mini-swe-agent": Program(
        _mini,
        lambda place: [
            Call("bash", {"command": "cat calc.py"}),
            Call("bash", {"command": _SED}),
            Call("bash", {"command": _SUBMIT}),
        ],
        _mini_environment,
    ),
    "continue": Program(
        _continue,
        lambda place: [
            Call("Read", {"filepath": place.file}),
            Call("Edit", {"file_path": place.file, "old_string": _OLD, "new_string": _NEW}),
            DONE,
        ],
        lambda place: _NO_PROXY,
    ),
    **{f"smolagents-{kind}": _smolagents(kind) for kind in ("tools", "code")},
    **{
        f"{name}-{kind}": _framework(name, kind)
        for name, kinds in (
            ("openai_agents", ("responses", "chat")),
            ("pydantic_ai", ("chat", "responses", "anthropic", "ollama")),
            ("langgraph", ("chat", "responses", "anthropic", "ollama")),
        )
        for kind in kinds
    },
}
