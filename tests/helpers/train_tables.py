"""Train a small model of several KV cache groups to look values up in tables that stand far back in its context.

    python tests/helpers/train_tables.py tiny-gemma3|tiny-qwen3-next SECONDS FOLDER

A sequence is a table of `name = 4821` lines, then lines that mean nothing, between which the table's names are asked
for. Every name is a token, and every digit. Nothing is read but the seed; on one H200 240 seconds are enough.
"""

import sys
import time
from typing import Any

import torch
import transformers
from torch import Tensor

CONTEXTS = (128, 512, 2048)
"""Tokens of a sequence, one after the other as the model gets nine and a half tenths of the answers right."""
DIGITS, EQUALS, ASK, LINE, BOS = 10, 10, 11, 12, 13
NAMES, NOISE, VOCABULARY = range(16, 256), range(256, 512), 512
"""Token ids: 0 to 9 are digits; names of a table, and words of lines that mean nothing."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": BOS,
    "eos_token_id": LINE,
    "pad_token_id": LINE,
    "dtype": "bfloat16",
}
GEMMA3 = {
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "num_hidden_layers": 6,
    "sliding_window": 64,
    "query_pre_attn_scalar": 64,
}
QWEN3_NEXT = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "num_hidden_layers": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mlp_only_layers": list(range(7)),  # vLLM wants a mixture of experts in one layer at least
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
MODELS = {
    "tiny-gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3),
    "tiny-qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", QWEN3_NEXT),
}


def sequences(count: int, context: int, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids [count, context], and which of them can be known from those before."""

    def numbers(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, device=device, generator=generator)

    entries = int(numbers(4, min(49, context // 24), (1,)))
    names = torch.rand(count, len(NAMES), device=device, generator=generator).argsort(1)[:, :entries] + NAMES[0]
    values = numbers(0, DIGITS, (count, entries, 4))

    def lines(which: Tensor, mark: int) -> Tensor:
        """[count, lines, 8]"""
        name, value = names.gather(1, which)[..., None], values.gather(1, which[..., None].expand(-1, -1, 4))
        same = torch.ones_like(name)
        return torch.cat((same * mark, name, same * EQUALS, value, same * LINE), 2)

    table = lines(torch.arange(entries, device=device).expand(count, -1), BOS).flatten(1)
    asked = (context - table.shape[1]) // 8
    rest = lines(numbers(0, entries, (count, asked)), ASK)
    quiet = torch.rand(count, asked, device=device, generator=generator) < torch.rand(
        count, 1, device=device, generator=generator
    )
    far = torch.arange(asked, device=device) < numbers(0, asked * 3 // 4, (count, 1))
    quiet = quiet | far
    noise = numbers(NOISE[0], NOISE[-1] + 1, (count, asked, 8))
    noise[..., 7] = LINE
    rest = torch.where(quiet[..., None], noise, rest)
    known = torch.zeros_like(rest, dtype=torch.bool)
    known[..., 3:] = ~quiet[..., None]
    ids = torch.cat((table, rest.flatten(1)), 1)
    known = torch.cat((torch.zeros_like(table, dtype=torch.bool), known.flatten(1)), 1)
    return ids, known


def main(name: str, seconds: float, folder: str, device: str = "cuda", batch: int = 32) -> None:
    config, kind, more = MODELS[name]
    torch.manual_seed(0)
    generator = torch.Generator(device).manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**COMMON, **more)).float().to(device)
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    wide = [p for p in model.parameters() if p.ndim > 1]
    narrow = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device == "cuda")
    began, step, stage, mean = time.monotonic(), 0, 0, 0.0
    while (progress := (time.monotonic() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100) * (1 if progress < 0.7 else max(0.02, (1 - progress) / 0.3))
        context = CONTEXTS[stage]
        ids, known = sequences(batch * CONTEXTS[-1] // context, context, device, generator)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        wanted = torch.where(known, ids, -100)[:, 1:].reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 10 == 0:
            mean = 0.7 * mean + 0.3 * float((logits.argmax(-1).flatten() == wanted)[wanted >= 0].float().mean())
        if step % 50 == 0:
            told = f"{context} tokens: loss {loss.item():.4f}, right {mean:.4f}"
            print(f"{name} step {step} {time.monotonic() - began:.0f} s, {told}", flush=True)
        if stage + 1 < len(CONTEXTS) and mean > 0.95:
            stage, mean = stage + 1, 0.0  # near ones are learned first
    if kind == "Qwen3NextForCausalLM":  # vLLM does not tie them there
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], *sys.argv[4:5], *map(int, sys.argv[5:6]))
