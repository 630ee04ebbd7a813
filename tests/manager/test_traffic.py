"""The metric that a server's own queries make, against what errors do to attention's output."""

from pathlib import Path

import numpy as np
import profiles
import torch
from safetensors.torch import save_file

from manthan.codec.calibration import SINKS
from manthan.codec.profile import ProfileInfo
from manthan.manager.calibration.traffic import TrafficBuilder, output_energies

HEADS, DIM, TOKENS = 2 * profiles.HEADS, profiles.HEAD_DIM, 64
INFO = ProfileInfo("made-up", profiles.LAYERS, profiles.HEADS, DIM, profiles.ROPE, "attention")


def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the last quarter's queries take from the layer, [queries, hidden]."""
    logits = torch.einsum("hqd,hkd->hqk", queries, keys.repeat_interleave(2, 0))
    later = torch.ones(TOKENS // 4, TOKENS, dtype=torch.bool).triu(TOKENS - TOKENS // 4 + 1)
    shares = logits.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hqk,hkd,ohd->qo", shares, values.repeat_interleave(2, 0), weights)


def test_it_is_the_mean_of_what_errors_do() -> None:
    """Gradients of random directions of the output, which are as good as independent, have its traces."""
    made = torch.Generator().manual_seed(0)
    weights = torch.randn(96, HEADS, DIM, generator=made)
    energies = torch.einsum("ohd,ohe->hde", weights, weights).numpy()
    keys, values, _ = profiles.kv(TOKENS)
    k, v = (torch.tensor(x[1] / np.std(x[1]), dtype=torch.float32, requires_grad=True) for x in (keys, values))
    q = torch.randn(HEADS, TOKENS, DIM, generator=made) / DIM**0.5
    builder = TrafficBuilder(INFO, [energies] * INFO.layers)
    builder.ask(1, q.numpy(), k.detach().numpy(), v.detach().numpy())
    totals, of_tokens = np.zeros((2, profiles.HEADS, DIM)), []
    for _ in range(64):
        out = attended(q[:, -TOKENS // 4 :], k, v, weights)
        sign = torch.randn(out.shape, generator=made)
        of_tokens.append([x[:, SINKS : TOKENS - TOKENS // 4] for x in torch.autograd.grad((out * sign).sum(), (k, v))])
        for total, x in zip(totals, of_tokens[-1], strict=True):
            total += np.square(x.numpy()).sum(1) / 64
    for found, expected in zip(
        totals, (builder._energy[1], np.diagonal(builder._seen[1], axis1=1, axis2=2)), strict=True
    ):
        assert np.allclose(found.sum(1), expected.sum(1), rtol=0.15)
    assert not builder._energy[0].any()
    each = np.square([[x.numpy() for x in grads] for grads in of_tokens]).sum(-1).mean(0)  # [kinds, heads, tokens]
    expected = (each / each.mean(2, keepdims=True)).sum((0, 1))
    assert np.corrcoef(builder._weights[-1], expected)[0, 1] > 0.95


def test_an_error_costs_less_in_later_layers() -> None:
    builder = TrafficBuilder(INFO, output_energies(None, INFO.layers, HEADS, DIM))
    rng = np.random.default_rng(0)
    for seed in range(4):
        keys, values, positions = profiles.kv(128, seed)
        for layer in range(INFO.layers):
            builder.add(layer, positions, keys[layer], values[layer])
            builder.ask(layer, rng.standard_normal((HEADS, 128, DIM), np.float32) / 50, keys[layer], values[layer])
    made = builder.made()
    assert made.info.bits[2] < 16 / 8
    assert all(group.weigher.any() for group in made.groups)
    scales = [group.scale.reshape(group.place[1], 2, -1).mean(2) for group in made.groups]
    steps = np.concatenate(scales).tolist()
    assert steps == sorted(steps)
    assert steps[-1][1] > 50 * steps[0][1]


def test_output_projections_are_found_in_the_files_of_a_model(tmp_path: Path) -> None:
    weights = {f"model.layers.{n}.self_attn.o_proj.weight": torch.randn(8, HEADS * DIM) for n in range(3)}
    others = {"vision.layers.0.self_attn.o_proj.weight": torch.ones(8, HEADS * DIM), "model.norm.weight": torch.ones(8)}
    save_file(weights | others, tmp_path / "model.safetensors")
    found = output_energies(tmp_path, 3, HEADS, DIM)
    part = weights["model.layers.2.self_attn.o_proj.weight"][:, DIM : 2 * DIM]
    assert np.allclose(found[2][1], part.T @ part, atol=1e-4)
    assert np.allclose(output_energies(tmp_path, 2, HEADS, DIM)[1], found[1]), "a draft's layer is in the same files"
    identity = np.tile(np.eye(DIM), (HEADS, 1, 1))
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    save_file({name: each.to(torch.float8_e4m3fn) for name, each in weights.items()}, quantized / "model.safetensors")
    for folder, layers in ((tmp_path, 4), (None, 4), (quantized, 3)):
        lacking = output_energies(folder, layers, HEADS, DIM)
        assert all((each == identity).all() for each in lacking)
