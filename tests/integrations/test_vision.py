"""Models in the manner of timm need nothing special: fused attention, stochastic depth, tokens, BatchNorm."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

import ritz


class DropPath(nn.Module):
    """Drops the residual branch of a sample, in training mode."""

    def forward(self, x):
        keep = torch.rand(len(x), 1, 1) > 0.5
        return x * keep / 0.5 if self.training else x


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, nn.Parameter(torch.full((dim,), 0.3))
        self.norm1, self.norm2, self.q_norm = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim // heads)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))
        self.drop_path = DropPath()

    def forward(self, x):
        n, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(n, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.q_norm(qkv[0]), qkv[1], qkv[2])
        x = x + self.drop_path(self.scale * self.proj(mixed.transpose(1, 2).reshape(n, tokens, dim)))
        return x + self.drop_path(self.scale * self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, dim, 2, stride=2, bias=False), nn.BatchNorm2d(dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim))
        self.blocks = nn.Sequential(Block(dim, 2))
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.blocks(x)[:, 0])


def problem():
    torch.manual_seed(0)
    X, y = torch.randn(10, 2, 4, 4), torch.randint(3, (10,))
    model = VisionTransformer()
    model(X)  # running statistics of its own
    return model, X, y


def test_a_product_is_that_of_two_passes_of_autograd():
    model, X, y = problem()
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), DataLoader(TensorDataset(X, y), batch_size=4))  # a ragged last one
    H = ritz.Hessian(risk)
    v = torch.linspace(-1, 1, H.dim)
    model.eval()
    params = list(model.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # fused kernels have no second derivative
        first = torch.autograd.grad(F.cross_entropy(model(X), y), params, create_graph=True)
        second = torch.autograd.grad(torch.cat([g.flatten() for g in first]) @ v, params)
    torch.testing.assert_close(H @ v, torch.cat([g.flatten() for g in second]))


def test_it_is_measured_while_it_trains_and_does_not_notice():
    ends = []
    for watched in (True, False):
        model, X, y = problem()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with ritz.track(ritz.Risk(model, nn.CrossEntropyLoss(), (X, y)), every=2, budget=1.0, measures=["trace"]) as t:
            for _ in range(4):
                optimizer.zero_grad()
                F.cross_entropy(model(X), y).backward()
                optimizer.step()
                if watched:
                    t.step()
        ends.append([*model.state_dict().values()])
        assert len(t.record.rows) == 2 * watched
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
