"""The adapters for TRL, verl and SkyRL on a real server, against the recorded contracts of the trainers."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from pydantic import TypeAdapter
from tests.server_harness import Server, server
from tests.small_tokenizer import SmallTokenizer
from tests.trainer_contracts import build_modules, load_record
from tests.wait_bounds import stretch

from holdwater.client import AsyncClient, Client, SampledTokens, TokenPolicy, TokenPrompt
from holdwater.core.errors import BadInput
from holdwater.trainers.skyrl import SkyRLGenerator
from holdwater.trainers.token_rows import list_sequence_rows, make_row
from holdwater.trainers.trl import TrlRollouts, score_rollouts
from holdwater.trainers.trl_async import TrlRolloutWorker
from holdwater.trainers.verl import VerlAgentLoop

# The model is asked for a key, then for the sign behind it; an instance can be one that no grade can judge.
SUITE = """
import holdwater as hw

def instances():
    for n in range(3):
        yield hw.Instance(id=f"door-{n}", instruction=f"door {n}")
    yield hw.Instance(id="stuck", instruction="stuck")

async def solve(instance, sandbox, model):
    messages = [{"role": "user", "content": instance.instruction}]
    for sign in ("c", "d"):
        reply = (await model.chat(messages))["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": sign}]
    return reply["content"]

async def grade(instance, sandbox, answer):
    if instance.id == "stuck":
        raise RuntimeError("no grade")
    return 1.0 if answer == "ab" else 0.25

suite = hw.Suite(name="doors", instances=instances, grade=grade)
"""
TOKENS = SmallTokenizer()
PAD = 0
INSTALLED = os.environ.get(
    "HOLDWATER_TEST_TRAINERS"
)  # the server, where the trainers' packages are installed
FLAGS = ("--workers", "1", "--concurrency", "8", "--ungoverned", "--retries", "0")


class EvenSampler:
    """Samples `a`, `b`, which the tokenizer encodes as one token; odd members end with another word."""

    def __init__(self) -> None:
        self.sampled: dict[str, list[int]] = {}  # by member, everything that it sampled

    async def __call__(self, prompt: TokenPrompt) -> SampledTokens:
        call = prompt.call
        last = len(call.messages) > 1
        ids = TOKENS.spell("b", "a", "<end>") if last and call.member % 2 else TOKENS.spell("a", "b", "<end>")
        self.sampled.setdefault(f"{call.order}/{call.member}", []).extend(ids)
        return SampledTokens(ids, [-0.5] * len(ids), version=str(len(call.messages)))


def make_policy() -> TokenPolicy:
    return TokenPolicy(TOKENS, EvenSampler())


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if INSTALLED:
        yield SimpleNamespace(url=INSTALLED)
        return
    with server(tmp_path_factory.mktemp("trainers"), *FLAGS, suite=SUITE) as found:
        yield found


@pytest.fixture
def client(serving: Server) -> Iterator[Client]:
    with Client(serving.url, patience=stretch(20.0)) as found:
        yield found


@pytest.fixture(autouse=True)
def contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the adapters recorded types, unless `test_trainer_packages.py` has the packages."""
    for name, module in ({} if INSTALLED else build_modules()).items():
        monkeypatch.setitem(sys.modules, name, module)


def check_generator_output(output: dict[str, Any], step_wise: bool) -> None:
    if INSTALLED:
        from skyrl.train.utils.trainer_utils import validate_generator_output

        validate_generator_output(4, output, step_wise)
        return
    from skyrl.train.generators.base import GeneratorOutput

    media = {"pixel_values": None, "image_grid_thw": None}
    TypeAdapter(GeneratorOutput).validate_python({**output, **media}, strict=True)


def make_trainer(step: int = 0, **changes: Any) -> SimpleNamespace:
    """The part of TRL's trainer that the adapter uses, as the record lists it."""
    attributes = {
        "num_generations": 2,
        "num_generations_eval": 1,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(process_index=0),
        "processing_class": SimpleNamespace(pad_token_id=PAD),
        **changes,
    }
    assert sorted(attributes) == load_record()["grpo"]["attributes"]
    return SimpleNamespace(state=SimpleNamespace(global_step=step), **attributes)


def test_trl_gets_a_row_for_each_prompt_with_the_sampled_ids(client: Client) -> None:
    policy = make_policy()
    rollouts = TrlRollouts(client, policy=policy, run="rows")
    prompts = ["door-0", "door-0", "stuck", "stuck", "door-1", "door-1", "door-1", "door-1"]

    batch = rollouts(prompts, make_trainer(step=7))

    contract = load_record()["grpo"]
    assert {*contract["required"], *contract["mask"]} <= batch.keys()
    assert {len(rows) for rows in batch.values()} == {len(prompts)}
    rows = zip(
        batch["prompt_ids"], batch["completion_ids"], batch["env_mask"], batch["logprobs"], strict=True
    )
    keys = ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1", "3/0", "3/1"]
    sampler = policy._sample
    assert isinstance(sampler, EvenSampler)
    for key, (prompt, completion, mask, logprobs) in zip(keys, rows, strict=True):
        assert prompt[-1:] == TOKENS.spell("<assistant>")
        assert len(completion) == len(mask) == len(logprobs)
        marked = [token for token, bit in zip(completion, mask, strict=True) if bit]
        assert marked == sampler.sampled[f"rows/7/train/0/1/{key}"]
        assert logprobs == [-0.5 if bit else 0.0 for bit in mask]
    assert score_rollouts(batch["rollout_reward"], prompts=prompts) == [
        1.0,
        0.25,
        None,
        None,
        1.0,
        0.25,
        1.0,
        0.25,
    ]
    assert (policy.continued, policy.broken, rollouts.left_out) == (8, 0, 0)


def test_a_training_that_resumes_gets_the_rollouts_that_it_had(client: Client) -> None:
    prompts = [[{"role": "user", "content": "door-2"}]] * 2
    first, policy = TrlRollouts(client, policy=make_policy(), run="again"), make_policy()
    again = TrlRollouts(client, policy=policy, run="again")

    batches = [first(prompts, make_trainer(step)) for step in (0, 0, 1)]
    assert [again(prompts, make_trainer(step)) for step in (0, 0, 1)] == batches
    again(prompts, make_trainer(1, model=SimpleNamespace(training=False)))

    asked = policy._sample
    assert isinstance(asked, EvenSampler)
    assert sorted(asked.sampled) == ["again/1/eval/0/1/0/0", "again/1/eval/0/1/1/0"]


def test_rollouts_without_token_ids_are_refused(client: Client) -> None:
    rollouts = TrlRollouts(client, policy=lambda call: "ab")

    with pytest.raises(BadInput, match="no token ids in 2 scored rollouts"):
        rollouts(["door-0", "door-0"], make_trainer())


def test_a_rollout_of_two_sequences_has_one_row_and_tells_the_rest(client: Client) -> None:
    forgetful = SmallTokenizer(
        "{% for m in messages[-1:] %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    )
    rollout = client.run("door-0", policy=TokenPolicy(forgetful, EvenSampler()))

    row = make_row(rollout, PAD)

    assert (sum(row.mask), row.left_out) == (3, 3)
    assert [sum(row.mask) for row in list_sequence_rows(rollout)] == [3, 3]


def start_worker(url: str, policy: Any, **options: Any) -> TrlRolloutWorker:
    return TrlRolloutWorker(
        lambda: AsyncClient(url, patience=stretch(20.0)),
        ["door-0", "stuck"],
        2,
        at_once=2,
        policy=policy,
        **options,
    )


def test_the_worker_of_trl_fills_its_buffer_with_samples(serving: Server) -> None:
    worker = start_worker(serving.url, make_policy())
    for name, parameters in load_record()["parameters"].items():
        if "RolloutWorkerProtocol" in name:
            method = getattr(TrlRolloutWorker, name.rpartition(".")[2])
            assert list(method.__code__.co_varnames[: method.__code__.co_argcount]) == parameters

    worker.start()
    samples = [worker.rollout_buffer.get(timeout=stretch(30.0)) for _ in range(4)]
    worker.check_health(stretch(30.0))
    worker.update_model_version(3)
    worker.stop()

    kinds = {
        "np.ndarray": numpy.ndarray,
        "int": int,
        "float": float,
        "Messages": list,
        "dict[str, float]": dict,
    }
    fields = load_record()["fields"]["trl/experimental/async_grpo/async_rollout_worker.py:RolloutSample"]
    for sample in samples:
        for name, text in fields.items():
            assert isinstance(getattr(sample, name), kinds[text.partition(" |")[0]]), name
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert sample.old_log_probs[sample.completion_mask == 1].tolist() == [-0.5] * 6
        assert sample.model_version == 1  # the first turn's; the second is version 3
    assert [sample.advantage > 0 for sample in samples] == [True, False, True, False]
    assert sum(sample.advantage for sample in samples) == pytest.approx(0.0)
    assert {metrics["rollout/unscored"] for metrics in worker.metrics_queue.queue} <= {(0.0, 2.0), (2.0, 2.0)}


def test_an_error_of_the_workers_policy_reaches_the_trainer(serving: Server) -> None:
    failed = threading.Event()

    def policy(call: Any) -> str:
        failed.set()
        raise MemoryError("out of memory")

    worker = start_worker(serving.url, policy)
    worker.start()
    assert failed.wait(stretch(30.0))
    worker._thread.join(stretch(30.0))

    with pytest.raises(RuntimeError, match="the rollout worker has failed") as raised:
        worker.check_health(60.0)
    assert isinstance(raised.value.__cause__, MemoryError)
    worker.stop()


class VerlServers:
    """verl's servers: tokens in, tokens out."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        assert sampling_params == {"temperature": 0.5}
        self.requests.append(request_id)
        ids = TOKENS.spell("a", "b", "<end>")
        steps = {"global_steps": len(self.requests) + 40}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * 3, stop_reason="completed", extra_fields=steps)


def make_loop(url: str, servers: VerlServers, response_length: int = 99) -> VerlAgentLoop:
    sizes = SimpleNamespace(prompt_length=4, response_length=response_length)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=sizes))
    made_with = load_record()["parameters"][
        "verl/experimental/agent_loop/agent_loop.py:AgentLoopBase.__init__"
    ]
    arguments: dict[str, Any] = dict.fromkeys(made_with[1:])
    arguments |= {"trainer_config": SimpleNamespace(config=config), "server_manager": servers}
    tokenizer = SmallTokenizer()
    tokenizer.pad_token_id = PAD  # type: ignore[attr-defined]
    return VerlAgentLoop(url, **{**arguments, "tokenizer": tokenizer}, tools=None)


async def test_verl_gets_the_output_of_an_agent_loop(serving: Server) -> None:
    servers = VerlServers()

    output = await make_loop(serving.url, servers).run({"temperature": 0.5}, instance="door-1", raw_prompt=[])

    assert type(output).__name__ == "AgentLoopOutput"
    type(output).model_validate(output.model_dump(), strict=True)
    assert len(output.prompt_ids) == 4 and output.prompt_ids[-1:] == TOKENS.spell("<assistant>")
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    assert sum(output.response_mask) == 6 and output.reward_score == 1.0 and output.num_turns == 4
    assert output.extra_fields["min_global_steps"] == 41 and output.extra_fields["max_global_steps"] == 42
    assert len(set(servers.requests)) == 1  # one conversation, one server


async def test_verl_does_not_train_on_a_rollout_without_reward(serving: Server) -> None:
    output = await make_loop(serving.url, VerlServers(), 5).run({"temperature": 0.5}, instance="stuck")

    assert (output.response_mask, output.reward_score, len(output.response_ids)) == ([0] * 5, 0.0, 5)
    assert output.extra_fields["reward_extra_info"]["scored"] == 0.0


class SkyRLEngines:
    """SkyRL's inference engines."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.finished: list[str] = []

    async def generate(self, input_batch: dict[str, Any]) -> dict[str, Any]:
        contract = "skyrl/backends/skyrl_train/inference_servers/base.py:InferenceEngineInput"
        assert input_batch.keys() <= load_record()["fields"][contract].keys()
        [session], [prompt] = input_batch["session_ids"], input_batch["prompt_token_ids"]
        assert prompt[-1:] == TOKENS.spell("<assistant>")
        self.asked[session] = self.asked.get(session, 0) + 1
        odd = session.endswith("1") and self.asked[session] == 2
        ids = TOKENS.spell("b", "a", "<end>") if odd else TOKENS.spell("a", "b", "<end>")
        return {
            "responses": ["ab"],
            "response_ids": [ids],
            "stop_reasons": ["stop"],
            "response_logprobs": [[-0.5] * 3],
        }

    async def finish_session(self, session_id: str) -> None:
        self.finished.append(session_id)


@pytest.mark.parametrize("step_wise", [False, True])
async def test_skyrl_gets_the_output_of_a_generator(serving: Server, step_wise: bool) -> None:
    from skyrl.train.generators.base import BatchMetadata, TrajectoryID

    engines = SkyRLEngines()
    tokenizer = SmallTokenizer()
    tokenizer.pad_token_id = PAD  # type: ignore[attr-defined]
    generator = SkyRLGenerator(
        lambda: AsyncClient(serving.url), engines, tokenizer, step_wise=step_wise, run=f"sky-{step_wise}"
    )
    names = ["door-0", "stuck", "door-0", "door-1"]  # groups need not be adjacent
    batch = {
        "prompts": [[{"role": "user", "content": name}] for name in names],
        "env_classes": ["holdwater"] * 4,
        "env_extras": [{"instance": name} for name in names],
        "sampling_params": {"temperature": 1.0},
        "trajectory_ids": [TrajectoryID(name, names[:place].count(name)) for place, name in enumerate(names)],
        "batch_metadata": BatchMetadata(3, "train"),
    }

    output = await generator.generate(batch)

    each = 2 if step_wise else 1
    check_generator_output(output, step_wise)
    assert {len(rows) for name, rows in output.items() if isinstance(rows, list)} == {4 * each}
    per_row = zip(output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True)
    assert all(len(ids) == len(mask) == len(logprobs) for ids, mask, logprobs in per_row)
    last = slice(each - 1, None, each)
    assert output["rewards"][last] == [1.0, 0.0, 0.25, 1.0]
    assert output["stop_reasons"][last] == ["stop", "error", "stop", "stop"]
    assert [sum(mask) for mask in output["loss_masks"]][last] == [6 // each, 0, 6 // each, 6 // each]
    assert output["rollout_metrics"]["generate/unscored"] == 1
    if step_wise:
        assert output["is_last_step"] == [False, True] * 4
        assert output["trajectory_ids"] == [one for one in batch["trajectory_ids"] for _ in range(2)]
    assert sorted(engines.finished) == sorted(engines.asked)
