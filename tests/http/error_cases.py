"""Bad requests to every POST route: what the document refuses, and what only the server can tell.

A case is a change of a body that gets an answer: `Case.changes` by place, such as
``parameters.top_k``.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT = "The old king lived in a house by the sea."
MASKED = "The old king lived in a [MASK] by the sea."
LONG = "word " * 3000
CHAT = [{"role": "user", "content": "Who lives here?"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CHOICES = [{"value": "POSITIVE"}, {"value": "NEGATIVE"}]
QUESTION = {"type": "choice", "instructions": "How is it?", "choices": CHOICES}
NOUL = {"type": "noul", "instructions": "Is it good?"}
SENTIMENTS = {"type": "choice", "criteria": {"POSITIVE": None, "NEGATIVE": "bad"}}
PAIRS = {"model": "rerank", "text_1": "Who?", "text_2": ["a", "b"]}
RANKING = {"model": "rerank", "query": "Who?", "documents": ["a", "b"]}
GENERATION = {"model": "hybrid", "inputs": "Once", "parameters": {"max_new_tokens": 1}}
SUMMARY: dict[str, Any] = {"inputs": TEXT, "parameters": {"generate_parameters": {}}}
TRANSLATION = {"inputs": TEXT, "parameters": {"src_lang": "en"}}
CHAT_BODY = {"model": "chat", "messages": CHAT, "max_tokens": 1}

TENSOR = {"name": "inputs", "shape": [1], "datatype": "BYTES", "data": [TEXT]}
TENSORS: dict[str, Any] = {"inputs": [TENSOR]}

BODIES: dict[str, dict[str, Any]] = {
    "/fill-mask": {"model": "masked", "inputs": MASKED},
    "/classify": {"model": "sentiment", "inputs": TEXT},
    "/predict": {"model": "sentiment", "inputs": TEXT},
    "/decode": {"model": "hybrid", "ids": [[5, 6]]},
    "/embeddings": {"model": "embed", "input": TEXT},
    "/vertex": {"model": "sentiment", "instances": [{"inputs": TEXT}]},
    "/invocations": {"model": "sentiment", "inputs": TEXT},
    "/": {"model": "sentiment", "inputs": TEXT},
    "/token-classify": {"model": "tags", "inputs": TEXT},
    "/redact": {"model": "tags", "inputs": TEXT},
    "/extract": {"inputs": TEXT, "parameters": {"schema": {"entities": ["person"]}}},
    "/question-answering": {"inputs": {"question": "Who?", "context": TEXT}},
    "/embed": {"model": "embed", "inputs": TEXT},
    "/embed-sparse": {"model": "embed-sparse", "inputs": TEXT},
    "/embed_sparse": {"model": "embed-sparse", "inputs": TEXT},
    "/embed-all": {"model": "embed-all", "inputs": TEXT},
    "/embed_all": {"model": "embed-all", "inputs": TEXT},
    "/embed-hybrid": {"inputs": TEXT},
    "/embed-chunks": {"inputs": TEXT, "chunks": [[0, 12], [12, 40]]},
    "/zero-shot-classify": {"inputs": TEXT, "parameters": {"candidate_labels": ["a", "b"]}},
    "/rerank": {"model": "rerank", "query": "Who?", "texts": ["a", "b"]},
    "/similarity": {
        "model": "embed",
        "inputs": {"source_sentence": TEXT, "sentences": ["a", "b"]},
    },
    "/score": {"model": "hybrid", "inputs": TEXT},
    "/infill": {"model": "hybrid", "input_prefix": "The old", "input_suffix": "by the sea."},
    "/generate": GENERATION,
    "/generate_stream": GENERATION,
    "/summarize": SUMMARY,
    "/translate": TRANSLATION,
    "/tokenize": {"model": "hybrid", "inputs": TEXT},
    "/detokenize": {"model": "hybrid", "ids": [[5, 6]]},
    "/v1/completions": {"model": "hybrid", "prompt": "Once", "max_tokens": 1},
    "/v1/fim/completions": {"model": "hybrid", "prompt": "Once", "max_tokens": 1},
    "/completion": {"model": "hybrid", "prompt": "Once", "n_predict": 1},
    "/apply-template": {"model": "chat", "messages": CHAT},
    "/chat/completions": CHAT_BODY,
    "/v1/chat/completions": CHAT_BODY,
    "/models/{name}/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"model": "chat", "input": "Who?", "max_output_tokens": 1},
    "/v1/responses/compact": {"model": "chat", "input": "Who?", "max_output_tokens": 1},
    "/v1/responses/{id}/cancel": {},
    "/v1/embeddings": {"model": "embed", "input": TEXT},
    "/v1/rerank": RANKING,
    "/v2/rerank": RANKING,
    "/v1/score": PAIRS,
    "/pooling": {"model": "sentiment", "input": TEXT},
    "/v1/moderations": {"model": "sentiment", "input": TEXT},
    "/v2/embed": {"model": "embed", "texts": [TEXT]},
    "/v1/embed": {"model": "embed", "texts": [TEXT]},
    "/v2/chat": CHAT_BODY,
    "/v1/decisions": {"model": "sentiment", "input": TEXT, "questions": [QUESTION]},
    "/v1/systemone": {"model": "sentiment", "state": TEXT, "questions": {"a": SENTIMENTS}},
    "/v1/messages": CHAT_BODY,
    "/v1/messages/count_tokens": {"model": "chat", "messages": CHAT},
    "/api/chat": {"model": "chat", "messages": CHAT, "options": {"num_predict": 1}},
    "/api/generate": {"model": "hybrid", "prompt": "Once", "options": {"num_predict": 1}},
    "/api/embed": {"model": "embed", "input": TEXT},
    "/api/embeddings": {"model": "embed", "prompt": TEXT},
    "/api/show": {"model": "chat"},
    "/api/pull": {"model": "chat"},
    "/api/push": {"model": "chat"},
    "/api/create": {"model": "chat"},
    "/api/copy": {"source": "chat"},
    "/api/blobs/{digest}": {},
    "/v1/files": {},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/classify",
        "completion_window": "24h",
    },
    "/v1/batches/{id}/cancel": {},
    "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": CHAT_BODY}]},
    "/v1/messages/batches/{id}/cancel": {},
    "/v1/prefill": {**CHAT_BODY, "key": "admin"},
    "/models/load": {"model": "sentiment"},
    "/models/unload": {"model": "sentiment"},
    "/v1/load_lora_adapter": {"lora_name": "mine", "lora_path": "mine"},
    "/v1/unload_lora_adapter": {"lora_name": "mine"},
    "/models/{name}": {"inputs": "Once", "parameters": {"max_new_tokens": 1}},
    "/v2/models/{name}/infer": TENSORS,
    "/v2/models/{name}/versions/{version}/infer": TENSORS,
    "/v2/models/{name}/generate": {"text_input": "Once", "parameters": {"max_new_tokens": 1}},
    "/v2/models/{name}/generate_stream": {
        "text_input": "Once",
        "parameters": {"max_new_tokens": 1},
    },
    "/v1/models/{name}:predict": {"instances": [TEXT]},
    "/v2/repository/index": {},
    "/v2/repository/models/{name}/load": {},
    "/v2/repository/models/{name}/unload": {},
}
"""A body for each POST route, by its path."""

NAMES = {
    "/models/{name}/v1/chat/completions": "chat",
    "/models/{name}": "hybrid",
    "/v2/models/{name}/infer": "sentiment",
    "/v2/models/{name}/versions/{version}/infer": "sentiment",
    "/v2/models/{name}/generate": "hybrid",
    "/v2/models/{name}/generate_stream": "hybrid",
    "/v1/models/{name}:predict": "sentiment",
    "/v2/repository/models/{name}/load": "sentiment",
    "/v2/repository/models/{name}/unload": "nobody",
}
"""The models in the paths that name one."""

ADMIN = (
    "/models/load",
    "/models/unload",
    "/v2/repository/models/",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/prefill",
)
"""Paths that want the admin's key begin so."""

REFUSED = (
    "/token-classify",
    "/redact",
    "/extract",
    "/question-answering",
    "/embed-all",
    "/embed_all",
    "/embed-hybrid",
    "/embed-chunks",
    "/summarize",
    "/translate",
    "/api/push",
    "/api/create",
    "/api/copy",
    "/api/blobs/{digest}",
    "/v1/files",
    "/v1/batches",
    "/v1/batches/{id}/cancel",
    "/v1/messages/batches/{id}/cancel",
    "/models/unload",
    "/v1/responses/{id}/cancel",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v2/repository/models/{name}/unload",
)
"""Paths whose body is not sent as it is: no model could do the task, or it would be gone."""

COPIES = (
    "/chat/completions",
    "/v1/fim/completions",
    "/generate_stream",
    "/models/{name}/v1/chat/completions",
    "/models/{name}",
    "/decode",
    "/embeddings",
    "/invocations",
    "/",
    "/v2/rerank",
    "/v1/embed",
    "/embed_sparse",
    "/embed_all",
    "/v2/models/{name}/versions/{version}/infer",
    "/v2/models/{name}/generate_stream",
)
"""Paths whose bodies are those of other paths, so that the document says nothing new about them."""

_SAMPLING: list[dict[str, Any]] = [
    {"logit_bias": {"": 1}},
    {"logit_bias": [["x"]]},
    {"bad_words": [""]},
    {"dry_base": 0.5},
    {"dry_sequence_breakers": [1]},
    {"top_n_sigma": -2},
    {"xtc_probability": 2},
    {"dynatemp_range": -1},
    {"mirostat": 1},
    {"logit_bias": {"05": 1}},
    {"logit_bias": {"999999": 1}},
    {"logit_bias": {"5": 101}},
    {"stop_token_ids": [5, 999999]},
    {"stop": ["a"] * 65},
    {"stop": ["x" * 1025]},
    {"seed": 2**63},
    {"surprise": 1},
]
_GENERATE: list[dict[str, Any]] = [
    {"inputs": ""},
    {"inputs": []},
    {"inputs": ["a", ""]},
    {"inputs": ["a", 7]},
    {"inputs": LONG},
    {"inputs": ["a", LONG]},
    {"inputs": ["a"] * 257},
    {"inputs": "a", "messages": CHAT},
    {"inputs": None, "messages": []},
    {"inputs": None, "messages": [{"role": "user"}]},
    {"inputs": None, "messages": [*CHAT, {"role": "user", "content": 7}]},
    {"inputs": None, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"inputs": None, "messages": CHAT},
    {"inputs": ["a", "b"], "stream": True},
    {"max_new_tokens": 5},
    *({f"parameters.{name}": value for name, value in each.items()} for each in _SAMPLING),
    {"parameters.max_new_tokens": 100_000},
    {"parameters.max_new_tokens": 2, "parameters.min_new_tokens": 3},
    {"parameters.max_new_tokens": None, "parameters.min_new_tokens": 100_000},
    {"parameters.n": 2},
    {"parameters.n": 2, "parameters.best_of": 1, "parameters.do_sample": True},
    {"parameters.n": 2, "parameters.do_sample": True, "stream": True},
    {"parameters.n": 128, "parameters.do_sample": True, "inputs": ["a"] * 3},
    {"parameters.decoder_input_details": True, "stream": True},
    {"parameters.num_beams": 4, "parameters.stop": ["a"]},
    {"parameters.num_beams": 4},
    {"parameters.num_beams": 2, "parameters.n": 3, "parameters.max_new_tokens": 2},
    {"parameters.early_stopping": "always"},
    {"parameters.src_lang": "en"},
    {"parameters.tgt_lang": "de"},
    {"parameters.watermark": True},
    {"parameters.grammar": {"type": "regex", "value": "("}},
    {"parameters.grammar": {"type": "regex"}},
    {"parameters.grammar": {"type": "lark", "value": "start: nothing"}},
    {"parameters.grammar": {"type": "json", "value": {"type": "strange"}}},
    {"parameters.grammar": {"type": "json", "value": "{"}},
    {"parameters.grammar": {"type": "json", "value": 7}},
    {"parameters.grammar": {"type": "xml", "value": "a"}},
    {
        "parameters.details": True,
        "parameters.top_n_tokens": 20,
        "parameters.max_new_tokens": 120,
        "inputs": ["a"] * 120,
    },
    {"model": "sentiment"},
    {"model": "masked"},
    {"model": "hybrid:full"},
    {"model": "hybrid:causal", "mask": "full"},
    {"timeout": 1e-9},
]
_CHAT: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "king", "content": "a"}]},
    {"messages": [*CHAT, {"role": "user"}]},
    {"messages": [*CHAT, {"role": "user", "content": 7}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": LONG}]},
    {"messages": [{"role": "tool", "content": "a"}]},
    {
        "messages": [
            *CHAT,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "find", "arguments": "[]"},
                    }
                ],
            },
        ]
    },
    {"max_tokens": 2, "max_completion_tokens": 3},
    {"max_tokens": 2, "min_tokens": 3},
    {"max_tokens": 100_000},
    {"max_completion_tokens": 100_000, "max_tokens": None},
    {"functions": [{"name": "find"}]},
    {"function_call": {"name": "find"}},
    {"top_logprobs": 2},
    {"tools": [TOOL, {"type": "function", "function": {"name": "a b"}}]},
    {"tools": [TOOL, TOOL]},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{**TOOL, "function": {"name": "find", "parameters": {"type": "strange"}}}]},
    {"tool_choice": "required"},
    {"tool_choice": "sometimes"},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "lose"}}},
    {"tools": [TOOL], "tool_choice": "required", "guided_grammar": 'start: "a"'},
    {"add_generation_prompt": True, "continue_final_message": True},
    {"thinking_budget": 1, "reasoning": {"max_tokens": 1}},
]
_OPENAI: list[dict[str, Any]] = [
    *_SAMPLING,
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}},
    {"response_format": {"type": "regex"}},
    {"guided_regex": "("},
    {"guided_json": 7},
    {"guided_json": {"type": "strange"}},
    {"guided_choice": []},
    {"guided_grammar": "start: nothing"},
    {"guided_regex": "a", "guided_json": {}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"choice": []}},
    {"stream_options": {"include_usage": True}},
    {"n": 2, "temperature": 0},
    {"best_of": 3, "temperature": 0},
    {"n": 100, "max_tokens": 1, "best_of": 128, "prompt": ["a"] * 3},
    {"model": "sentiment"},
    {"model": "hybrid:full", "top_p": 0.5},
    {"suffix": "a"},
    {"use_beam_search": True},
    {"timeout": 1e-9},
]
_TASK: list[dict[str, Any]] = [
    {"inputs": ""},
    {"inputs": " \n"},
    {"inputs": []},
    {"inputs": ["a [MASK]", ""]},
    {"inputs": ["a [MASK]", 7]},
    {"inputs": ["a [MASK]", LONG]},
    {"inputs": LONG},
    {"inputs": ["a [MASK]"] * 257},
    {"model": "chat"},
    {"mask": "causal"},
    {"priority": 1},
    {"timeout": 1e-9},
]
_BAD_SCHEMAS: tuple[Any, ...] = (
    None,
    {},
    {"entities": []},
    {"entities": ["a", "a"]},
    {"entities": ["a", " "]},
    {"entities": {"a": {"dtype": "int"}}},
    {"entities": {"a": {"threshold": 2}}},
    {"relations": ["a", "a"]},
    {"structures": {"a": {"fields": []}}},
    {"structures": {"a": {"fields": [{"name": "b"}, {"name": "b"}]}}},
    {"structures": {"a": {"fields": [{"name": "b", "choices": ["c", "c"]}]}}},
    {"structures": {"entities": {"fields": [{"name": "b"}]}}},
    {"structures": {"a": {"fields": [{"name": "b"}], "mode": "latent"}}},
    {"classifications": [{"task": "a", "labels": ["b"]}]},
    {"classifications": [{"task": "a", "labels": ["b", "c"], "top_k": 0}]},
    {"classifications": [{"task": "a", "labels": ["b", "c"]}] * 2},
)
_SHORT_TASK = [each for each in _TASK if LONG not in each.get("inputs", "")]
_EMBED: list[dict[str, Any]] = [
    *_TASK,
    {"dimensions": 3},
    {"output_dtype": "int8", "normalize": False},
    {"prompt_name": "query"},
    {"instruction": "a"},
    {"parameters": {"prompt_name": "query"}},
]
_DOCUMENTS: list[dict[str, Any]] = [
    {"query": ""},
    {"query": LONG},
    {"documents": []},
    {"documents": ["a", ""]},
    {"documents": ["a", 7]},
    {"documents": ["a", LONG]},
    {"documents": ["a", {"title": "b"}]},
    {"documents": ["a"] * 257},
    {"top_n": 0},
    {"instruction": "Find it"},
    {"model": "sentiment"},
    {"timeout": 1e-9},
]
_TOOLS_OF_ANTHROPIC = [{"name": "find", "input_schema": {"type": "object"}}]
_ANTHROPIC: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "system", "content": "a"}]},
    {"messages": [*CHAT, {"role": "assistant", "content": "a"}]},
    {"messages": [*CHAT, {"role": "user", "content": [{"type": "image"}]}]},
    {"messages": [*CHAT, {"role": "user", "content": 7}]},
    {"messages": [{"role": "user", "content": LONG}]},
    {
        "messages": [
            *CHAT,
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}],
            },
        ]
    },
    {"system": [{"type": "image"}]},
    {"system": 7},
    {"tools": [{"name": "find"}]},
    {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    {"tools": [*_TOOLS_OF_ANTHROPIC, {"name": "a b", "input_schema": {}}]},
    {"tools": _TOOLS_OF_ANTHROPIC},
    {"tools": _TOOLS_OF_ANTHROPIC, "tool_choice": {"type": "tool"}},
    {"tools": _TOOLS_OF_ANTHROPIC, "tool_choice": {"type": "tool", "name": "lose"}},
    {"tool_choice": {"type": "any"}},
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strange"}}}},
    {"output_config": {"format": {"type": "xml"}}},
    {"max_tokens": 2, "stop_sequences": ["a"] * 65},
    {"model": "sentiment"},
    {"model": "hybrid"},
    {"timeout": 1e-9},
]

_OLLAMA: list[dict[str, Any]] = [
    *({f"options.{name}": value for name, value in each.items()} for each in _SAMPLING),
    {"options.mirostat": 1},
    {"options.repeat_last_n": -2},
    {"options.temperature": "hot"},
    {"options.num_predict": -3},
    {"format": "xml"},
    {"format": {"type": "strange"}},
    {"think": True},
    {"think": "often"},
    {"keep_alive": "soon"},
    {"images": ["iVBOR"]},
    {"model": "nobody:latest"},
    {"model": "hybrid:7b"},
    {"model": "sentiment"},
    {"timeout": 1e-9},
]

MORE: dict[str, list[dict[str, Any]]] = {
    "/api/chat": [
        *_OLLAMA,
        {"messages": [{"role": "king", "content": "a"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": "a", "images": ["iVBOR"]}]},
        {"messages": [{"role": "user", "content": "a", "thinking": "b"}]},
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "find"}}]}] * 2},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}],
                }
            ]
        },
        {"messages": [], "keep_alive": 0},
        {"messages": [], "model": "sentiment"},
        {"tools": [TOOL]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"model": "hybrid"},
    ],
    "/api/generate": [
        *_OLLAMA,
        {"prompt": LONG},
        {"prompt": "", "keep_alive": 0},
        {"suffix": "a"},
        {"context": [5, 6]},
        {"template": "{{ .System }} {{ .Prompt }}"},
        {"system": "a"},
        {"system": "a", "raw": True},
    ],
    "/api/embed": [
        {"input": ["a", ""]},
        {"input": ["a", 7]},
        {"input": ["a", LONG], "truncate": False},
        {"input": LONG, "truncate": False},
        {"input": ["a"] * 3000},
        {"dimensions": 3},
        {"model": "sentiment"},
        {"timeout": 1e-9},
    ],
    "/api/embeddings": [{"model": "sentiment"}, {"timeout": 1e-9}, {"options": {"surprise": 1}}],
    "/api/show": [{"model": "nobody"}, {"model": ""}],
    "/api/pull": [{"model": "nobody"}, {"model": ""}],
    "/fill-mask": [
        *_TASK,
        {"inputs": "no blank here"},
        {"inputs": ["a [MASK]", "none"]},
        {"inputs": "[MASK] " * 100, "parameters": {"top_k": 12000}},
        {"parameters": {"joint": True, "steps": 2}},
        {"parameters": {"joint": True, "order": [1]}},
        {"parameters": {"joint": True, "targets": [["a"], ["b"]]}},
        {"inputs": "[MASK] a" * 6, "parameters": {"joint": True, "targets": ["word " * 50]}},
        {"parameters": {"joint": True, "targets": ["a", ["b"]]}},
        {"parameters": {"joint": True, "top_k": 33}},
        {"parameters": {"joint": True, "num_beams": 2, "threshold": 0.5}},
        {"parameters": {"joint": True, "num_beams": 2, "temperature": 1}},
        {"parameters": {"joint": True, "steps": 1, "threshold": 0.5}},
        {"parameters": {"steps": 1}},
        {"parameters": {"targets": [["a"]]}},
        {"parameters": {"grammar": {"type": "regex", "value": "a"}}},
        {"parameters": {"joint": True, "max_new_tokens": 3}},
        {"parameters": {"joint": True, "grammar": {"type": "regex", "value": "(a"}}},
        {"parameters": {"joint": True, "grammar": {"type": "regex", "value": "[0-9]{99}"}}},
        {"parameters": {"joint": True, "grammar": [{"type": "json"}, None]}},
        {"parameters": {"joint": True, "steps": 1, "grammar": {"type": "json"}}},
        {"parameters": {"joint": True, "targets": ["a"], "grammar": {"type": "json"}}},
        {"parameters": {"joint": True, "grammar": "a"}},
        {"inputs": "[MASK]", "parameters": {"joint": True}},
        {"inputs": ["a [MASK]"] * 9, "parameters": {"joint": True, "num_beams": 32}},
        {"parameters": {"targets": []}},
        {"parameters": {"targets": ["house", ""]}},
        {"parameters": {"targets": ["house", "antidisestablishmentarianism"]}},
        {"model": "sentiment"},
        {"model": "hybrid:causal"},
    ],
    "/infill": [
        *_SAMPLING,
        {"input_prefix": " ", "input_suffix": " "},
        {"input_prefix": "a [MASK]"},
        {"input_suffix": "<mask>"},
        {"input_prefix": LONG},
        {"input_extra": [{"text": 1}]},
        {"n_predict": 33},
        {"guided_regex": "(a"},
        {"guided_regex": "[0-9]{99}"},
        {"guided_json": 1},
        {"guided_json": {}, "guided_choice": ["a"]},
        {"n": 33},
        {"top_k": 5, "temperature": 1},
        {"model": "hybrid:causal"},
        {"model": "sentiment"},
    ],
    "/classify": [
        *_TASK,
        {"inputs": {"text": "a"}},
        {"inputs": {"text": "a", "text_pair": 1}},
        {"inputs": [["a", "b"], ["c"]]},
        {"inputs": ["a", ["b"]]},
        {"inputs": {"text": "a", "text_pair": LONG}},
        {"parameters": {"function_to_apply": "relu"}},
        {"model": "nobody"},
    ],
    "/predict": [
        *_TASK,
        {"inputs": ["a", "b", "c"]},
        {"inputs": [["a"], ["b", ""]]},
        {"inputs": [["a"], [LONG]]},
        {"inputs": [["a"]] * 257},
    ],
    "/decode": [{"ids": [[5], [999_999]]}],
    "/embeddings": [{"input": ["a", ""]}],
    "/vertex": [
        {"instances": [{"inputs": "a"}, {}]},
        {"instances": [{"inputs": "a"}, {"inputs": LONG}]},
        {"instances": [{"inputs": "a"}, {"inputs": ["b", ""]}]},
        {"instances": [{"inputs": "a"}] * 257},
        {"model": None},
        {"model": "chat"},
        {"timeout": 1e-9},
    ],
    "/invocations": [{"inputs": ""}, {"inputs": [["a"], []]}, {"model": None}, {"model": "nobody"}],
    "/": [{"inputs": ""}],
    "/v2/models/{name}/infer": [
        {"inputs": []},
        {"inputs": [{**TENSOR, "datatype": "FP32"}]},
        {"inputs": [{**TENSOR, "shape": [2**40]}]},
        {"inputs": [{**TENSOR, "shape": [-1]}]},
        {"inputs": [{**TENSOR, "data": [7]}]},
        {"inputs": [{**TENSOR, "data": [""]}]},
        {"inputs": [{**TENSOR, "data": [LONG]}]},
        {"inputs": [{**TENSOR, "data": None}]},
        {"inputs": [{**TENSOR, "data": None, "parameters": {"binary_data_size": 7}}]},
        {"inputs": [{**TENSOR, "shape": [257], "data": ["a"] * 257}]},
        {"inputs": [TENSOR, TENSOR]},
        {"inputs": [TENSOR, {**TENSOR, "name": "more"}]},
        {"outputs": [{"name": "surprise"}]},
        {"outputs": [{"name": "score", "parameters": {"classification": 3}}]},
        {"parameters": {"surprise": 1}},
        {"parameters": {"timeout": 1}},
        {"parameters": {"timeout": -1}},
        {"mask": "causal"},
    ],
    "/v2/models/{name}/versions/{version}/infer": [{"inputs": [{**TENSOR, "data": [7]}]}],
    "/v2/models/{name}/generate": [
        {"text_input": ""},
        {"text_input": LONG},
        {"parameters": {"temperature": -1}},
        {"parameters": {"surprise": 1}},
        {"parameters": {"n": 2}},
        {"mask": "full"},
        {"timeout": 1e-9},
    ],
    "/v2/models/{name}/generate_stream": [{"text_input": LONG}, {"parameters": {"n": 2}}],
    "/v1/models/{name}:predict": [
        {"instances": []},
        {"instances": ["a", ""]},
        {"instances": ["a", LONG]},
        {"instances": [{"inputs": "a", "stream": True}]},
        {"instances": [{"text": "a"}]},
        {"instances": ["a"] * 257},
        {"timeout": 1e-9},
    ],
    "/token-classify": [
        *_SHORT_TASK,
        {"parameters": {"aggregation_strategy": "best"}},
        {"parameters": {"ignore_labels": [7]}},
        {"parameters": {"candidate_labels": []}},
        {"parameters": {"candidate_labels": [" "]}},
        {"parameters": {"candidate_labels": ["a"]}},
        {"parameters": {"candidate_labels": ["a"], "threshold": 2}},
        {"parameters": {"candidate_labels": ["a"], "aggregation_strategy": "max"}},
        {"parameters": {"threshold": 0.5}},
        {"model": "sentiment"},
    ],
    "/redact": [
        *_SHORT_TASK,
        {"parameters": {"labels": []}},
        {"parameters": {"labels": ["planet"]}},
        {"parameters": {"threshold": -1}},
        {"parameters": {"replacement": 7}},
        {"parameters": {"replacement": {"planet": "[P]"}}},
        {"parameters": {"mask_character": "**"}},
        {"parameters": {"mask_character": "*", "replacement": "x"}},
        {"parameters": {"aggregation_strategy": "none"}},
        {"model": "sentiment"},
    ],
    "/extract": [
        *_SHORT_TASK,
        {"parameters": {}},
        *({"parameters": {"schema": schema}} for schema in _BAD_SCHEMAS),
        {"parameters": {"schema": {"entities": ["a"]}, "threshold": -1}},
        {"model": "sentiment"},
    ],
    "/question-answering": [
        {"inputs": []},
        {"inputs": "Who?"},
        {"inputs": {"question": "Who?"}},
        {"inputs": {"question": "", "context": "a"}},
        {"inputs": [{"question": "Who?", "context": "a"}, {"question": "Who?", "context": ""}]},
        {"inputs": [{"question": "Who?", "context": "a"}, {"question": LONG, "context": "a"}]},
        {"inputs": {"question": LONG, "context": "a"}},
        {"parameters": {"max_question_len": 1, "max_seq_len": 2}},
        {"model": "sentiment"},
        {"timeout": 1e-9},
    ],
    "/embed": _EMBED,
    "/embed-sparse": _EMBED,
    "/embed_sparse": [{"inputs": ["a", ""]}],
    "/embed-all": [
        *(each for each in _SHORT_TASK if "priority" not in each),
        {"prompt_name": "query"},
        {"parameters": {"input_type": "song"}},
    ],
    "/embed_all": [{"inputs": ["a", ""]}],
    "/embed-chunks": [
        {"inputs": " "},
        {"inputs": LONG},
        {"chunks": []},
        {"chunks": [[0, 12], [12]]},
        {"chunks": [[0, 12], [12, 7]]},
        {"chunks": [[0, 12], [12, 400]]},
        {"chunks": [[0, 12], [3, 4]]},
        {"chunks": [[0, 40]] * 4097},
        {"model": "embed"},
        {"timeout": 1e-9},
    ],
    "/embed-hybrid": [
        *_SHORT_TASK,
        {"outputs": ["dense", "song"]},
        {"outputs": ["dense"] * 4},
        {"parameters": {"outputs": []}},
    ],
    "/zero-shot-classify": [
        *_TASK,
        {"parameters": {}},
        {"parameters": {"candidate_labels": []}},
        {"parameters": {"candidate_labels": ["a", ""]}},
        {"parameters": {"candidate_labels": ["a"], "hypothesis_template": "no place"}},
        {"parameters": {"candidate_labels": ["a"] * 1000}},
        {"model": "sentiment"},
    ],
    "/rerank": [
        {"texts": None},
        {"vectors": {"documents": ["AAAA"]}},
        {"texts": None, "vectors": {"documents": ["AAAA"]}},
        *({"texts": None, **each} for each in _DOCUMENTS if "documents" in each),
        {"texts": []},
        {"texts": ["a", ""]},
        {"texts": ["a", LONG]},
        {"texts": ["a"] * 257},
        {"query": ""},
        {"query": LONG},
        {"instruction": "Find it"},
        {"model": "sentiment"},
    ],
    "/similarity": [
        {"inputs": "a"},
        {"inputs": {"source_sentence": "a"}},
        {"inputs": {"source_sentence": "", "sentences": ["a"]}},
        {"inputs": {"source_sentence": "a", "sentences": []}},
        {"inputs": {"source_sentence": "a", "sentences": ["a", ""]}},
        {"inputs": {"source_sentence": "a", "sentences": ["a", LONG]}},
        {"inputs": {"source_sentence": LONG, "sentences": ["a"]}},
        {"inputs": {"source_sentence": "a", "sentences": ["a"] * 257}},
        {"parameters": {"prompt_name": "query"}},
        {"model": "sentiment"},
    ],
    "/score": [
        *_TASK,
        {"inputs": ["a", LONG]},
        {"model": None},
        {"model": "sentiment"},
        {"model": "masked", "inputs": ["a", LONG]},
        {"model": "hybrid", "mask": "full", "inputs": ["a", LONG]},
    ],
    "/generate": [
        *_GENERATE,
        {"timeout": 0.001, "parameters": {"max_new_tokens": 120, "ignore_eos": True}},
    ],
    "/generate_stream": _GENERATE,
    "/summarize": [
        *_TASK,
        {"parameters": {"truncation": "always"}},
        {"parameters": {"generate_parameters": {"n": 2}}},
        {"parameters": {"generate_parameters": {"max_length": 3, "max_new_tokens": 3}}},
        {"parameters": {"generate_parameters": {"min_length": 3, "max_length": 2}}},
        {"parameters": {"generate_parameters": {"max_new_tokens": 2, "min_new_tokens": 3}}},
        {"model": "hybrid"},
    ],
    "/translate": [*_TASK, {"parameters": {"tgt_lang": ""}}, {"model": "hybrid"}],
    "/tokenize": [
        {"inputs": ["a", ""]},
        {"inputs": ["a", 7]},
        {"inputs": LONG * 10},
        {"model": None},
        {"inputs": None, "prompt": 7},
        {"prompt": "a", "messages": CHAT},
        {"messages": CHAT},
    ],
    "/detokenize": [
        {"ids": []},
        {"ids": [[5], [999_999]]},
        {"ids": [[5], ["a"]]},
        {"ids": [-1]},
        {"model": None},
        {"ids": None, "tokens": [5, 999_999]},
        {"ids": None, "tokens": ["a"]},
    ],
    "/v1/completions": [
        *_OPENAI,
        {"prompt": []},
        {"prompt": ""},
        {"prompt": LONG},
        {"prompt": ["a", LONG]},
        {"prompt": ["a", 7]},
        {"prompt": [[5], ["a"]]},
        {"prompt": [5, 999_999]},
        {"prompt": [[5], [999_999]]},
        {"prompt": ["a"] * 257},
        {"max_tokens": 0},
        {"max_tokens": 0, "echo": True, "min_tokens": 1},
        {"max_tokens": 100_000},
        {"max_tokens": 2, "min_tokens": 3},
        {"n": 2, "best_of": 1},
        {"stream": True, "best_of": 2},
        {"stream": True, "echo": True, "logprobs": 1},
    ],
    "/v1/chat/completions": [*_CHAT, *_OPENAI, {"model": "hybrid"}],
    "/models/{name}/v1/chat/completions": [
        {"messages": []},
        {"model": "hybrid"},
        {"max_tokens": 100_000},
    ],
    "/v1/responses": [
        *_SAMPLING,
        {"input": []},
        {"input": LONG},
        {"input": [{"role": "king", "content": "a"}]},
        {"input": [{"type": "item_reference", "id": "a"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"background": True},
        {"truncation": "auto"},
        {"thinking_budget": 1, "reasoning": {"max_tokens": 1}},
        {"text": {"format": {"type": "json_schema"}}},
        {"text": {"format": {"type": "text", "schema": {}}}},
        {"text": {"format": {"type": "json_schema", "schema": {"type": "strange"}}}},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "name": "a b"}]},
        {"tools": [{"type": "function", "name": "find"}], "tool_choice": "auto"},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "lose"}},
        {"max_output_tokens": 100_000},
        {"max_output_tokens": 2, "min_tokens": 3},
        {"model": "hybrid"},
        {"model": "sentiment"},
        {"timeout": 1e-9},
    ],
    "/v1/responses/compact": [
        {"input": []},
        {"input": None},
        {"input": LONG},
        {"input": [{"type": "compaction", "encrypted_content": "maskdial.?"}]},
        {"previous_response_id": "resp_1"},
        {"model": "hybrid"},
    ],
    "/v1/embeddings": [
        {"input": []},
        {"input": ""},
        {"input": ["a", ""]},
        {"input": ["a", 7]},
        {"input": ["a", LONG]},
        {"input": LONG},
        {"input": [5, 999_999]},
        {"input": [[5], [999_999]]},
        {"input": [[2, 5, 3], [5]]},
        {"input": ["a"] * 257},
        {"dimensions": 3},
        {"encoding_format": "hex"},
        {"output_dtype": "int4"},
        {"model": "sentiment"},
        {"model": "hybrid"},
        {"timeout": 1e-9},
    ],
    "/v1/rerank": _DOCUMENTS,
    "/v2/rerank": _DOCUMENTS,
    "/v1/moderations": [
        {"input": []},
        {"input": ""},
        {"input": ["a", 7]},
        {"input": ["a", ""]},
        {"input": ["a", LONG]},
        {"input": ["a"] * 257},
        {"input": [{"type": "image_url"}]},
        {"input": [{"type": "text"}]},
        {"model": "chat"},
        {"timeout": 1e-9},
    ],
    "/pooling": [
        {"input": []},
        {"input": ""},
        {"input": ["a", 7]},
        {"input": [5, 6]},
        {"input": ["a", LONG]},
        {"input": ["a"] * 257},
        {"task": "embed"},
        {"task": "plugin"},
        {"dimensions": 2},
        {"encoding_format": "bytes"},
        {"embed_dtype": "float16"},
        {"messages": CHAT},
        {"model": "embed", "dimensions": 3},
        {"model": "tags", "input": [999_999]},
        {"model": "chat"},
        {"timeout": 1e-9},
    ],
    "/v1/score": [
        {"text_1": None},
        {"text_1": ""},
        {"text_1": LONG},
        {"text_1": ["a", "b", "c"]},
        {"text_2": []},
        {"text_2": ["a", 7]},
        {"text_2": ["a", ""]},
        {"text_2": ["a", LONG]},
        {"text_2": ["a"] * 257},
        {"text_1": ["a", LONG]},
        {"queries": "a"},
        {"text_1": None, "text_2": None, "queries": "a", "data_2": "b"},
        {"text_1": None, "text_2": None, "queries": ["a", "b"], "items": ["a", "b", "c"]},
        {"model": "embed", "text_2": ["a", LONG]},
        {"truncate_prompt_tokens": 7},
        {"use_activation": 1},
        {"model": "sentiment"},
        {"model": "chat"},
        {"timeout": 1e-9},
    ],
    "/v2/embed": [
        {"texts": None},
        {"texts": ["a", ""]},
        {"texts": ["a", 7]},
        {"texts": ["a", LONG], "truncate": "NONE"},
        {"texts": ["a"] * 3000},
        {"inputs": [{"content": []}]},
        {"texts": None, "inputs": [{"content": [{"type": "text", "text": " "}]}]},
        {"texts": None, "inputs": [{"content": [{"type": "image_url"}]}]},
        {"images": ["data:image/png;base64,AA"]},
        {"input_type": "song"},
        {"output_dimension": 3},
        {"max_tokens": 9},
        {"model": "sentiment"},
        {"timeout": 1e-9},
    ],
    "/v1/embed": [{"texts": ["a", ""]}],
    "/v1/messages/batches": [
        {"requests": []},
        {"requests": [{"custom_id": "", "params": CHAT_BODY}]},
        {"requests": [{"custom_id": "a", "params": CHAT_BODY}] * 2},
        {"requests": [{"custom_id": "a", "params": CHAT_BODY | {"stream": True}}]},
        {"requests": [{"custom_id": name, "params": {"model": name}} for name in ("a", "b")]},
        {"requests": [{"custom_id": "a"}]},
    ],
    "/v2/chat": [
        {"messages": []},
        {"messages": [{"role": "king", "content": "a"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
        {"messages": [{"role": "tool", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a", "tool_plan": "b"}]},
        {"messages": [{"role": "user", "content": LONG}]},
        {"tool_choice": "REQUIRED"},
        {"tool_choice": "auto"},
        {"tools": [TOOL]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {
            "tools": [TOOL],
            "tool_choice": "REQUIRED",
            "messages": [{"role": "user", "content": LONG}],
        },
        {"response_format": {"type": "json_object", "json_schema": {"type": "song"}}},
        {"response_format": {"type": "song"}},
        {"documents": ["a"]},
        {"safety_mode": "LOOSE"},
        {"thinking": {"type": "enabled", "token_budget": 0}},
        {"p": 2},
        {"k": -1},
        {"max_tokens": 0},
        {"stop_sequences": ["a"] * 65},
        {"model": "hybrid"},
        {"model": "sentiment"},
        {"timeout": 1e-9},
    ],
    "/v1/decisions": [
        {"input": ""},
        {"input": LONG},
        {"input": [{"type": "image"}]},
        {"questions": []},
        {"questions": [QUESTION, {"type": "song"}]},
        {"questions": [QUESTION, {**QUESTION, "choices": []}]},
        {"questions": [{**QUESTION, "choices": [CHOICES[0]] * 2}]},
        {"questions": [{**QUESTION, "instructions": 7}]},
        {"questions": [{**QUESTION, "instructions": LONG}]},
        {"questions": [{"type": "score", "instructions": "a", "levels": [{"value": 1}]}]},
        {"questions": [QUESTION] * 300},
        {"questions": [{**QUESTION, "choices": [CHOICES[0], {"value": "ANGRY"}]}]},
        {"model": "hybrid", "input": LONG},
        {"model": "masked", "questions": [QUESTION, {**QUESTION, "instructions": LONG}]},
        {"model": "zero-shot", "questions": [QUESTION, {**QUESTION, "instructions": LONG}]},
        {"model": "embed"},
        {"timeout": 1e-9},
    ],
    "/v1/systemone": [
        {"state": 7},
        {"state": LONG},
        {"questions": []},
        {"questions": {}},
        {"questions": {"a": SENTIMENTS, "b": {"type": "song"}}},
        {"questions": {"a": {"type": "choice"}}},
        {"questions": {"a": {"type": "choice", "criteria": {}}}},
        {"questions": {"a": {"type": "choice", "criteria": ["x"]}}},
        {"questions": {"a": {"type": "choice", "criteria": {"x": 7}}}},
        {"questions": {"a": {"type": "score", "criteria": []}}},
        {"questions": {"a": {"type": "score", "criteria": ["x", None]}}},
        {"questions": {"a": {"type": "noul", "criteria": {"maybe": "x"}}}},
        {"questions": {"a": {**SENTIMENTS, "labels": ["A"]}}},
        {"questions": {str(index): SENTIMENTS for index in range(65)}},
        {"questions": {"a": SENTIMENTS, "b c": NOUL}},
        {"assets": {"img-1": {"type": "image", "data_base64": "AAAA"}}},
        {"model": "chat", "state": LONG, "questions": {"a": NOUL}},
        {"model": "embed"},
        {"timeout": 1e-9},
    ],
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/v1/prefill": [
        {"model": "nobody"},
        {"model": "sentiment"},
        {"key": "nobody"},
        {"key": ""},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "x"}]},
    ],
    "/models/load": [
        {"model": "nobody"},
        {"model": "a/../b"},
        {"path": "nowhere"},
        {"path": "../outside"},
        {"keep_alive": "on"},
        {"keep_alive": -1},
        {"base": "hybrid"},
        {"base": ""},
    ],
    "/v1/load_lora_adapter": [
        {"lora_path": "../outside"},
        {"lora_name": "a/../b"},
        {"base_model_name": "nobody"},
        {"base_model_name": ""},
    ],
    "/v1/unload_lora_adapter": [{"lora_name": ""}, {"lora_int_id": 1}],
    "/models/unload": [{"model": "nobody"}, {"model": ""}],
    "/models/{name}": [
        *({"inputs": "a", **each} for each in _GENERATE if "model" not in each),
        {"model": "chat"},
        {"mask": "full", "inputs": "no blank here"},
        {"mask": "full", "inputs": ["a [MASK]", LONG]},
        {"mask": "full", "inputs": "a [MASK]", "parameters": {"top_k": 0}},
    ],
}
"""Changes of the bodies that no document refuses, or not in full."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request: to the path with these changes of its body, or with this content in its place."""

    changes: Mapping[str, object] = field(default_factory=dict)
    content: bytes | None = None

    def __str__(self) -> str:
        if self.content is not None:
            return _short(self.content.decode())
        written = (f"{place}: {_short(json.dumps(value))}" for place, value in self.changes.items())
        return "; ".join(written)

    def body(self, path: str) -> bytes:
        """What is sent; a change to None takes the field away."""
        if self.content is not None:
            return self.content
        body = copy.deepcopy(BODIES[path])
        for place, value in self.changes.items():
            *folders, name = place.split(".")
            inner = body
            for each in folders:
                if not isinstance(inner.get(each), dict):
                    inner[each] = {}
                inner = inner[each]
            if value is None:
                inner.pop(name, None)
            else:
                inner[name] = value
        return json.dumps(body).encode()


def _short(text: str) -> str:
    return text if len(text) <= 150 else f"{text[:80]}... ({len(text):,} characters)"


NO_BODIES = (
    b"",
    b"null",
    b"[]",
    b'"text"',
    b'{"inputs": ',
    b'{"inputs": NaN}',
    b"x" * 300_000,
)


def cases(path: str, document: Mapping[str, Any]) -> list[Case]:
    """All of a path's, by the document of the server's API."""
    found = [Case(content=each) for each in NO_BODIES]
    for schema in _bodies(path, document):
        found += [Case({name: None}) for name in schema.get("required", ())]
        found += [Case({name: value}) for name, value in _broken(schema, document)]
        if "model" in schema["properties"]:
            found.append(Case({"model": "nobody"}))
    if path not in ("/embed-all", "/embed_all"):  # it is ignored, and their models cannot run here
        found.append(Case({"surprise": 1}))
    found += map(Case, MORE.get(path, ()))
    return list({str(case): case for case in found}.values())


def _bodies(path: str, document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if path in COPIES:
        return []
    content = document["paths"][path]["post"].get("requestBody", {}).get("content", {})
    if "application/json" not in content:  # a form, or no body
        return []
    return _branches(content["application/json"]["schema"], document)


def _branches(schema: Mapping[str, Any], document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The forms that a value may have, without references and null."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema:
        return [form for each in schema["anyOf"] for form in _branches(each, document)]
    return [] if schema.get("type") == "null" else [schema]


def _broken(
    schema: Mapping[str, Any], document: Mapping[str, Any], place: str = "", depth: int = 0
) -> Iterator[tuple[str, object]]:
    """Places in an object, and for each some values that it may not have."""
    for name, property_schema in sorted(schema["properties"].items()):
        forms = _branches(property_schema, document)
        for value in _wrong_values(forms):
            yield f"{place}{name}", value
        for form in forms:
            if "properties" in form and depth < 2:
                yield f"{place}{name}.surprise", 1
                yield from _broken(form, document, f"{place}{name}.", depth + 1)


def _wrong_values(forms: list[Mapping[str, Any]]) -> Iterator[object]:
    types = {form.get("type") for form in forms}
    if None in types or not types:  # anything
        return
    if "string" not in types:
        yield "x"
    elif not types & {"integer", "number"}:
        yield 7
    elif "boolean" not in types:
        yield True
    for form in forms if len(forms) == 1 else ():
        if "enum" in form or "const" in form:
            yield "surprise" if form["type"] == "string" else True
        if "minimum" in form:
            yield form["minimum"] - 1
        if "exclusiveMinimum" in form:
            yield form["exclusiveMinimum"]
        if "maximum" in form and form["maximum"] < 1e15:
            yield form["maximum"] + 1
        if form.get("minLength", 0) > 0:
            yield ""
        if form.get("maxLength", 10**6) < 10**4:
            yield "x" * (form["maxLength"] + 1)
        if form.get("minItems", 0) > 0:
            yield []
        if "items" in form and form["items"].get("type") in ("string", "integer"):
            yield [{}]
