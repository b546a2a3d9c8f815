"""smolagents, streamed.

python run_smolagents.py tools|code URL MODEL TASK
"""

import sys

from file_tools import edit_file, read_file
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

_KINDS = {"tools": ToolCallingAgent, "code": CodeAgent}


def main(kind: str, url: str, name: str, task: str) -> None:
    model = OpenAIServerModel(name, api_base=f"{url}/v1", api_key="none")
    tools = [tool(read_file), tool(edit_file)]
    agent = _KINDS[kind](tools=tools, model=model, stream_outputs=True, max_steps=5)
    print(agent.run(task))


if __name__ == "__main__":
    main(*sys.argv[1:])
