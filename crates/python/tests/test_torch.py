"""The operations in PyTorch: gradients, and a layer that computes what march computes."""

import json

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from march_lm.torch import MarchLayer, anchor_read, gated_delta, log_linear_delta  # noqa: E402


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.fixture(autouse=True)
def settings():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small tensors: two pools of threads would wait for each other


def rule(batch=2, tokens=7, key_heads=1, value_heads=2, key=3, value=4, dtype=torch.float64):
    """q, k, v, a, b, a_log, dt_bias."""
    gates = (batch, tokens, value_heads)
    wide = [(batch, tokens, key_heads, key)] * 2 + [(batch, tokens, value_heads, value)]
    return [draw(*shape, dtype=dtype) for shape in [*wide, gates, gates, (value_heads,), (value_heads,)]]


BOUNDARIES = [[3, 6], [2, 7]]


def test_gradients_of_gated_delta():
    inputs = rule()
    state = draw(2, 2, 3, 4)

    def all_outputs(*x):
        return tuple(gated_delta(*x[:7], initial_state=x[7], boundaries=BOUNDARIES, final_state=True))

    assert torch.autograd.gradcheck(all_outputs, (*inputs, state))
    assert torch.autograd.gradcheck(lambda *x: gated_delta(*x, allow_neg_eigval=True).readout, inputs)


@pytest.mark.parametrize("top_k", [None, 1])
@pytest.mark.parametrize("null", [True, False])
def test_gradients_of_anchor_read(top_k, null):
    q, *_ = rule()
    inputs = [q, draw(2, 7, 2, 2), draw(4, 2, 2), draw(4, 2, 3, 4)] + ([draw(2, 7, 2)] if null else [])
    assert torch.autograd.gradcheck(lambda *x: anchor_read(*x, boundaries=BOUNDARIES, top_k=top_k, scale=0.7), inputs)


def test_gradients_of_log_linear_delta():
    assert torch.autograd.gradcheck(log_linear_delta, (*rule(), draw(2, 7, 2, 3), draw(2, 3)))


def test_only_some_inputs_have_gradients():
    inputs = [x.detach() for x in rule(dtype=torch.float32)]
    assert not gated_delta(*inputs).readout.requires_grad
    inputs[2].requires_grad_()
    gated_delta(*inputs).readout.sum().backward()
    assert inputs[2].grad is not None and inputs[0].grad is None


class March(nn.Module):
    """The model of a golden checkpoint, from layers of `march_lm.torch`."""

    def __init__(self, config):
        super().__init__()
        width, inner, eps = config["hidden_size"], config["intermediate_size"], config["norm_eps"]
        shared = {key: config[key] for key in ("num_heads", "head_dim", "anchor_interval", "routing_dim", "conv_size")}
        shared |= {key: config[key] for key in ("expand_v", "routing_top_k", "null_route", "norm_eps")}
        self.embeddings = nn.Embedding(config["vocab_size"], width)
        self.anchor_embedding = nn.Parameter(torch.empty(width))
        self.layers = nn.ModuleList()
        for _ in range(config["num_hidden_layers"]):
            layer = nn.Module()
            layer.attn_norm, layer.mlp_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
            layer.attn = MarchLayer(width, **shared)
            layer.mlp = nn.Module()
            layer.mlp.gate_proj, layer.mlp.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
            layer.mlp.down_proj = nn.Linear(inner, width, bias=False)
            self.layers.append(layer)
        self.norm = nn.RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)

    def forward(self, ids):
        streams = [self.embeddings(ids), self.anchor_embedding[None]]
        for layer in self.layers:
            mixed = layer.attn(*map(layer.attn_norm, streams))
            streams = [x + y for x, y in zip(streams, mixed, strict=True)]
            for i, x in enumerate(streams):
                y = layer.mlp_norm(x)
                streams[i] = x + layer.mlp.down_proj(functional.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
        return self.lm_head(self.norm(streams[0]))


def load(folder, dtype):
    model = March(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    tensors = safetensors.load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    missing, unknown = model.load_state_dict(tensors, strict=False)
    assert not unknown and all(name.endswith("attn.anchor_embedding") for name in missing)
    return model.to(dtype)


@pytest.mark.parametrize("name", ["march", "march_topk"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.float64, 1e-6)])
def test_a_model_of_layers_is_the_golden_one(golden, name, dtype, bound):
    model = load(golden / name, dtype)
    ids = torch.tensor([json.loads((golden / name / "tokens.json").read_text(encoding="utf-8"))])
    expected = safetensors.load_file(golden / name / "expected.safetensors")["logits"]
    logits = model(ids)[0]
    assert (logits - expected).abs().max() < bound * expected.abs().max()
    functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    gradients = safetensors.load_file(golden / name / "gradients.safetensors")
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    for full, gradient in gradients.items():
        ours = found[full.removeprefix("model.")]
        assert (ours - gradient).abs().max() <= 10 * bound * gradient.abs().max() + 1e-9, full


def test_texts_of_a_batch_are_independent():
    layer = MarchLayer(32, num_heads=2, head_dim=8, anchor_interval=8, routing_dim=4)
    x = torch.randn(3, 21, 32)
    together, anchors = layer(x)
    assert anchors.shape == (6, 32)
    for row in range(3):
        alone, own = layer(x[row : row + 1])
        assert torch.allclose(alone[0], together[row], atol=1e-6)
        assert torch.allclose(own, anchors[2 * row : 2 * row + 2], atol=1e-6)
    short, none = layer(x[:, :5])
    assert torch.allclose(short, together[:, :5], atol=1e-6) and none.shape == (0, 32)
    with pytest.raises(ValueError, match="5 anchors; 3 texts of 21 tokens have 6"):
        layer(x, torch.zeros(5, 32))


def test_a_layer_learns():
    """Dropped into a model of PyTorch, with an optimizer of PyTorch."""
    layer = MarchLayer(16, num_heads=2, head_dim=8, anchor_interval=4, routing_dim=4)
    x = torch.randn(2, 20, 16)
    target = torch.roll(x, 1, dims=1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = functional.mse_loss(layer(x)[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_the_doctest():
    import doctest

    import march_lm.torch

    assert doctest.testmod(march_lm.torch).failed == 0
