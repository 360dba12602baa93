"""The log-determinant from a sub-sample, which seed 002 (section 4.2) leaves to future work: why it errs, a correction.

For the Gauss-Newton matrix G = mean of G_i = R_i' R_i over all images and G_B that of B images drawn from them with
replacement, F(B) = E log |G_B + d I| is below log |G + d I|, for the logarithm of a determinant is concave. By the
matrix determinant lemma one image more changes it by

    F(B + 1) - F(B)  ~  mean_i [ -log |I - M_i| - Tr M_i ],      M_i = R_i (G_B + d I)^{-1} R_i' / B

which falls as 1 / B^2 where the images share their directions (M_i small) and as 1 / B where each has its own (M_i near
1). Both are F(B) = F - c / (B + b). Three values give the three unknowns, and the sub-sample's own halves and quarters
have them: with u = F(B) - F(B/2) and r = u / (F(B/2) - F(B/4)),

    F  =  F(B) + u (1 + r) / (2 - r)         ("1 / (B + b)");    b = 0 is r = 1 / 2, Richardson's 2 F(B) - F(B/2)

Beside it is what the paper suggests, a correction of moments, in two forms: eigenvalues drawn to their mean until the
second moment is that of all images ("two moments": Tr G_1 G_2 of the independent halves has no bias), and noise
independent of direction as in the additive model of equation 10, whose second-order term is +Tr(X^2) (Tr Q)^2 / 2 P^2
with Q = (G_B + d I)^{-1} ("isotropic noise").
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..operators.base import full_precision
from ..risk import Params
from ..space import random_uniform
from .data.images import Data
from .experiment import Rows

METHODS = ("none", "two moments", "isotropic noise", "1 / B", "1 / (B + b)")


def pooled(X: Tensor) -> Tensor:
    """Images (N, 784) as means over blocks of 4 x 4 pixels, (N, 49).

    Example:
        >>> pooled(torch.ones(2, 784)).shape
        torch.Size([2, 49])
    """
    return X.view(-1, 7, 4, 7, 4).mean((2, 4)).flatten(1)


def roots(params: Params, X: Tensor) -> Tensor:
    """R_i with R_i' R_i the Gauss-Newton matrix of an image under cross-entropy, (N, classes, dim).

    For probabilities p and s = sqrt(p) the rows of S = diag(s) - s p' have S'S = diag(p) - p p', and R_i = S J_i.

    Args:
        params: Of Linear layers with ReLU between, each a weight and then a bias.
        X: Images (N, inputs).

    Example:
        >>> params = {"weight": torch.zeros(2, 1), "bias": torch.zeros(2)}
        >>> R = roots(params, torch.tensor([[2.0]]))[0]
        >>> (R.T @ R)[:2, :2].tolist()  # x^2 (diag(p) - p p')
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    names = list(params)
    layers = list(zip(names[::2], names[1::2], strict=True))
    inputs = [X]
    for weight, bias in layers[:-1]:
        inputs.append((inputs[-1] @ params[weight].mT + params[bias]).relu())
    z = inputs[-1] @ params[layers[-1][0]].mT + params[layers[-1][1]]
    s = z.softmax(1).sqrt()
    delta = torch.diag_embed(s) - s[:, :, None] * s.square()[:, None, :]  # (N, roots, outputs)
    parts: list[Tensor] = []
    for (weight, _), h in zip(reversed(layers), reversed(inputs), strict=True):
        parts = [(delta[..., None] * h[:, None, None]).flatten(2), delta, *parts]
        delta = (delta @ params[weight]) * (h > 0)[:, None]
    return torch.cat(parts, dim=2)


class SubSample:
    """The Gram matrices of a sub-sample, its halves and its quarters, which serve every shift.

    Args:
        R: Roots (B, classes, dim) of its images.

    Raises:
        ValueError: If the sub-sample does not divide into quarters.

    Example:
        >>> sample = SubSample(torch.eye(3).expand(8, 3, 3))  # all images alike: nothing to correct
        >>> {round(value, 5) for value in sample.corrected(1.0).values()} == {round(3 * math.log(2.0), 5)}
        True
    """

    def __init__(self, R: Tensor) -> None:
        num, _, self.dim = R.shape
        if num < 4 or num % 4:
            raise ValueError(f"a sub-sample is cut into quarters: its size must be a multiple of 4, got {num}")
        self.grams = [[_gram(part) for part in R.split(num // q)] for q in (1, 2, 4)]
        whole = self.grams[0][0]
        first, second = (part.flatten(0, 1).double() for part in R.split(num // 2))
        unbiased = float((first @ second.mT).square().sum()) / (num // 2) ** 2  # Tr G_1 G_2
        square = float(whole.square().sum())
        self.mean, self.excess = float(whole.diagonal().sum()) / self.dim, max(square - unbiased, 0.0)
        spread = self.dim * self.mean**2
        self.shrunk = min(math.sqrt(max(unbiased - spread, 0.0) / max(square - spread, 1e-300)), 1.0)

    def corrected(self, shift: float) -> dict[str, float]:
        """log |G + shift I| of all images by each of `METHODS`; "none" is that of the sub-sample as it is."""
        values = [sum(_log_determinant(gram, shift, self.dim) for gram in grams) / len(grams) for grams in self.grams]
        whole = self.grams[0][0]
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(_shifted(whole, shift)))
        resolvent = float(inverse.diagonal().sum()) + (self.dim - len(whole)) / shift
        drawn_in = shift + (1 - self.shrunk) * self.mean
        return {
            "none": values[0],
            "two moments": _log_determinant(self.shrunk * whole, drawn_in, self.dim),
            "isotropic noise": values[0] + 0.5 * self.excess * (resolvent / self.dim) ** 2,
            "1 / B": 2 * values[0] - values[1],
            "1 / (B + b)": extrapolate(values[0], values[1], values[2]),
        }


def extrapolate(whole: float, half: float, quarter: float) -> float:
    """F from F(B), F(B/2) and F(B/4), where F(B) = F - c / (B + b); NaN where no such curve rises through them.

    Example:
        >>> extrapolate(*(5 - 12 / (B + 4) for B in (8, 4, 2)))
        5.0
    """
    rise, before = whole - half, half - quarter
    if abs(rise) <= 1e-9 * abs(whole):
        return whole
    ratio = rise / before if before else math.inf
    return whole + rise * (1 + ratio) / (2 - ratio) if 0 < ratio < 2 else math.nan


def _gram(R: Tensor) -> Tensor:
    """R R' / N or R'R / N in float64, whichever is smaller; their eigenvalues but 0 are the same."""
    flat = R.flatten(0, 1).double()
    return (flat @ flat.mT if len(flat) < flat.shape[1] else flat.mT @ flat) / len(R)


def _log_determinant(gram: Tensor, shift: float, dim: int) -> float:
    root = torch.linalg.cholesky(_shifted(gram, shift))
    return 2 * float(root.diagonal().log().sum()) + (dim - len(gram)) * math.log(shift)


def _shifted(gram: Tensor, shift: float) -> Tensor:
    return gram + shift * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


@full_precision()
def study(
    params: Params, data: Data, sizes: Sequence[int], levels: Sequence[float], repeats: int, seed: int
) -> Rows:  # fmt: skip
    """Errors of every method on sub-samples of every size, at shifts that are `levels` of lambda_1.

    Returns:
        For each size and level the truth, log |G / d + I|, and for each method its errors over the sub-samples.

    Example:
        >>> params = {"weight": torch.zeros(2, 1), "bias": torch.zeros(2)}
        >>> (row,) = study(params, (torch.ones(6, 1), torch.arange(6)), sizes=[4], levels=[1.0], repeats=2, seed=0)
        >>> round(row["truth"], 4) == round(math.log(2.0), 4), row["errors"]["none"]  # all images alike
        (True, [0.0, 0.0])
    """
    X = data[0]
    dim = sum(p.numel() for p in params.values())
    whole = torch.zeros(dim, dim, dtype=torch.float64, device=X.device)
    for part in X.split(500):
        flat = roots(params, part).flatten(0, 1)
        whole += (flat.mT @ flat) / len(X)
    top = float(torch.linalg.eigvalsh(whole)[-1])
    shifts = {level: level * top for level in levels}
    truths = {level: _log_determinant(whole, shift, dim) for level, shift in shifts.items()}
    rows: Rows = []
    for size in sizes:
        errors = {level: {name: [0.0] * repeats for name in METHODS} for level in levels}
        for repeat in range(repeats):
            drawn = random_uniform(size, ("sub-sample", seed, size, repeat), X.device).mul(len(X)).long()
            sample = SubSample(roots(params, X[drawn]))
            for level, shift in shifts.items():
                for name, value in sample.corrected(shift).items():
                    errors[level][name][repeat] = float(f"{value - truths[level]:.5g}")
        rows += [
            {"kind": "logdet", "seed": seed, "dim": dim, "images": len(X), "size": size, "level": level,
             "lambda_max": float(f"{top:.6g}"), "errors": errors[level],
             "truth": float(f"{truths[level] - dim * math.log(shifts[level]):.6g}")}
            for level in levels
        ]  # fmt: skip
    return rows
