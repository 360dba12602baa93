"""A small language model."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .building import Residual, check_sizes, named, weights_from

_STD = 0.02  # of the first weights in GPT-2's code


class TokenEmbedding(nn.Module):
    """A learned vector for each token, plus one for its position: (N, T) -> (N, T, width).

    Example:
        >>> embedding = TokenEmbedding(num_tokens=3, context=4, width=2)
        >>> out = embedding(torch.tensor([[2, 2]]))
        >>> torch.equal(out[0, 1], embedding.token.weight[2] + embedding.position.weight[1])
        True
    """

    def __init__(self, num_tokens: int, context: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(num_tokens, width), nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The sum of the two."""
        length, context = tokens.shape[-1], self.position.num_embeddings
        if length > context:
            raise ValueError(
                f"the model has {context} positions, got {length} tokens; cut the input, or build the model with "
                f"context={length}"
            )
        # one row of positions for each sample, so that sums over samples can be taken apart
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        out: Tensor = self.token(tokens) + self.position(positions)
        return out


class CausalAttention(nn.Module):
    """Self-attention of each position to itself and those before it: softmax(Q K' / sqrt(d)) V in each head.

    Example:
        >>> attend = CausalAttention(width=4, num_heads=2)
        >>> x = torch.arange(12.0).view(1, 3, 4)
        >>> torch.allclose(attend(x)[:, :2], attend(x[:, :2]), atol=1e-5)  # the third changes nothing before it
        True
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) -> (N, T, width)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (N, heads, T, d) each
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


def gpt(
    num_classes: int = 65,
    *,
    context: int = 64,
    width: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    tied: bool = True,
    seed: int | None = None,
) -> nn.Sequential:
    """GPT-2 (Radford et al. 2019) in small: 809,856 parameters for 65 kinds of tokens, enough for text by characters.

    Tokens (N, T) of whole numbers give logits (N, T, num_classes) of the token that follows each. Pre-norm blocks of
    attention and of a layer four times as wide with GELU, learned positions, biases, the head tied to the token
    embedding; no dropout. As in GPT-2, weights start from N(0, 0.02^2), those of the layers that feed the residual sum
    divided by sqrt(2 num_layers), biases at 0. The size is that of nanoGPT's run on a CPU. None of the seeds trains it.

    Args:
        num_classes: Kinds of tokens.
        context: Most tokens of one sequence.
        width: Length of the vector of one token, a multiple of `num_heads`.
        num_layers: Blocks.
        num_heads: Heads of attention in each.
        tied: Whether the head has the weights of the token embedding, as in GPT-2; a matrix by layers, as
            `ritz.KFACOperator`, needs them apart (818,176 parameters).
        seed: Draws the weights and leaves torch's generator alone; None draws from torch's generator.

    Raises:
        ValueError: If the heads do not share the width evenly.

    Example:
        >>> model = gpt(seed=0)
        >>> sum(p.numel() for p in model.parameters()), model(torch.zeros(2, 5, dtype=torch.long)).shape
        (809856, torch.Size([2, 5, 65]))
    """
    check_sizes(num_classes=num_classes, context=context, width=width, num_layers=num_layers, num_heads=num_heads)
    if width % num_heads:
        raise ValueError(f"width = {width} cannot be shared by {num_heads} heads: it must be a multiple of num_heads")
    with weights_from(seed):
        embedding = TokenEmbedding(num_classes, context, width)
        blocks = nn.Sequential(*(_block(width, num_heads) for _ in range(num_layers)))
        head = nn.Linear(width, num_classes, bias=False)
        if tied:
            head.weight = embedding.token.weight
        model = named(embedding=embedding, blocks=blocks, norm=nn.LayerNorm(width), head=head)
        _start(model, num_layers)
    return model


def _block(width: int, num_heads: int) -> nn.Sequential:
    wide = named(
        norm=nn.LayerNorm(width),
        fc=nn.Linear(width, 4 * width),
        gelu=nn.GELU(approximate="tanh"),
        out=nn.Linear(4 * width, width),
    )
    attention = named(norm=nn.LayerNorm(width), attend=CausalAttention(width, num_heads))
    return named(attention=Residual(attention, nn.Identity()), mlp=Residual(wide, nn.Identity()))


def _start(model: nn.Module, num_layers: int) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" not in name:
            feeds_sum = name.endswith("out.weight")
            nn.init.normal_(parameter, std=_STD / math.sqrt(2 * num_layers) if feeds_sum else _STD)
