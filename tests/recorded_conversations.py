"""Conversations in each dialect, shaped as real clients shape them, and a run that recorded them."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw
from tests.ledger_runs import failed, new_run, passed, planned

from holdwater.core.exchange import Exchange
from holdwater.core.records import Attempt, FailureOrigin, ModelUsage, Outcome
from holdwater.dialect import DIALECTS
from holdwater.gateway import media
from holdwater.gateway.recorder import ConversationRecorder
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog
from holdwater.ledger.ledger import Ledger

PIXELS = random.Random(7).randbytes(6000)
BASE64 = base64.b64encode(PIXELS).decode()
IMAGE = "data:image/png;base64," + BASE64
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}

# One conversation a dialect: a picture, a thought, a call, its answer, the end. (request, reply), twice.

CHAT_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "bash", "arguments": '{"command": "ls"}'},
}
CHAT_HEAD = {
    "model": "gpt-5",
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}],
}
CHAT_START = [
    {"role": "system", "content": "You are careful."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is here?"},
            {"type": "image_url", "image_url": {"url": IMAGE}},
        ],
    },
]
CHAT = [
    (
        {**CHAT_HEAD, "messages": CHAT_START},
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": "gpt-5-2026",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "tool_calls",
                    "message": {
                        "role": "assistant",
                        "content": "I look.",
                        "refusal": None,
                        "reasoning_content": "Look first.",
                        "tool_calls": [CHAT_CALL],
                    },
                    "logprobs": {"content": [{"token": "I", "logprob": -0.5}]},
                }
            ],
        },
    ),
    (
        {
            **CHAT_HEAD,
            "messages": [
                *CHAT_START,
                {"role": "assistant", "content": "I look.", "tool_calls": [CHAT_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"},
            ],
        },
        {
            "model": "gpt-5-2026",
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a.txt."}}
            ],
        },
    ),
]

RESPONSES_HEAD = {
    "model": "gpt-5",
    "instructions": "You are careful.",
    "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}],
}
RESPONSES_START = [
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "What is here?"},
            {"type": "input_image", "image_url": IMAGE},
        ],
    }
]
RESPONSES_SAID = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "Look first."}],
        "encrypted_content": "AAAA",
    },
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "bash",
        "arguments": '{"command":"ls"}',
    },
]
RESPONSES = [
    (
        {**RESPONSES_HEAD, "input": RESPONSES_START},
        {"id": "resp_1", "status": "completed", "model": "gpt-5-2026", "output": RESPONSES_SAID},
    ),
    (
        {
            **RESPONSES_HEAD,
            "input": [
                *RESPONSES_START,
                *RESPONSES_SAID,
                {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
            ],
        },
        {
            "id": "resp_2",
            "status": "completed",
            "model": "gpt-5-2026",
            "output": [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "a.txt."}],
                }
            ],
        },
    ),
]

MESSAGES_HEAD = {
    "model": "claude-x",
    "max_tokens": 1000,
    "system": [{"type": "text", "text": "You are careful.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "bash", "description": "A shell", "input_schema": SCHEMA}],
}
MESSAGES_START = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is here?"},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
        ],
    }
]
MESSAGES_SAID = [
    {"type": "thinking", "thinking": "Look first.", "signature": "c2ln"},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "call_1", "name": "bash", "input": {"command": "ls"}},
]
MESSAGES = [
    (
        {**MESSAGES_HEAD, "messages": MESSAGES_START},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "claude-x-2026",
            "content": MESSAGES_SAID,
            "stop_reason": "tool_use",
        },
    ),
    (
        {
            **MESSAGES_HEAD,
            "messages": [
                *MESSAGES_START,
                {"role": "assistant", "content": MESSAGES_SAID},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_1",
                            "content": [{"type": "text", "text": "a.txt"}],
                        }
                    ],
                },
            ],
        },
        {
            "type": "message",
            "role": "assistant",
            "model": "claude-x-2026",
            "content": [{"type": "text", "text": "a.txt."}],
            "stop_reason": "end_turn",
        },
    ),
]

GEMINI_HEAD = {
    "model": "gemini-x",
    "systemInstruction": {"role": "user", "parts": [{"text": "You are careful."}]},
    "tools": [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": SCHEMA}]}],
}
GEMINI_START = [
    {
        "role": "user",
        "parts": [
            {"text": "What is here?"},
            {"inlineData": {"mimeType": "image/png", "data": BASE64}},
        ],
    }
]
GEMINI_SAID = {
    "role": "model",
    "parts": [
        {"text": "Look first.", "thought": True},
        {"text": "I look."},
        {"functionCall": {"name": "bash", "args": {"command": "ls"}}, "thoughtSignature": "c2ln"},
    ],
}
GEMINI = [
    (
        {**GEMINI_HEAD, "contents": GEMINI_START},
        {
            "candidates": [{"content": GEMINI_SAID, "finishReason": "STOP"}],
            "modelVersion": "gemini-x-2026",
        },
    ),
    (
        {
            **GEMINI_HEAD,
            "contents": [
                *GEMINI_START,
                GEMINI_SAID,
                {
                    "role": "user",
                    "parts": [{"functionResponse": {"name": "bash", "response": {"output": "a.txt"}}}],
                },
            ],
        },
        {
            "candidates": [
                {"content": {"role": "model", "parts": [{"text": "a.txt."}]}, "finishReason": "STOP"}
            ],
            "modelVersion": "gemini-x-2026",
        },
    ),
]

CONVERSATIONS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "gemini": GEMINI,
}


class Recording:
    """An attempt's record, written as the gateway writes it."""

    def __init__(self, directory: RunDirectory, attempt: int, dialect: str = "chat") -> None:
        self.log = AttemptLog(directory, attempt)
        self._dialect = DIALECTS[dialect]
        self._recorder = ConversationRecorder(self._dialect)

    def add(
        self, request: dict[str, Any], reply: Any, error: str = "", status: int = 200, **about: Any
    ) -> None:
        reading = self._recorder.read(bytearray(msgspec.json.encode(request)))
        delta = self._recorder.find_delta(reading, msgspec.json.encode(reading.head))
        number = self.log.count + 1
        keep = self.log.blob
        self.log.append(
            Exchange(
                number=number,
                parent=delta.parent,
                keep=delta.keep,
                append=tuple(Raw(media.extract_media(message, keep)) for message in delta.append),
                head=None if delta.head is None else Raw(media.extract_constants(delta.head, keep)),
                reply=None if reply is None else Raw(media.extract_media(msgspec.json.encode(reply), keep)),
                status=status,
                dialect=self._dialect.name,
                usage=ModelUsage(requests=1, input_tokens=100, cached_tokens=10, output_tokens=20),
                error=error,
                started=1_700_000_000.0 + number,
                seconds=0.5,
                **about,
            )
        )
        self._recorder.on_written(delta, number)


async def recorded(path: Path, **dialects: bool) -> RunDirectory:
    """A settled run: an instance for each name, whose attempt talked in that dialect; True: it passed."""
    directory = new_run(path, model="gpt-5")
    async with Ledger(directory) as ledger:
        for name, won in dialects.items():
            [row] = await ledger.plan([planned(name)])
            attempt = await ledger.next_attempt()
            await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
            recording = Recording(directory, attempt, name)
            for request, reply in CONVERSATIONS[name]:
                recording.add(request, reply)
            recording.log.close()
            verdict = (
                passed(attempt, ledger.token, 2)
                if won
                else failed(attempt, ledger.token, FailureOrigin.AGENT)
            )
            await ledger.settle(verdict)
            kind, score = ("passed", 1.0) if won else ("failed", 0.0)
            await ledger.close_sample(
                Outcome(instance=row, sample=0, attempt=attempt, kind=kind, score=score)
            )
    return directory


def says(text: str, **message: Any) -> dict[str, Any]:
    """A chat reply."""
    spoken = {"role": "assistant", "content": text, **message}
    return {"model": "m", "choices": [{"index": 0, "finish_reason": "stop", "message": spoken}]}


def chat(*texts: str, **head: Any) -> dict[str, Any]:
    """A chat request whose messages say `texts`, the user and the assistant in turn."""
    roles = ("user", "assistant")
    return {
        "model": "m",
        **head,
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)],
    }
