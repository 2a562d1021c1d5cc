"""TRL's GRPOTrainer on `holdwater serve`: a model that is trained answers the calls of the agents itself.

python examples/grpo/train.py --out runs/grpo            (starts its own server)
python examples/grpo/train.py --out runs/grpo --url URL  (uses a server that runs already)

It needs `pip install torch trl`, 600 MB of memory and no GPU. The mean reward of a step goes from about 0.1
to over 0.8; the exit status is 1 if it does not.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: more threads cost more than they bring
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from drawers import DIGITS, KEYS
from tiny_model import BatchSampler, make_model, make_tokenizer
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from holdwater.client import CallBatcher, Client, TokenPolicy
from holdwater.trainers.trl import TrlRollouts, score_rollouts

HERE = Path(__file__).parent
GROUP, GROUPS = 8, 8  # rollouts of a group, groups of a step
WINDOW = 10  # steps over which rewards are averaged


class RewardTable(TrainerCallback):
    """Prints and keeps the mean reward of each step."""

    def __init__(self):
        self.rewards = []

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in logs:
            self.rewards.append(logs["reward"])
            print(f"{state.global_step:>4} {logs['reward']:.3f}", flush=True)


class LoggedRollouts:
    """Writes the rows of each step to a file, so that they can be compared with the server's record."""

    def __init__(self, rollouts, path):
        self._rollouts = rollouts
        self._path = path

    def __call__(self, prompts, trainer):
        batch = self._rollouts(prompts, trainer)
        ids = [a + b for a, b in zip(batch["prompt_ids"], batch["completion_ids"], strict=True)]
        row = {"step": trainer.state.global_step, "ids": ids, "rewards": batch["rollout_reward"]}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return batch


def train(options, client):
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.seed)
    policy = TokenPolicy(tokenizer, CallBatcher(BatchSampler(model, tokenizer), most=GROUP * GROUPS))
    rollouts = TrlRollouts(client, policy=policy, run=f"seed-{options.seed}")
    table = RewardTable()
    config = GRPOConfig(
        output_dir=f"{options.out}/trl",
        per_device_train_batch_size=GROUP * GROUPS,
        num_generations=GROUP,
        max_steps=options.steps,
        learning_rate=options.rate,
        lr_scheduler_type="constant",
        beta=0.0,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=options.seed,
    )
    trainer = GRPOTrainer(
        model,
        score_rollouts,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [key + digit for key in KEYS for digit in DIGITS]}),
        processing_class=tokenizer,
        rollout_func=LoggedRollouts(rollouts, options.out / "rows.jsonl"),
        callbacks=[table],
    )
    trainer.remove_callback(PrinterCallback)  # the table is enough
    trainer.train()
    print(
        f"prompts: {policy.continued} continued, {policy.broken} broken; tokens left out: {rollouts.left_out}"
    )
    return table.rewards


def start_server(out):
    words = ["serve", f"{HERE}/drawers.py:suite", "--agent", f"{HERE}/drawers.py:search", "--network", "none"]
    place = ["--listen", f"unix:{out}/socket", "--out", f"{out}/served", "--quiet"]
    return subprocess.Popen([sys.executable, "-m", "holdwater", *words, *place])


def read_options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    parser.add_argument("--url", help="a server that runs already; by default a new one")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    server = None if options.url else start_server(options.out)
    try:
        with Client(options.url or f"unix:{options.out}/socket") as client:
            rewards = train(options, client)
            if server is not None:
                client.drain()
                server.wait()
    finally:
        if server is not None and server.poll() is None:
            server.terminate()
            server.wait()
    first, last = (sum(part) / len(part) for part in (rewards[:WINDOW], rewards[-WINDOW:]))
    print(f"mean reward of the first and the last {WINDOW} steps: {first:.3f}, {last:.3f}")
    return 0 if first < 0.2 and last > 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
