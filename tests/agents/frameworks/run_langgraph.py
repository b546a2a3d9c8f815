"""LangChain's agents, which run on LangGraph, streamed.

python run_langgraph.py chat|responses|anthropic|ollama URL MODEL TASK
"""

import sys
from typing import Any

from file_tools import edit_file, read_file
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI


def _model(kind: str, url: str, name: str) -> Any:
    if kind == "anthropic":
        return ChatAnthropic(model=name, base_url=url, api_key="none", max_retries=0)
    if kind == "ollama":
        return ChatOllama(model=name, base_url=url)
    return ChatOpenAI(
        model=name,
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        use_responses_api=kind == "responses",
    )


def main(kind: str, url: str, name: str, task: str) -> None:
    tools = [tool(read_file), tool(edit_file)]
    agent = create_agent(_model(kind, url, name), tools, system_prompt="You fix programs.")
    messages = {"messages": [{"role": "user", "content": task}]}
    for _mode, (chunk, _about) in agent.stream(messages, stream_mode=["messages"]):
        print(chunk.text, end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
