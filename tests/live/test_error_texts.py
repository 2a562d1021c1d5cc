"""The errors that users meet, with the input that leads to each: one place to read them all.

A case writes its files (`> FILE LINE`) into an empty directory and types its command (`$`). The text below it is
stderr, with the exit status before it. HERE is that directory, DONE a finished run of the demo, SERVED the directory
of a server. Requests to a server and calls of the library follow the commands.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from tests.command_runner import Command, until
from tests.small_tokenizer import SmallTokenizer

import holdwater as hw
from holdwater import client
from holdwater.core.config import RunConfig, ServingConfig
from holdwater.core.errors import HoldwaterError
from holdwater.run.execute import create_run
from holdwater.trainers.token_rows import require_tokens

KEYS = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")

COMMAND_LINE = """
$ holdwater rnu
2 error: unknown verb: `rnu`
hint: did you mean `holdwater run`?

$ holdwater zzz
2 error: unknown verb: `zzz`
hint: `holdwater --help` lists the verbs

$ holdwater help modles
2 error: unknown topic: `modles`
hint: did you mean `holdwater help models`?

$ holdwater agents --jsno
2 error: unknown option: --jsno
hint: did you mean `--json`? `holdwater agents --help` lists its arguments

$ holdwater agents stray
2 error: unexpected argument: `stray`
hint: `holdwater agents --help` lists its arguments

$ holdwater run
2 error: missing argument: SUITE
hint: `holdwater run --help` lists its arguments

$ holdwater run demo --concurrency many
2 error: invalid value for --concurrency: `many`, expected a whole number or `auto`
hint: `holdwater run --help` lists its arguments

$ holdwater pause DONE
2 error: the run has finished: `DONE`
hint: `holdwater show DONE` shows it; `holdwater resume DONE --retry INSTANCE` tries it again

$ holdwater top HERE
2 error: not a run directory, it has no `run.json`: `HERE`

$ holdwater stop HERE/nothing
2 error: no such directory: `HERE/nothing`

$ holdwater set DONE concurrency
2 error: a setting must look like `concurrency=40`: `concurrency`

$ holdwater search
2 error: missing argument: TEXT
hint: `holdwater search --help` lists its arguments

$ holdwater search "" DONE
2 error: the text to search for is empty

$ holdwater search text HERE
2 error: no run in `HERE`

$ holdwater search text HERE/nothing
2 error: no such directory: `HERE/nothing`
hint: make a run: `holdwater run demo`

$ holdwater cancel DONE
2 error: missing argument: INSTANCE
hint: `holdwater cancel --help` lists its arguments

$ holdwater note SERVED hello
2 error: no process conducts the run, it is unfinished: `SERVED`
hint: the same `holdwater serve` continues it

$ holdwater compare DONE DONE --fail-if-worse much
2 error: invalid value for `--fail-if-worse`: `much`
hint: a share such as `2%` or `0.02`

$ holdwater compare DONE DONE --by nothing
2 error: no instance of `DONE` has the field `nothing` in its data

$ holdwater compare DONE runs/none
2 error: no such directory: `runs/none`

$ holdwater view nowhere
2 error: no such directory: `nowhere`
hint: make a run: `holdwater run demo`

$ holdwater view DONE --listen unix:view.sock
2 error: a browser cannot open a unix socket: `--listen` must be HOST:PORT

$ holdwater view DONE --failed
2 error: `--failed` needs `--export`
hint: for example `--export pages/`

> site/index.html of somebody else
$ holdwater view DONE --export site --force
2 error: the directory is not empty and holds no export: `site`
hint: give another directory

> site/holdwater-export.json of an earlier export
$ holdwater view DONE --export site
2 error: the directory holds an export already: `site`
hint: `--force` replaces it

> site.html x
$ holdwater view DONE --export site.html
2 error: not a directory: `site.html`
hint: only `--instance NAME` writes a file

$ holdwater view DONE --export site --only 'no-*'
2 error: no instance is chosen by `--only` and `--failed`

> notes/notes.txt x
$ holdwater view notes --export site
2 error: no run below `notes`

$ holdwater view DONE --export one.html --instance nobody
2 error: no such instance in the run: `nobody`

$ holdwater view DONE --export one.html --instance nobody --failed
2 error: `--instance` writes one file: leave out `--failed`

> site/x y
$ holdwater view DONE --export site --instance nobody
2 error: a directory: `site`
hint: with `--instance`, `--export` names a file

> notes/notes.txt x
$ holdwater view notes --export one.html --instance nobody
2 error: `--instance` takes one run, and there are 0
hint: name the run's directory

$ holdwater run demo --timeout soon
2 error: invalid value for --timeout: `soon`, expected a number
hint: `holdwater run --help` lists its arguments

$ holdwater run demo --agent
2 error: missing value for --agent
hint: `holdwater run --help` lists its arguments

$ holdwater run demo --agent bahs
2 error: unknown agent: `bahs`; known are ...
hint: did you mean `bash`?

$ holdwater run demo --agent no/such/file.py:solve
2 error: no such file: `HERE/no/such/file.py`

$ holdwater run demo --agent file.py
2 error: missing agent name: `file.py`
hint: name it: `file.py:solve`

> agents.py x = 3
> agents.py def solve(instance): ...
$ holdwater run demo --agent agents.py:slove
2 error: `agents.py` has no `slove`
hint: did you mean `solve`?

$ holdwater run demo --agent nop --agent-option x=1
2 error: agent `nop` has no options: `--agent-option x`

$ holdwater run demo --agent openhands-sdk --agent-option fast
2 error: `--agent-option` must look like `max_iterations=100`: `fast`

$ holdwater run demo --agent openhands-sdk --agent-option max_iteration=9
2 error: unknown option of agent `openhands-sdk`: `max_iteration`
hint: did you mean `max_iterations`?

$ holdwater run demo --agent openhands-sdk --agent-option max_iterations=few
2 error: `--agent-option max_iterations`: expected `int`, got `str`: `few`

$ holdwater run demo --agent openhands-sdk --agent-option system_prompt=gone.txt
2 error: `--agent-option system_prompt`: No such file or directory: `HERE/gone.txt`

$ holdwater run demo --agent openhands-sdk --model x
2 error: agent `openhands-sdk` needs the package `openhands-sdk` beside holdwater
hint: `uv pip install openhands-sdk==1.58.0 openhands-tools==1.58.0` with Python 3.12 or newer; or name an interpreter: `--agent-option python=PATH`

> agents.py x = 3
$ holdwater run demo --agent agents.py:x
2 error: not an agent: `agents.py:x` is of type `int`
hint: it must be a function `(instance, sandbox, model)` or a `holdwater.Agent`

> agents.py def solve(instance): ...
$ holdwater run demo --agent agents.py:solve
2 error: `agents.py:solve` must take three arguments: `(instance, sandbox, model)`
hint: a fourth argument named `attempt` receives the attempt, which can have children

$ holdwater run demo --agent command
2 error: `--agent command` needs `--command`
hint: for example `--command 'mytool {instruction}'`

$ holdwater run demo --agent bash --command ls
2 error: `--command` requires `--agent command`, not `bash`

$ holdwater run demo --command "ls {instrction}"
2 error: unknown placeholder in the agent's command: `{instrction}`
hint: write `{{` and `}}` for literal braces; known placeholders: `{id}`, `{instruction}`, `{instruction_file}`, `{workdir}`, `{model}`, `{model_url}`, `{model_key}`

$ holdwater run demo --command "ls {"
2 error: unmatched brace in the agent's command: `{`
hint: write `{{` and `}}` for literal braces; known placeholders: `{id}`, `{instruction}`, `{instruction_file}`, `{workdir}`, `{model}`, `{model_url}`, `{model_key}`

$ holdwater run demo --command "ls 'x"
2 error: cannot read the agent's command: No closing quotation: `ls 'x`

$ holdwater run demo --command "{instruction}"
2 error: the agent's program cannot be a placeholder: `{instruction}`

$ holdwater run demo --command ""
2 error: the agent's command is empty
hint: for example: --command 'my-agent {instruction}'

$ holdwater run demo --agent no-such-module:solve
2 error: no such module: `no-such-module`
hint: is it installed, or in this directory?

$ holdwater run demo --agent attack:nosuch
2 error: unknown trick: `nosuch`
hint: known tricks: ...

$ holdwater run demo --agent bash --model m
2 error: no server is known for model `m`
hint: set `OPENAI_API_KEY`, or `OPENAI_BASE_URL` for another server

$ holdwater run demo --agent bash --model m --base-url http://user:secret@host/v1
2 error: `--base-url` must not contain credentials: they would be stored in the run's files
hint: put the key into `OPENAI_API_KEY`

$ holdwater run demo --agent bash --model m --base-url http://a/v1 --base-url http://user:secret@b/v1
2 error: `--base-url`, number 2: must not contain credentials: they would be stored in the run's files
hint: put the key into `OPENAI_API_KEY`

$ holdwater run demo --agent bash --model m --base-url http://a/v1 --base-url http://a/v1/
2 error: `--base-url`, number 2: the same URL as before: `http://a/v1`
hint: `weight = 2` gives it twice the calls

> servers.toml [[base-url]]
> servers.toml url = "http://a/v1"
> servers.toml wieght = 2
$ holdwater run demo --agent bash --model m --config servers.toml
2 error: servers.toml: `base-url`: object contains unknown field `wieght` - at `$[0]`

> servers.toml [[base-url]]
> servers.toml url = "http://a/v1"
> servers.toml weight = 0
$ holdwater run demo --agent bash --model m --config servers.toml
2 error: `--base-url` `weight` must be more than 0: 0

> servers.toml [[base-url]]
> servers.toml url = "http://a/v1"
> servers.toml key = "sk-a-key-itself"
$ holdwater run demo --agent bash --model m --config servers.toml
2 error: `--base-url` `key` must be the name of a variable
hint: `export NODE_KEY=...`, then `key = "NODE_KEY"`

> servers.toml [[base-url]]
> servers.toml url = "http://a/v1"
> servers.toml key = "NODE_KEY"
$ holdwater run demo --agent bash --model m --config servers.toml
2 error: the variable is not set: `NODE_KEY`
hint: `export NODE_KEY=...`

> servers.toml [[base-url]]
> servers.toml url = "http://a/v1"
> servers.toml models = ["tiny-*"]
$ holdwater run demo --agent bash --model m --config servers.toml
2 error: no server of `--base-url` serves the model: `m`
hint: add it to the `models` of one

$ holdwater run demo --agent bash --model m --base-url http://a/v1 --model-map small
2 error: `--model-map` must look like `small=qwen3-4b`: `small=`

$ holdwater run demo --agent nop --model-map small=x
2 error: `--model-map` needs `--model`
hint: the model of all other calls

$ holdwater run demo --agent nop --shard 5/4
2 error: `--shard` must be i/n with 1 <= i <= n: 5/4

$ holdwater run demo --agent nop --upstream-dialect french
2 error: `--upstream-dialect` must be one of `auto`, `same`, `chat`, `messages`: `french`

$ holdwater run demo --agent nop --token-ids some
2 error: `--token-ids` must be one of `none`, `auto`, `vllm`, `sglang`, `nemo`: `some`

$ holdwater run demo --agent nop --shard half
2 error: `--shard` must look like `1/4`: `half`

$ holdwater run demo --agent nop --limit 0
2 error: `--limit` must be at least 1: 0

$ holdwater run demo --agent nop --only nothing*
2 error: no instance of suite `demo` matches `--only`: `nothing*`
hint: it has, for example, `backup-names`, `billing-dates`, `build-order`

$ holdwater run demo --agent nop --workers 2 --memory 100MiB
2 error: `--memory` must be at least 192 MiB for a conductor and 2 workers: 100 MiB

$ holdwater run demo --agent nop --workers -1
2 error: `--workers` must be at least 0: -1

$ holdwater run demo --agent nop --memory lots
2 error: invalid size for `--memory`: `lots`
hint: for example `512MiB` or `8GiB`

$ holdwater run demo --agent nop --timeout 0
2 error: `--timeout` must be more than 0: 0

$ holdwater run demo --agent nop --sandbox-memory 0
2 error: `--sandbox-memory` must be more than 0: 0

$ holdwater run demo --agent nop --max-requests 0
2 error: `--max-requests` must be more than 0: 0

$ holdwater run demo --agent nop --network some
2 error: `--network` must be one of `gateway`, `none`, `open`: `some`

$ holdwater run demo --agent nop --keep some
2 error: `--keep` must be one of `all`, `failures`, `none`: `some`

$ holdwater run demo --agent nop --sandbox podman
2 error: `--sandbox` must be one of `process`, `docker`, `remote`: `podman`

$ holdwater run demo --agent nop --sandbox remote
2 error: remote sandboxes need `--sandbox-url`
hint: for example `--sandbox-url https://HOST:8500`

$ holdwater run demo --agent nop --sandbox-url https://there:8500
2 error: the `--sandbox-url` options require remote sandboxes
hint: add `--sandbox remote`

$ holdwater run demo --agent nop --sandbox remote --sandbox-url there:8500
2 error: `--sandbox-url` must be an `http` or `https` URL
hint: the token goes into `--sandbox-token-file`

$ holdwater run demo --agent nop --sandbox remote --sandbox-url http://10.0.0.1:8500
2 error: `--sandbox-url` sends the token unencrypted to another machine: `http://10.0.0.1:8500`
hint: use `https`, or add `--sandbox-plain` on a private network

$ holdwater run demo --agent nop --sandbox remote --sandbox-url https://there:8500 --mount /usr:/opt/usr
2 error: `--mount` does not reach the machine of remote sandboxes
hint: show them on the server: `holdwater sandboxd --mount`

$ holdwater run demo --agent nop --sandbox remote --sandbox-url http://127.0.0.1:1
2 error: remote sandboxes need the token of their server
hint: set `HOLDWATER_SANDBOX_TOKEN`, or give `--sandbox-token-file FILE`

$ holdwater run demo --agent nop --sandbox remote --sandbox-url http://127.0.0.1:1 --sandbox-token-file missing
2 error: cannot read `--sandbox-token-file`: `HERE/missing`: No such file or directory

$ HOLDWATER_SANDBOX_TOKEN=a holdwater run demo --agent nop --sandbox remote --sandbox-url https://127.0.0.1:1 --sandbox-ca missing
4 error: cannot read the certificates of `--sandbox-ca`: `HERE/missing`: [Errno 2] No such file or directory

$ HOLDWATER_SANDBOX_TOKEN=a holdwater run demo --agent nop --sandbox remote --sandbox-url http://127.0.0.1:1
4 error: cannot use the sandbox server: `http://127.0.0.1:1`: it cannot be reached: Connection refused
hint: `holdwater sandboxd` is such a server; see `holdwater help remote`

$ holdwater sandboxd
2 error: a sandbox server needs a token
hint: give `--token-file FILE`

$ holdwater sandboxd --token-file missing
2 error: cannot read `missing`: No such file or directory

> token t
$ holdwater sandboxd --token-file token
2 error: other users can read the keys in `token`: its mode is 0644
hint: `chmod 600 token`

$ holdwater sandboxd --token-file token --sandbox remote
2 error: a sandbox server needs sandboxes of its own machine: `--sandbox remote`

$ holdwater sandboxd --token-file token --builds
2 error: `--builds` requires containers
hint: add `--sandbox docker`

$ holdwater sandboxd --token-file token --client-grace -1
2 error: `--client-grace` must be at least 0: -1

$ holdwater run demo --agent nop --image debian:12
2 error: `--image` requires containers
hint: add `--sandbox docker`

$ holdwater run demo --agent nop --sandbox docker --sandbox-root host
2 error: `--sandbox-root host` requires process sandboxes
hint: mount the needed paths with `--mount`

$ holdwater run demo --agent nop --mount tools
2 error: `--mount` must look like `tools:/opt/tools`: `tools`

$ holdwater run demo --agent nop --mount tools:/opt/tools
2 error: `--mount`: no such file or directory: `tools`

$ holdwater run demo --agent nop --mount /tmp:/proc
2 error: invalid target for `--mount`, reserved in a process sandbox: `/proc`

$ holdwater run demo --agent nop --sampling warm
2 error: `--sampling` must look like `temperature=0.7`: `warm`

$ holdwater run demo --agent nop --pass-env A=B
2 error: invalid name for `--pass-env`: `A=B`

$ holdwater run demo --agent nop --pass-env OPENAI_API_KEY
2 error: invalid name for `--pass-env`: `OPENAI_API_KEY`
hint: keys of model providers never enter a sandbox

$ holdwater run demo --agent nop --env A.B=secret
2 error: invalid name for `--env`: `A.B`
hint: for example `--env NAME` or `NAME=VALUE`

$ holdwater run demo --agent nop --env PATH=/opt/bin
2 error: invalid name for `--env`: `PATH`
hint: each sandbox sets it: `--mount tools:/opt/tools` puts `/opt/tools/bin` on it

$ holdwater run demo --agent nop --env ANTHROPIC_API_KEY
2 error: invalid name for `--env`: `ANTHROPIC_API_KEY`
hint: keys of model providers never enter a sandbox: the agent has a key of its own

$ holdwater run demo --agent nop --env OPENAI_BASE_URL=http://127.0.0.1:1/v1
2 error: invalid name for `--env`: `OPENAI_BASE_URL`
hint: the agent gets the gateway's URL; `--base-url` sets the model's server

$ holdwater run demo --agent nop --env HOLDWATER_RUN=1
2 error: invalid name for `--env`: `HOLDWATER_RUN`
hint: names that begin with `HOLDWATER_` belong to holdwater

$ holdwater run demo --agent nop --env SEARCH_TOKEN
2 error: `--env SEARCH_TOKEN`: the variable is not set
hint: set it, or give its value: `--env SEARCH_TOKEN=VALUE`; a run keeps no values

$ holdwater run demo --agent nop --select ids.txt
2 error: cannot read `ids.txt`: No such file or directory

> ids.txt # none yet
$ holdwater run demo --agent nop --select ids.txt
2 error: no instance id in `ids.txt`
hint: write one id per line

> ids.txt # mine
> ids.txt cli-flags
> ids.txt cli-flogs
> ids.txt backup
$ holdwater run demo --agent nop --select ids.txt
2 error: ids.txt:3: no such instance in suite `demo`: `cli-flogs`, and others

> ids.txt cli-flags
$ holdwater run demo --agent nop --select ids.txt --only b*
2 error: no instance of suite `demo` matches `--only` and is in `--select`: `b*`
hint: it has, for example, `cli-flags`

$ holdwater run demo --agent nop --critic nosuch
2 error: unknown critic: `nosuch`; known are ...
hint: use one of these or `command:LINE`, `path.py:name` or `module:name`

$ holdwater run demo --agent nop --critic command:
2 error: the critic's command is empty
hint: for example `--critic 'command:make test'`

$ holdwater run demo --agent nop --prices prices.toml
2 error: cannot read `prices.toml`: No such file or directory

> prices.toml gpt = {inputs = 1}
$ holdwater run demo --agent nop --prices prices.toml
2 error: prices.toml: `gpt`: unknown field: `inputs`
hint: for example `["gpt-5*"]` with `input = 1.25`, `cached = 0.125` and `output = 10.0`

$ holdwater run demo --agent bash --model m --base-url http://127.0.0.1:1/v1 --run-cost 5
2 error: a cost limit needs the model's price, which is unknown: `m`
hint: give it with `--prices FILE.toml`

$ holdwater run demo --agent nop --judge-base-url http://user:secret@host/v1
2 error: `--judge-base-url` must not contain credentials: they would be stored in the run's files
hint: put the key into `JUDGE_API_KEY`

$ holdwater run demo --agent nop --judge-base-url http://127.0.0.1:1/v1 --run-cost 5
2 error: `--run-cost` needs the price of the judges' model
hint: name it: `--judge-model`

$ holdwater run nosuch
2 error: unknown suite: `nosuch`; known are ...
hint: use one of these or `path.py:name`, `module:name`, `file.jsonl`, `swebench:FILE`, `swt:FILE`, `vf:MODULE`, `openhands:module:Class` or a directory of Harbor tasks

$ holdwater run dem
2 error: unknown suite: `dem`; known are ...
hint: did you mean `demo`?

$ holdwater run openhands:nosuch.infer:Evaluation --model m
2 error: no such module: `nosuch.infer`
hint: is it installed, or in this directory?

$ holdwater run 'openhands:nosuch.infer:Evaluation?prepare=maybe' --model m
2 error: invalid option `prepare` of `openhands:nosuch.infer:Evaluation`: `maybe`
hint: `yes` or `no`

$ holdwater run 'openhands:nosuch.infer:Evaluation?max_retries=3' --model m
2 error: not an option of `openhands:nosuch.infer:Evaluation`: `max_retries`
hint: `--out`, `--attempts` and `--retries` set them

> numbers.py evaluation = 1
$ holdwater run openhands:numbers.py:evaluation --model m
2 error: not an evaluation: `numbers.py:evaluation` is of type `int`
hint: it must be a subclass of `Evaluation` of OpenHands' benchmarks

$ holdwater run suite.py
2 error: missing suite name: `suite.py`
hint: name it: `suite.py:suite`

$ holdwater run suite.py:suite
2 error: no such file: `HERE/suite.py`

$ holdwater run vf:
2 error: missing module: `vf:`
hint: for example `vf:gsm8k` or `vf:./my_env/taskset.py`

$ holdwater run "vf:gsm8k?pass=much"
2 error: `vf:gsm8k?pass=much`: option `pass` must be a number: `much`

$ holdwater run vf:gsm8k --agent nop
2 error: the package `verifiers` is not installed
hint: `pip install verifiers`, beside holdwater

$ holdwater grade predictions.jsonl --suite demo
2 error: suite `demo` takes no patches
hint: for example `--suite swebench:rows.jsonl`

$ holdwater check demo --agent bash
2 error: `holdwater check` takes no agent: it runs its own agents

$ holdwater init suite "my suite"
2 error: invalid name: `my suite`
hint: letters, digits, `-` and `_`, at most 64

$ holdwater init suite class
2 error: reserved name: `class`
hint: choose another

> mine/mine.py x
$ holdwater init suite mine
2 error: `mine/mine.py` already exists
hint: choose another name, or another `--dir`

$ holdwater images biuld x
2 error: unknown command: `biuld`
hint: did you mean `build`? `holdwater images --help` lists its arguments
"""

CONFIGURATION_FILE = """
$ holdwater run demo --config settings.toml
2 error: cannot read `settings.toml`: No such file or directory

> settings.toml concurency = 3
$ holdwater run demo --config settings.toml
2 error: settings.toml: unknown setting: `concurency`
hint: did you mean `concurrency`?

> settings.toml workers = "three"
$ holdwater run demo --config settings.toml
2 error: settings.toml: `workers`: expected `int`, got `str`

> settings.toml concurrency = "three"
$ holdwater run demo --config settings.toml
2 error: settings.toml: `concurrency`: invalid value: 'three'
hint: a whole number or `auto`

> settings.toml only = 3
$ holdwater run demo --config settings.toml
2 error: settings.toml: `only`: expected `array`, got `int`

> settings.toml concurrency =
$ holdwater run demo --config settings.toml
2 error: settings.toml: not TOML: Invalid value (at line 1, column 14)

> settings.toml memory = "lots"
$ holdwater run demo --agent nop --config settings.toml
2 error: invalid size for `--memory`: `lots`
hint: for example `512MiB` or `8GiB`

> settings.toml network = "some"
$ holdwater run demo --agent nop --config settings.toml
2 error: `--network` must be one of `gateway`, `none`, `open`: `some`

> settings.toml lissten = "127.0.0.1:0"
$ holdwater serve demo --config settings.toml
2 error: settings.toml: unknown setting: `lissten`
hint: did you mean `listen`?
"""

JSONL_SUITE = """
$ holdwater run tasks.jsonl --agent nop
2 error: no such file: `HERE/tasks.jsonl`

> tasks.jsonl
$ holdwater run tasks.jsonl --agent nop
2 error: suite `tasks` has no instances

> tasks.jsonl {"id": "a", "grade": "true"}
> tasks.jsonl {"id": "b", "grade":
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:2: not valid JSON: Input data was truncated

> tasks.jsonl ["a"]
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: expected object, got array

> tasks.jsonl {"grade": "true"}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `id`: missing

> tasks.jsonl {"id": "a"}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `grade`: missing

> tasks.jsonl {"id": "a", "grade": 1}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `grade`: expected str, got int

> tasks.jsonl {"id": "a", "grade": ""}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `grade`: expected str of length >= 1

> tasks.jsonl {"id": "a", "grade": "true", "instrction": "x"}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `instrction`: unknown
hint: did you mean `instruction`?

> tasks.jsonl {"id": "a", "grade": "true", "files": {"../x": ""}}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `files`: path leaves the working directory: '../x'

> tasks.jsonl {"id": "a", "grade": "true", "directory": "none"}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `directory`: no such directory: `HERE/none`

> tasks.jsonl {"id": "a", "grade": "true", "directory": ".."}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `directory`: leads out of the suite's own directory: `..`

> tasks.jsonl {"id": "a", "grade": "true", "limits": {"memory": "lots"}}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `limits.memory`: expected bytes or a size like `512MiB`, got `lots`

> tasks.jsonl {"id": "a", "grade": "true", "limits": {"acting": 0}}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: field `limits.acting`: expected float > 0.0

> tasks.jsonl {"id": "a\\nb", "grade": "true"}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: `id` has unprintable characters: 'a\\nb'

> tasks.jsonl {"id": "", "grade": "true"}
$ holdwater run tasks.jsonl --agent nop
2 error: tasks.jsonl:1: `id` is empty

> tasks.jsonl {"id": "a", "grade": "true"}
> tasks.jsonl {"id": "a", "grade": "true"}
$ holdwater run tasks.jsonl --agent nop
2 error: duplicate id `a`: tasks.jsonl:1 and tasks.jsonl:2

> tasks.jsonl {"id": "a", "grade": "true"}
$ holdwater run tasks.jsonl
2 error: no agent given, and suite `tasks` suggests none
hint: for example `--agent bash`
"""

SUITE_IN_PYTHON = """
> suite.py import holdwater as hw
> suite.py suite = hw.Suite(name="pairs", instances=list, group=lambda instance, members: None)
$ holdwater run suite.py:suite --agent nop --samples 3 --concurrency 2
2 error: suite `pairs` scores the samples of an instance together, and 3 of them do not fit 2 slots
hint: they run at once: `--concurrency 3`, or fewer `--samples`

> suite.py import holdwater as hw
> suite.py suite = hw.Suite(name="pairs", instances=list, group=lambda instance, members: None)
$ holdwater run suite.py:suite --agent nop --samples 3 --attempts 2
2 error: suite `pairs` scores the samples of an instance together, so that each has one round: `--attempts 2`
hint: leave `--attempts` out; `--retries` still repeats attempts that failed by no fault of the agent

> suite.py raise RuntimeError("at import")
$ holdwater run suite.py:suite --agent nop
2 error: cannot load `HERE/suite.py`: HERE/suite.py:1: RuntimeError: at import

> suite.py def instances(:
$ holdwater run suite.py:suite --agent nop
2 error: cannot load `HERE/suite.py`: HERE/suite.py:1: SyntaxError: invalid syntax

> suite.py suite = 3
$ holdwater run suite.py:suite --agent nop
2 error: not a suite: `suite.py:suite` is of type `int`
hint: it must be a `holdwater.Suite`, or return one

> suite.py siute = 3
$ holdwater run suite.py:suite --agent nop
2 error: `suite.py` has no `suite`
hint: did you mean `siute`?

> suite.py import holdwater as hw
> suite.py suite = hw.Suite(name="", instances=lambda: [], grade=lambda *_: True)
$ holdwater run suite.py:suite --agent nop
2 error: `suite.py:suite`: `name` must be a non-empty string

> suite.py import holdwater as hw
> suite.py suite = hw.Suite(name="s", instances=3, grade=lambda *_: True)
$ holdwater run suite.py:suite --agent nop
2 error: `suite.py:suite`: `instances` must be a function, not int
hint: give the function itself, without calling it: `instances=instances`
"""

HARBOR_TASK = """
$ holdwater run harbor:tasks --agent nop
2 error: no such directory: `HERE/tasks`

> tasks/README nothing
$ holdwater run harbor:tasks --agent nop
2 error: no `task.toml` in or below `HERE/tasks`
hint: a Harbor task is a directory with that file

> tasks/one/task.toml version = "1.0"
$ holdwater run harbor:tasks?keeps=x --agent nop
2 error: invalid option of a Harbor suite: `tasks?keeps=x`
hint: `harbor:PATH?keep-processes=PATTERN,...`

> tasks/one/task.toml version = "1.0"
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: no such file beside it: `instruction.md`

> tasks/one/task.toml [environment
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: not valid TOML: Expected ']' at the end of a table declaration (at line 1, column 13)

> tasks/one/task.toml [environment]
> tasks/one/task.toml cpus = "two"
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `environment.cpus`: expected float, got str

> tasks/one/task.toml [environment]
> tasks/one/task.toml memory = "lots"
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `environment.memory`: expected a size like `2G`, got `lots`

> tasks/one/task.toml [environment]
> tasks/one/task.toml memory = "2G"
> tasks/one/task.toml memory_mb = 1024
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `environment.memory`: `2G` contradicts `memory_mb`: 1024

> tasks/one/task.toml [environment]
> tasks/one/task.toml network_mode = "some"
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `environment.network_mode`: invalid enum value 'some'

> tasks/one/task.toml [environment]
> tasks/one/task.toml allowed_hosts = ["a.b"]
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `environment.allowed_hosts`: requires `network_mode = "allowlist"`

> tasks/one/task.toml [environment.healthcheck]
> tasks/one/task.toml retries = 2
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `environment.healthcheck.command`: missing

> tasks/one/task.toml [agent]
> tasks/one/task.toml timeout_sec = -1.0
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `agent.timeout_sec`: expected float > 0.0

> tasks/one/task.toml artifacts = ["/a/../b"]
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `artifacts.0.source`: must not contain `..`: `/a/../b`

> tasks/one/task.toml artifacts = [{ source = "/a", destination = "/b" }]
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `artifacts.0.destination`: expected a relative path, got `/b`

> tasks/one/task.toml [task]
> tasks/one/task.toml name = "nameless"
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `task.name`: expected str matching regex '^[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*$'

> tasks/one/task.toml [[steps]]
> tasks/one/task.toml name = "a/b"
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `steps.0.name`: not a valid directory name: 'a/b'

> tasks/one/task.toml [verifier]
> tasks/one/task.toml environment_mode = "shared"
> tasks/one/task.toml [verifier.environment]
$ holdwater run harbor:tasks --agent nop
2 error: tasks/one/task.toml: field `verifier.environment_mode`: `shared`, although there is a `verifier.environment`

> tasks/a/task.toml task.name = "org/same"
> tasks/a/instruction.md Do it.
> tasks/a/tests/test.sh true
> tasks/b/task.toml task.name = "org/same"
> tasks/b/instruction.md Do it.
> tasks/b/tests/test.sh true
$ holdwater run harbor:tasks --agent nop
2 error: duplicate id `org/same`: tasks/a/task.toml and tasks/b/task.toml
"""

SWE_BENCH = """
$ HF_HUB_OFFLINE=1 HF_HOME=HERE holdwater run swebench:acme/bench --agent nop
2 error: cannot load the dataset `acme/bench (test)`: ConnectionError: Couldn't reach 'acme/bench' on the Hub (OfflineModeIsEnabled)
hint: its cache is `HERE/datasets` (`HF_HOME` names another one); a file needs neither: `swebench:rows.parquet`

> rows.jsonl {}
$ holdwater run swebench:rows.jsonl?split=dev --agent nop
2 error: invalid option in `swebench:rows.jsonl?split=dev`: `split` is an option of a dataset by name
hint: for example `swebench:princeton-nlp/SWE-bench_Verified?split=test`

$ holdwater run swebench:rows.jsonl --agent nop
2 error: no such file: `rows.jsonl`

> rows.txt x
$ holdwater run swebench:rows.txt --agent nop
2 error: not a file of rows: `rows.txt`
hint: supported formats: `.jsonl`, `.json` and `.parquet`

> rows.jsonl {"instance_id": "a"}
$ holdwater run swebench:rows.jsonl --agent nop
2 error: rows.jsonl:1: field `repo`: missing

> rows.jsonl {"instance_id": 3}
$ holdwater run swebench:rows.jsonl --agent nop
2 error: rows.jsonl:1: field `instance_id`: expected str, got int

> rows.json {}
$ holdwater run swebench:rows.json --agent nop
2 error: rows.json: expected array, got object
hint: expected a list of rows

> rows.jsonl {}
$ holdwater run swebench:rows.jsonl?tempalte=x --agent nop
2 error: invalid option in `swebench:rows.jsonl?tempalte=x`: unknown option: `tempalte`
hint: known options: `template`, `namespace`, `image`, `workdir`, `repos`, `assets`, `timeout`, `network`, `split`, `subset`

> rows.jsonl {}
$ holdwater run swebench:rows.jsonl?timeout=soon --agent nop
2 error: invalid option in `swebench:rows.jsonl?timeout=soon`: `timeout`: expected `float`, got `str`
hint: known options: `template`, `namespace`, `image`, `workdir`, `repos`, `assets`, `timeout`, `network`, `split`, `subset`

> rows.jsonl {}
$ holdwater run swebench:rows.jsonl?nothing --agent nop
2 error: invalid options: `?nothing`
hint: options look like `?template=prompt.j2&timeout=3600`

> rows.jsonl {}
$ holdwater run swebench:rows.jsonl?workdir=here --agent nop
2 error: invalid option in `swebench:rows.jsonl?workdir=here`: `workdir` must be an absolute path: `here`

> rows.jsonl {}
$ holdwater run swebench:rows.jsonl?template=none.j2 --agent nop
2 error: cannot read `none.j2`: No such file or directory

> predictions.jsonl {"instance_id": "b"}
> rows.jsonl {}
$ holdwater grade predictions.jsonl --suite swebench:rows.jsonl
2 error: rows.jsonl:1: field `instance_id`: missing

$ holdwater grade predictions.jsonl --suite swebench:rows.jsonl
2 error: no such file: `rows.jsonl`

> tasks.jsonl {"id": "a", "grade": "true"}
> predictions.jsonl {"instance_id": "b", "model_patch": ""}
$ holdwater run tasks.jsonl --agent predictions:none.jsonl
2 error: no such file: `none.jsonl`

> tasks.jsonl {"id": "a", "grade": "true"}
> predictions.txt x
$ holdwater run tasks.jsonl --agent predictions:predictions.txt
2 error: not a file of predictions: `predictions.txt`
hint: supported formats: `.jsonl` and `.json`
"""

IMAGE_RECIPE = """
$ holdwater images plan images.toml
2 error: cannot read `images.toml`: No such file or directory
hint: `holdwater images plan --help` shows an example

> images.toml nonsense
$ holdwater images plan images.toml
2 error: images.toml: not TOML: Expected '=' after a key in a key/value pair (at line 1, column 9)

> images.toml [bases]
> images.toml images = ["a"]
$ holdwater images plan images.toml
2 error: images.toml: `target`: missing

> images.toml [bases]
> images.toml images = []
> images.toml [target]
> images.toml repository = "r/a"
$ holdwater images plan images.toml
2 error: images.toml:1: `bases`: needs one of `images`, `file` and `suite`

> images.toml [bases]
> images.toml images = ["a", "a"]
> images.toml [target]
> images.toml repository = "r/a"
$ holdwater images plan images.toml
2 error: images.toml: `bases.images[1]`: duplicate base: `a`

> images.toml [bases]
> images.toml file = "none.txt"
> images.toml [target]
> images.toml repository = "r/a"
$ holdwater images plan images.toml
2 error: images.toml:2: `bases.file`: cannot read `none.txt`: No such file or directory

> bases.txt debian:12
> bases.txt a b c
> images.toml [bases]
> images.toml file = "bases.txt"
> images.toml [target]
> images.toml repository = "r/a"
$ holdwater images plan images.toml
2 error: bases.txt:2: expected at most a name and a reference: `a b c`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/{name}"
$ holdwater images plan images.toml
2 error: images.toml: `target.repository`: unknown field: `{name}`; known fields: `{id}`, `{swebench_id}`, `{data.KEY}`, `{git.sha}`, `{git.short}`

> images.toml bases.images = ["a"]
> images.toml target.repository = "${NO_SUCH_HOST}/a"
$ holdwater images plan images.toml
2 error: images.toml: `target.repository`: the variable `NO_SUCH_HOST` is not set
hint: set it, or give a default: `${NO_SUCH_HOST:-default}`

> images.toml [bases]
> images.toml images = ["a", "b"]
> images.toml [target]
> images.toml repository = "r/${A?x}"
$ holdwater images plan images.toml
2 error: images.toml:4: `target.repository`: not a variable: `${A?x}`
hint: `${NAME}` or `${NAME:-default}`; `$${` stands for `${`

> images.toml [bases]
> images.toml images = ["a", "b"]
> images.toml [target]
> images.toml repository = "r/a"
> images.toml alias = "latest"
$ holdwater images plan images.toml
2 error: images.toml:5: `target.alias`: every image would get this tag: `latest`
hint: add `{id}` to it

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml prefx = "/opt"
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.prefx`: no such field

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml directory = "none"
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.directory`: no such directory: `HERE/none`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml prefix = "opt"
> images.toml image = "a:/x"
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.prefix`: must be absolute: `opt`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml package = "x"
> images.toml image = "a:/x"
$ holdwater images plan images.toml
2 error: images.toml:5: `agent.image`: only one of `source`, `package`, `directory`, `image`, `dockerfile` may be set

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml package = "x"
> images.toml python = "py312"
$ holdwater images plan images.toml
2 error: images.toml:5: `agent.python`: invalid version: `py312`
hint: for example `3.12`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml image = "a:/x"
> images.toml python = "3.12"
$ holdwater images plan images.toml
2 error: images.toml:5: `agent.python`: needs `source` or `package`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml image = "a:1"
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.image`: must be a reference and an absolute path: `a:1`
hint: for example `ghcr.io/o/tools:1:/opt/tools`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml dockerfile = "Dockerfile"
> images.toml path = "/a"
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.dockerfile`: cannot read `HERE/Dockerfile`: No such file or directory

> Dockerfile FROM a AS builder
> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml dockerfile = "Dockerfile"
> images.toml target = "bilder"
$ holdwater images plan images.toml
2 error: images.toml:5: `agent.target`: `HERE/Dockerfile`: no such stage: `bilder`; the stages are `builder`

> Dockerfile FROM a AS builder
> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml dockerfile = "Dockerfile"
> images.toml args = {MODE = "x"}
$ holdwater images plan images.toml
2 error: images.toml:5: `agent.args`: `HERE/Dockerfile`: no `ARG` declares this argument: `MODE`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml source = "p"
> p/pyproject.toml [project]
> p/pyproject.toml name = "p"
> p/poetry.lock x
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.source`: this lock cannot be honoured: `HERE/p/poetry.lock`
hint: only `uv.lock` is understood: give that, or `directory` with the agent installed

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml source = "p"
> p/pyproject.toml [project]
> p/pyproject.toml name = "p"
> p/uv.lock version = 1
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.source`: `HERE/p/pyproject.toml`: `build-system`: missing, so uv would leave out the project itself
hint: add it, or set `package = true` in `tool.uv`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml source = "p"
> p/pyproject.toml [tool.uv.sources]
> p/pyproject.toml lib = {path = "../lib"}
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.source`: `HERE/p/pyproject.toml`: `tool.uv.sources.lib`: no such file or directory: `../lib`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml source = "p"
> p/pyproject.toml [tool.uv.sources]
> p/pyproject.toml lib = {path = "/lib"}
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.source`: `HERE/p/pyproject.toml`: `tool.uv.sources.lib`: an absolute path cannot be copied with the project: `/lib`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml source = "p"
> p/pyproject.toml [tool.uv.sources]
> p/pyproject.toml lib = "x"
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.source`: `HERE/p/pyproject.toml`: `tool.uv.sources[...]`: expected `object | array`, got `str`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [agent]
> images.toml source = "p"
> p/pyproject.toml [tool.uv.sources]
> p/pyproject.toml lib = {path = "lib"}
> p/.gitmodules [submodule "lib"]
> p/.gitmodules path = lib
$ holdwater images plan images.toml
2 error: images.toml:4: `agent.source`: `HERE/p/.gitmodules`: the submodule is not checked out: `lib`
hint: `git -C HERE/p submodule update --init --recursive`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [build]
> images.toml disk = "much"
$ holdwater images plan images.toml
2 error: images.toml:4: `build.disk`: invalid size: `much`
hint: for example `80GiB`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [build]
> images.toml concurrency = 0
$ holdwater images plan images.toml
2 error: images.toml:4: `build.concurrency`: must be from 1 to 1000: 0

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [build]
> images.toml engine = "podman"
$ holdwater images plan images.toml
2 error: images.toml:4: `build.engine`: invalid enum value 'podman'
hint: one of `auto`, `registry`, `docker`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [build]
> images.toml platform = "amd64"
$ holdwater images plan images.toml
2 error: images.toml:4: `build.platform`: must look like `linux/amd64`: `amd64`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [build]
> images.toml before = ["FROM x"]
$ holdwater images plan images.toml
2 error: images.toml:4: `build.before`: not a Dockerfile instruction that is allowed here: `FROM x`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml [build]
> images.toml engine = "registry"
> images.toml before = ["RUN x"]
$ holdwater images plan images.toml
2 error: images.toml:4: `build.engine`: the registry engine cannot run `before` and `after`
hint: use `docker`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml target.bases = "r/b"
$ holdwater images plan images.toml
2 error: images.toml: `target.bases`: needs `build.before`, which is run on the bases

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
$ holdwater images build images.toml --force bases
2 error: `--force bases` requires `target.bases` in the recipe

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
$ holdwater images build images.toml --force layers
2 error: `--force` must be one of `all`, `bases`, `agent`: `layers`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
$ HOLDWATER_CACHE_SIZE=much holdwater images plan images.toml
2 error: invalid size for `HOLDWATER_CACHE_SIZE`: `much`
hint: for example `512MiB` or `8GiB`

> images.toml bases.images = ["a"]
> images.toml target.repository = "r/a"
> images.toml build.before = ["RUN x"]
$ holdwater images plan images.toml --engine registry
2 error: `--engine registry` cannot carry out the recipe's `before` and `after`
"""

DOCKER_AND_REGISTRY = """
$ DOCKER_HOST=unix://HERE/none.sock holdwater run demo --agent nop --sandbox docker --image debian:12
4 error: the docker daemon does not answer: `unix://HERE/none.sock`: No such file or directory
hint: is it running, and may this user reach it? `DOCKER_HOST` names another daemon

$ DOCKER_HOST=tcp://127.0.0.1:1 holdwater run demo --agent nop --sandbox docker --image debian:12
4 error: the docker daemon does not answer: `tcp://127.0.0.1:1`: Connect call failed ('127.0.0.1', 1)
hint: is it running, and may this user reach it? `DOCKER_HOST` names another daemon

$ DOCKER_HOST=ssh://somewhere holdwater run demo --agent nop --sandbox docker --image debian:12
4 error: invalid address of a docker daemon: `ssh://somewhere`
hint: use `unix:///path` or `tcp://host:port`; `DOCKER_HOST` names another daemon
"""

DIRECTORIES = """
$ holdwater show
2 error: no run in `HERE/runs`
hint: name a run's directory, or make a run: `holdwater run demo`

$ holdwater show latest
2 error: no run in `HERE/runs`
hint: name a run's directory, or make a run: `holdwater run demo`

$ holdwater show no/such/run
2 error: no such directory: `no/such/run`

> place/notes.txt x
$ holdwater show place
2 error: not a run directory, it has no `run.json`: `place`

> place/notes.txt x
$ holdwater resume place
2 error: not a run directory, it has no `run.json`: `place`

$ holdwater resume no/such/run
2 error: no such directory: `no/such/run`

> place/run.json {}
$ holdwater resume place
2 error: `place/run.json` is not a run's configuration: Object missing required field `id`

> place/run.json {
$ holdwater resume place
2 error: `place/run.json` is not a run's configuration: Input data was truncated

> place/run.json x
$ holdwater run demo --agent nop --out place
2 error: the directory holds a run already: `place`
hint: `holdwater resume place` continues it

> place/notes.txt x
$ holdwater run demo --agent nop --out place
2 error: the directory is not empty and holds no run: `place`
hint: give another `--out`

> place x
$ holdwater run demo --agent nop --out place
2 error: not a directory: `place`

$ holdwater run demo --agent nop --out /proc/x
2 error: cannot make the run's directory: `/proc/x`: No such file or directory
hint: choose a writable directory with `--out`

$ holdwater run demo --agent nop --out DONE
2 error: the directory holds a run already: `DONE`
hint: `holdwater resume DONE` continues it

$ holdwater resume DONE --retry nosuch
2 error: no instance of the run matches `--retry`: `nosuch`
hint: it takes `failed`, `infrastructure`, `poison`, `all`, or a pattern over instance ids

$ holdwater resume DONE --workers -3
2 error: `--workers` must be at least 0: -3

$ holdwater show DONE nosuch
2 error: no such instance in the run: `nosuch`
hint: the run has, for example, `backup-names`

$ holdwater transcript DONE nosuch
2 error: no such instance in the run: `nosuch`
hint: the run has, for example, `backup-names`

$ holdwater fork DONE backup-names
2 error: missing value for `--turn`
hint: `holdwater transcript` shows the turns

$ holdwater fork DONE backup-names --turn 3
2 error: the attempt has no turn 3

$ holdwater fork DONE backup-names --turn=-1
2 error: `--turn` must be at least 0: -1

$ holdwater fork DONE backup-names --turn 0 --say x
2 error: turn 0 has no reply
hint: `--say` and `--then-say` need `--turn` of at least 1

$ holdwater fork DONE backup-names --turn 1 --say x --then-say y
2 error: `--say` and `--then-say` exclude each other
hint: `--say` replaces the whole reply

$ holdwater fork DONE backup-names --bisect --turn 1
2 error: `--bisect` chooses the turns itself
hint: leave out `--turn`

$ holdwater fork DONE backup-names --bisect --say x
2 error: a search changes no reply
hint: leave out `--say` and `--then-say`

$ holdwater fork DONE backup-names --bisect
2 error: the attempt has no turn to fork from: `backup-names`

$ holdwater fork SERVED backup-names --turn 1
2 error: `SERVED` cannot be forked: it is a rollout server

$ holdwater transcript DONE backup-names --attempt 9
2 error: no attempt 9 at sample 0 of `backup-names`
hint: `holdwater show` lists them

$ holdwater transcript DONE backup-names --sample 3
2 error: no attempt at sample 3 of `backup-names`
hint: `holdwater show` lists them

$ holdwater audit no/such/run
2 error: no such directory: `no/such/run`

> place/run.json {}
$ holdwater audit place
2 error: `place/run.json` is not a run's configuration: Object missing required field `id`

$ holdwater regrade no/such/run
2 error: no such directory: `no/such/run`

$ holdwater regrade DONE --only nosuch
2 error: no instance with an outcome matches `--only`: `nosuch`
hint: `holdwater show` lists them

$ holdwater replay no/such/run
2 error: no such directory: `no/such/run`

$ holdwater export no/such/run
2 error: no such directory: `no/such/run`

$ holdwater export DONE --format xml
2 error: invalid value for --format: `xml`, expected one of ...
hint: `holdwater export --help` lists its arguments

$ holdwater export DONE --format csv --what exchanges
2 error: exchanges cannot be written as `csv`
hint: use `--format jsonl`

$ holdwater export DONE --format harbor
2 error: `--format harbor` needs `--out`
hint: for example `--out exported/`

$ holdwater export DONE --json
2 error: `--json` needs `--out`
hint: for example `--out exported/`

$ holdwater export DONE --all
2 error: `--all` requires `--format openai-jsonl`; other formats include everything

$ holdwater export DONE --out no/such/place/file
2 error: cannot write `HERE/no/such/place/file`: No such file or directory

$ holdwater prune no/such/run --remove
2 error: no such directory: `no/such/run`

> place/notes.txt x
$ holdwater prune place --remove
2 error: neither a run nor a folder of runs: `place`

$ holdwater prune DONE
2 error: nothing to do
hint: use `--keep failures`, `--compress` or `--remove`

$ holdwater prune DONE --remove --compress
2 error: `--remove` leaves nothing to keep or to compress
hint: use one or the other

$ holdwater prune DONE --older-than week --remove
2 error: invalid time for `--older-than`: `week`
hint: for example `7d` or `12h`

$ holdwater images show DONE
2 error: the run is not an image build: `DONE`

$ holdwater serve demo --agent nop --out DONE
2 error: the directory contains a run that is not a server: `DONE`
hint: give another `--out`; `holdwater resume DONE` continues that run

$ holdwater resume SERVED
2 error: the directory belongs to a server: `SERVED`
hint: `holdwater serve demo --agent nop --out SERVED` continues it

$ holdwater serve demo --agent oracle --out SERVED
2 error: the directory belongs to a server with agent `nop`, not `oracle`: `SERVED`
hint: give another `--out`
"""

SERVER = """
$ holdwater serve demo --only a*
2 error: unknown option: --only
hint: did you mean `--policy`? `holdwater serve --help` lists its arguments

$ holdwater serve demo --agent nop --listen somewhere
2 error: `--listen` must look like `127.0.0.1:8400` or `unix:/run/holdwater.sock`: `somewhere`

$ holdwater serve demo --agent nop --listen unix:/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
2 error: the socket path is too long, at most 107 bytes are allowed: `/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa`

$ holdwater serve demo --agent nop --listen 0.0.0.0:0
2 error: `0.0.0.0:0` can be reached from other machines, but no API key is set
hint: give `--key-file FILE`, or listen on `127.0.0.1`

$ holdwater serve demo --agent nop --protocol other
2 error: unknown protocol: `other`
hint: known: `verifiers`

$ holdwater serve demo --agent nop --protocol verifiers --protocol-listen 0.0.0.0:5000
2 error: `0.0.0.0:5000` can be reached from other machines, and `verifiers` clients send no key
hint: give `--protocol-listen unix:PATH`, or `--unprotected`

$ holdwater serve demo --agent nop --protocol verifiers --network open
2 error: sandboxes can reach `127.0.0.1:5000` with `--network open`, and `verifiers` clients send no key
hint: give `--protocol-listen unix:PATH`, or `--unprotected`

$ holdwater serve demo --agent nop --protocol verifiers --protocol-listen nowhere
2 error: `--protocol-listen` must look like `127.0.0.1:8400` or `unix:/run/holdwater.sock`: `nowhere`

$ holdwater serve demo --agent nop --protocol verifiers --protocol-key NO_SUCH_VARIABLE
2 error: the variable is not set: `NO_SUCH_VARIABLE`
hint: `export NO_SUCH_VARIABLE=...`

$ holdwater serve demo --agent nop --protocol-listen 127.0.0.1:5000
2 error: `--protocol-listen` needs `--protocol`

$ holdwater serve demo --agent nop --key-file missing
2 error: cannot read `missing`: No such file or directory

$ holdwater serve demo --agent nop --tls-cert cert
2 error: `--tls-cert` and `--tls-key` require each other

$ holdwater serve demo --agent nop --queue 0
2 error: `--queue` must be at least 1: 0

$ holdwater serve demo --agent nop --grace -1
2 error: `--grace` must be at least 0: -1

$ holdwater serve demo --agent nop --workers 2 --least-workers 3
2 error: `--least-workers` must be at most `--workers 2`: 3

> policy.py number = 7
$ holdwater serve demo --agent nop --policy policy.py:number
2 error: not a policy: `policy.py:number`
hint: it must be a function `(request)` that returns the reply

$ HOLDWATER_SERVE_KEYS=a holdwater serve demo --agent nop --no-key
2 error: `--no-key` contradicts the configured keys
hint: leave out `--no-key`, or `--key-file` and `HOLDWATER_SERVE_KEYS`
"""

REQUESTS = """
GET /v1/nothing
404 unknown: unknown path: '/v1/nothing'
hint: see `holdwater help serving`

PUT /v1/orders
400 invalid: method not allowed for this path: `PUT`
hint: use `POST`

POST /v1/orders [Authorization: Bearer wrong]
401 unauthorized: invalid API key
hint: send `Authorization: Bearer KEY`; the server prints the path of its token file at start

POST /v1/orders [Authorization: -]
401 unauthorized: missing API key
hint: send `Authorization: Bearer KEY`; the server prints the path of its token file at start

POST /v1/orders [Host: example.org]
421 misdirected: `Host` does not name this server: `example.org`
hint: use the address that the server prints at start; `--allow-host NAME` adds a name

POST /v1/orders [Origin: http://example.org]
403 foreign: the request comes from a page of another site: `http://example.org`

POST /v1/orders [Content-Type: text/plain] key=a
415 content_type: invalid `Content-Type` of a body: `text/plain`
hint: use `application/json` or `application/msgpack`

POST /v1/orders [Content-Encoding: gzip] {}
400 invalid: `Content-Encoding` is not supported: `gzip`

POST /v1/orders {"key": "a", "instance":
400 invalid: the body cannot be read: Input data was truncated

POST /v1/orders {"instance": "slugs"}
400 invalid: the body cannot be read: Object missing required field `key`

POST /v1/orders {"key": "", "instance": "slugs"}
400 invalid: the body cannot be read: `key` must have 1 to 200 printable characters

POST /v1/orders {"key": "a", "instance": "slugs", "size": 0}
400 invalid: the body cannot be read: `size` must be at least 1: 0

POST /v1/orders {"key": "a", "instance": "slugs", "max_staleness": -1}
400 invalid: the body cannot be read: `max_staleness` must be at least 0: -1

POST /v1/orders {"key": "a", "instance": "slugs", "max_staleness": 1, "trajectory": "none"}
400 invalid: the body cannot be read: `max_staleness` needs `trajectory` to be `tokens` or `nodes`

POST /v1/orders {"key": "a", "instance": "slugs", "size": 100000}
400 invalid: 100000 rollouts exceed the limit of open rollouts: 4096

POST /v1/orders {"key": "a", "instance": "slugs", "protocol": 9}
400 version: unsupported protocol version 9 (this server supports 1)
hint: use the client from the server's version of holdwater

POST /v1/orders {"key": "a", "instance": "slgs"}
404 unknown: no such instance: `slgs`

POST /v1/orders {"key": "a", "instance": "slugs", "limits": {"acting": 0}}
400 invalid: `limits.acting` must be more than 0: 0

POST /v1/orders {"key": "a", "instance": "slugs", "group": {"quorum": 0}}
400 invalid: `group.quorum` must be at least 1: 0

POST /v1/orders {"key": "a", "instance": "slugs", "model": {"source": "function"}}
400 invalid: the server has no policy
hint: start it with `--policy`

POST /v1/orders {"key": "a", "instance": "slugs", "model": {"source": "endpoint", "url": "http://user:secret@host"}}
400 invalid: `model.url` must not contain credentials: they would be stored in the run's files
hint: the key of an endpoint is sent in the header `X-Holdwater-Model-Key`

POST /v1/orders {"key": "a", "instance": {"id": "mine", "directory": "/etc"}}
400 invalid: `instance.directory` is a path on the server: send `files`

POST /v1/orders {"key": "a", "instance": {"id": "mine", "start": {"network": "open"}}}
400 invalid: `instance.start.network` can be opened only by the server: `--network open`

POST /v1/orders {"key": "a", "instance": {"id": "mine", "start": {"env": {"A": "${HOME}"}}}}
400 invalid: `instance.start.env` must not refer to variables of the server

POST /v1/orders [X-Holdwater-Model-Key: schlüssel] {"key": "a", "instance": "slugs"}
400 invalid: `X-Holdwater-Model-Key` must be printable ASCII

GET /v1/orders/none
404 unknown: no such order: 'none'

DELETE /v1/orders/none
404 unknown: no such order: 'none'

POST /v1/orders/none/answers {"call": "c", "text": "yes"}
404 unknown: no such order: 'none'

POST /v1/model {"url": "host"}
400 invalid: `url` must be an `http` or `https` URL
hint: the key of an endpoint is sent in the header `X-Holdwater-Model-Key`

GET /v1/blobs/none
404 unknown: no such blob: 'none'
"""

CALLS = """
>>> hw.run("demo", "nop", wokers=3)
BadInput: unknown option: `wokers`
hint: did you mean `workers`?

>>> hw.run("demo", 3)
BadInput: not an agent: an object of type `int`
hint: it must be a function `(instance, sandbox, model)` or a `holdwater.Agent`

>>> hw.run(3, "nop")
BadInput: not a suite: an object of type `int`
hint: it must be a `holdwater.Suite` or a name

>>> hw.run("demo", "nop", shard="1 of 4")
BadInput: `--shard` must look like `1/4`: `1 of 4`

>>> hw.resume("nowhere")
BadInput: no such directory: `nowhere`

>>> hw.run(yielding("a"), "nop", workers=0).reason
suite `s` yielded str as instance 1: expected `Instance`; the instances yielded before are kept

>>> hw.run(yielding(hw.Instance(id="a"), hw.Instance(id="a")), "nop", workers=0).reason
duplicate id `a`: first in instance 1 of suite `s`, again in instance 2 of suite `s`

>>> hw.run(yielding(hw.Instance(id="a", data={"x": object()})), "nop", workers=0).reason
instance 1 of suite `s` (`a`) cannot be stored: Encoding objects of type object is unsupported

>>> client.Client("127.0.0.1:8400")
BadInput: invalid server address: `127.0.0.1:8400`
hint: use `http://HOST:PORT` or `unix:PATH`

>>> client.Client("http://127.0.0.1:1", patience=0.0).run("slugs")
ServerGone: the server at `http://127.0.0.1:1` is gone: Cannot connect to host 127.0.0.1:1 ssl:default [Connect call failed ('127.0.0.1', 1)]
hint: is it running?

>>> client.TokenPolicy(SmallTokenizer(), print, end="ends")
BadInput: the end of a turn must be one token: `ends`
hint: pass `end=`

>>> asyncio.run(client.CallBatcher(lambda prompts: [])("a prompt"))
BadInput: the function returned 0 results for a batch of 1

>>> require_tokens([result_without_tokens()])
BadInput: no token ids in 1 scored rollouts
hint: use a `TokenPolicy`, or an endpoint that returns `prompt_token_ids` and `token_ids`
"""

TABLES = {
    "command line": COMMAND_LINE,
    "configuration file": CONFIGURATION_FILE,
    "JSONL suite": JSONL_SUITE,
    "suite in Python": SUITE_IN_PYTHON,
    "Harbor task": HARBOR_TASK,
    "SWE-bench": SWE_BENCH,
    "image recipe": IMAGE_RECIPE,
    "docker and registry": DOCKER_AND_REGISTRY,
    "directories": DIRECTORIES,
    "server": SERVER,
}


class TypedCommand(NamedTuple):
    """A command with the files around it, and the text that it prints."""

    files: list[str]
    line: str
    text: str


def read_cases(table: str) -> Iterator[TypedCommand]:
    for block in table.strip().split("\n\n"):
        rows = block.split("\n")
        files = [row.removeprefix("> ") for row in rows if row.startswith("> ")]
        line = rows[len(files)].removeprefix("$ ")
        yield TypedCommand(files, line, "\n".join(rows[len(files) + 1 :]))


class ExampleRuns(NamedTuple):
    """Directories that commands refer to."""

    done: Path
    served: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> ExampleRuns:
    place = tmp_path_factory.mktemp("runs")
    hw.run("demo", "oracle", out=place / "done", workers=0, limit=1)
    served = RunConfig(
        id="served", suite="demo", agent="nop", created=0.0, version="1", serving=ServingConfig()
    )
    create_run(place / "served", served)
    return ExampleRuns(place / "done", place / "served")


CASES = [(family, case) for family, table in TABLES.items() for case in read_cases(table)]


@pytest.mark.parametrize(
    "case", [case for _, case in CASES], ids=[f"{family}: {case.line}" for family, case in CASES]
)
def test_a_wrong_command_prints_this_text(
    case: TypedCommand, runs: ExampleRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert play(case, runs, tmp_path) == case.text
    assert not (tmp_path / "runs").exists(), "nothing is made"


def play(case: TypedCommand, runs: ExampleRuns, place: Path) -> str:
    """Return the exit status and the text of a command."""
    for row in case.files:
        name, _, line = row.partition(" ")
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        with (place / name).open("a") as file:
            file.write(f"{line}\n")
    names = {"HERE": str(place), "DONE": str(runs.done), "SERVED": str(runs.served)}
    typed = shlex.split(case.line)
    start = typed.index("holdwater")
    variables = dict(word.split("=", 1) for word in typed[:start])
    env = dict.fromkeys(KEYS, "") | {name: fill(value, names) for name, value in variables.items()}
    command = Command(place / ".typed", *(fill(word, names) for word in typed[start + 1 :]), env=env)
    status = command.wait()
    assert command.stdout == "", command
    return f"{status} {mask(command.stderr, names)}".rstrip("\n")


def fill(text: str, names: dict[str, str]) -> str:
    for name, path in names.items():
        text = re.sub(rf"\b{name}\b", path, text)
    return text


def mask(text: str, names: dict[str, str]) -> str:
    """Name the paths again, and leave out lists that grow with every agent, trick and format."""
    for name, path in names.items():
        text = text.replace(path, name)
    return re.sub(r"(known are|known tricks:|expected one of) .*", r"\1 ...", text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server of the demo."""
    place = tmp_path_factory.mktemp("server")
    words = ("serve", "demo", "--agent", "nop", "--workers", "1", "--listen", "127.0.0.1:0")
    command = Command(place, *words, "--out", str(place / "run"), env={"HOLDWATER_SERVE_KEYS": "secret"})
    until("the address", lambda: "serving: " in command.stderr)
    found = re.search(r"serving: (\S+)", command.stderr)
    assert found is not None
    yield found[1]
    command.kill()


async def test_a_wrong_request_is_answered_with_this_text(server: str) -> None:
    blocks = [block.partition("\n") for block in REQUESTS.strip().split("\n\n")]
    async with aiohttp.ClientSession() as session:
        answers = [await send(session, server, line) for line, _, _ in blocks]

    assert "\n\n".join(f"{line}\n{answer}" for (line, _, _), answer in zip(blocks, answers, strict=True)) == (
        REQUESTS.strip()
    )


async def send(session: aiohttp.ClientSession, server: str, line: str) -> str:
    """Send the request in `line`: METHOD PATH [HEADER: VALUE] BODY; return the status and the problem."""
    method, path, header, body = re.fullmatch(r"(\S+) (\S+)(?: \[(.*?)\])?(?: (.*))?", line).groups()  # type: ignore[union-attr]
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    if header:
        name, _, value = header.partition(": ")
        headers[name] = value
    async with session.request(method, server + path, headers=headers, data=(body or "").encode()) as answer:
        problem = await answer.json()
    hint = f"\nhint: {problem['hint']}" if problem.get("hint") else ""
    return f"{answer.status} {problem['code']}: {problem['message']}{hint}"


def yielding(*items: Any) -> hw.Suite:
    return hw.Suite(name="s", instances=lambda: iter(items), grade=lambda instance, sandbox, answer: True)


CALLED = [block.partition("\n") for block in CALLS.strip().split("\n\n")]


@pytest.mark.parametrize(("line", "text"), [(line, text) for line, _, text in CALLED])
def test_a_wrong_call_raises_or_reports_this_text(
    line: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert call(line.removeprefix(">>> ")) == text


def result_without_tokens() -> client.OrderResult:
    rollout = client.Rollout(instance="a", sample=0, member=0, outcome="passed", attempt=1, reward=1.0)
    return client.OrderResult(key="k", order=1, rollouts=(rollout,))


CALLABLE = {
    "asyncio": asyncio,
    "client": client,
    "hw": hw,
    "require_tokens": require_tokens,
    "result_without_tokens": result_without_tokens,
    "SmallTokenizer": SmallTokenizer,
    "yielding": yielding,
}


def call(expression: str) -> str:
    """Return the error of a call, or the string that it returns."""
    try:
        return str(eval(expression, CALLABLE))
    except HoldwaterError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        return f"{type(error).__name__}: {error.message}{hint}"
