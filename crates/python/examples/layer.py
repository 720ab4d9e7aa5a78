"""Two layers of MARCH inside a model of PyTorch."""

import torch
from torch import Tensor, nn

from march_lm.torch import MarchLayer


class Model(nn.Module):
    """An embedding, two layers, a head."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.layers = nn.ModuleList(MarchLayer(width, num_heads=2, head_dim=16, anchor_interval=16) for _ in range(2))
        self.anchors = nn.Parameter(0.02 * torch.randn(1, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embeddings(ids)
        anchors: Tensor = self.anchors
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y, more = layer(norm(x), norm(anchors))
            x, anchors = x + y, anchors + more
        logits: Tensor = self.head(x)
        return logits


torch.manual_seed(0)
model = Model(32, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
ids = torch.randint(32, (4, 65))
for step in range(5):
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    torch.autograd.backward(loss)  # loss.backward() has no types
    optimizer.step()
    print(f"step {step + 1}: loss {loss.item():.3f}")
