"""A program as an agent: it asks a model, if there is one, which shell line solves the task, and runs it.

holdwater run examples/tasks.jsonl --agent command --model MODEL \
    --command "python3 $PWD/examples/command_agent.py {instruction_file} {model}"

It needs nothing but Python: whatever speaks Chat Completions and can be started from a shell is an agent.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

ASK = "Answer with one shell line that solves the task in the current directory, and nothing else.\n\n"


def main(instruction_file: str, model: str) -> int:
    listing = subprocess.run("head -c 2000 *", shell=True, capture_output=True, text=True, check=False).stdout
    line = ask(model, ASK + Path(instruction_file).read_text() + "\n\n" + listing)
    print(f"running: {line}")
    return subprocess.run(line, shell=True, check=False).returncode


def ask(model: str, text: str) -> str:
    """One Chat Completions call: `OPENAI_BASE_URL` is the attempt's own gateway, the key works there only."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        content = json.load(reply)["choices"][0]["message"]["content"]
    return content.strip().strip("`")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
