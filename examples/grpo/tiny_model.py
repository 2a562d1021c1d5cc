"""A tokenizer of 25 tokens and a transformer of two layers, made here: nothing is downloaded."""

import random

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from holdwater.client import SampledTokens

SPECIAL = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]
MERGES = [("a", "b"), ("0", "1"), ("a", "a")]  # sampled tokens could come back as other tokens
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LONGEST_REPLY = 2


def make_tokenizer():
    words = [*SPECIAL, *"RGBKabcd0123?", *(a + b for a, b in MERGES)]
    tokens = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, MERGES))
    tokens.add_special_tokens(SPECIAL)
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<|end|>", pad_token="<pad>", padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer, seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


class BatchSampler:
    """Samples replies for a batch of prompts with the weights that the model has now.

    Each call has random numbers of its own, which depend on its rollout alone: the same rollouts come out of
    any batches, also after a server was killed and calls were asked again.
    """

    def __init__(self, model, tokenizer):
        self._model = model
        self._pad = tokenizer.pad_token_id
        self._end = tokenizer.eos_token_id

    @torch.no_grad()
    def __call__(self, prompts):
        draws = [random.Random(f"{p.call.order}/{p.call.member}/{len(p.call.messages)}") for p in prompts]
        width = max(len(prompt.ids) for prompt in prompts)
        ids = torch.tensor([[self._pad] * (width - len(p.ids)) + p.ids for p in prompts])
        mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts])
        replies = [SampledTokens([], []) for _ in prompts]
        for _ in range(LONGEST_REPLY):
            places = (mask.cumsum(1) - 1).clamp(min=0)
            logits = self._model(input_ids=ids, attention_mask=mask, position_ids=places).logits[:, -1]
            chances = logits.double().log_softmax(-1)
            points = torch.tensor([[draw.random()] for draw in draws], dtype=torch.double)
            drawn = torch.searchsorted(chances.exp().cumsum(-1), points).clamp(max=chances.shape[-1] - 1)
            taken = chances.gather(1, drawn)[:, 0].tolist()
            for reply, token, chance in zip(replies, drawn[:, 0].tolist(), taken, strict=True):
                if reply.ids[-1:] != [self._end]:
                    reply.ids.append(token)
                    reply.logprobs.append(chance)
            ids, mask = torch.cat([ids, drawn], 1), torch.cat([mask, torch.ones_like(drawn)], 1)
        return replies
