"""A loss as ritz knows it is torch's loss, and its matrices are those of double autograd in the outputs."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ritz
from ritz.errors import UnsupportedError
from ritz.losses import BinaryCrossEntropy, CallableLoss, CrossEntropy, SquaredError, as_loss, default_target
from ritz.space import random_uniform


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(*shape, classes=4, seed=1):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0])
SOFT = normal(5, 4, seed=3).softmax(-1)
SOME = torch.tensor([1, -100, 3, 0, -100])
COIN = labels(5, 3, classes=2, seed=5).double()

# name: (torch's loss, outputs, target, dimensions of the outputs that make one item)
CASES = {
    "cross-entropy": (nn.CrossEntropyLoss(), normal(5, 4), labels(5), (1,)),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), normal(5, 4), labels(5), (1,)),
    "ignore_index": (nn.CrossEntropyLoss(), normal(5, 4), SOME, (1,)),
    "ignore_index 2": (nn.CrossEntropyLoss(ignore_index=2), normal(5, 4), labels(5), (1,)),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), normal(5, 4), labels(5), (1,)),
    "all three": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), normal(5, 4), SOME, (1,)),
    "soft targets": (nn.CrossEntropyLoss(), normal(5, 4), SOFT, (1,)),
    "soft weighted": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), normal(5, 4), SOFT, (1,)),
    "bytes": (nn.CrossEntropyLoss(), normal(5, 4), labels(5).byte(), (1,)),
    "images": (nn.CrossEntropyLoss(weight=WEIGHTS), normal(3, 4, 2, 2), labels(3, 2, 2), (1,)),
    "mse": (nn.MSELoss(), normal(5, 3), normal(5, 3, seed=2), (1,)),
    "mse, one number": (nn.MSELoss(), normal(5), normal(5, seed=2), ()),
    "mse of images": (nn.MSELoss(), normal(3, 2, 2), normal(3, 2, 2, seed=2), (1, 2)),
    "bce": (nn.BCEWithLogitsLoss(), normal(5, 3), COIN, (1,)),
    "bce, soft": (nn.BCEWithLogitsLoss(), normal(5), SOFT[:, 0], ()),
    "bce, pos_weight": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS[:3]), normal(5, 3), COIN, (1,)),
    "bce, weight": (nn.BCEWithLogitsLoss(weight=WEIGHTS[:3], pos_weight=WEIGHTS[1:2]), normal(5, 3), COIN, (1,)),
    "huber": (nn.HuberLoss(delta=0.7), normal(5, 3), normal(5, 3, seed=2), (1,)),
    "quartic": (lambda o, y: (o - y).pow(4).sum(-1).mean(), normal(5, 3), normal(5, 3, seed=2), (1,)),
    "nll": (nn.NLLLoss(), normal(5, 4).log_softmax(-1), labels(5), (1,)),
    "kl": (nn.KLDivLoss(reduction="batchmean"), normal(5, 4).log_softmax(-1), SOFT, (1,)),
}
CLOSED = [name for name in CASES if name not in ("huber", "quartic", "nll", "kl")]
CURVED = [name for name in CASES if name != "nll"]


def case(name):
    theirs, out, y, over = CASES[name]
    return theirs, as_loss(theirs), out, (None, y), over


def per_item(x, over):
    """(batch, ...) as (items, size of one)."""
    rest = [d for d in range(x.ndim) if d not in over]
    return x.permute(*rest, *over).reshape(math.prod([x.shape[d] for d in rest]), -1)


def dense_hessian(loss, out, batch):
    flat = out.flatten().requires_grad_()
    (grad,) = torch.autograd.grad(loss.total(flat.view(out.shape), batch), flat, create_graph=True)
    if not grad.requires_grad:
        return torch.zeros(len(flat), len(flat))
    return torch.stack([torch.autograd.grad(g, flat, retain_graph=True)[0] for g in grad])


def dense_middle(loss, kind, out, batch, draws=None):
    units = torch.eye(out.numel()).reshape(-1, *out.shape)
    return torch.stack([loss.middle(kind, out, batch, u, draws).flatten() for u in units])


def outer_products(loss, out, batch, over):
    """sum_i w_i g_i g_i', with g_i the gradient of item i's own loss, by autograd of every item."""
    leaf = out.clone().requires_grad_()
    items = loss.items(leaf, batch)
    total = torch.zeros(out.numel(), out.numel())
    for value, weight in zip(items.loss, items.weight, strict=True):
        (g,) = torch.autograd.grad(value, leaf, retain_graph=True)
        total += weight.detach() * torch.outer(g.flatten(), g.flatten())
    return total


@pytest.mark.parametrize("name", CASES)
def test_total_over_weight_is_the_mean_of_torch(name):
    theirs, loss, out, batch, _ = case(name)
    torch.testing.assert_close(loss.total(out, batch) / loss.weight(out, batch), theirs(out, batch[1]))


@pytest.mark.parametrize("name", CASES)
def test_items_add_up_to_the_total(name):
    _, loss, out, batch, _ = case(name)
    items = loss.items(out, batch)
    torch.testing.assert_close((items.loss * items.weight).sum(), loss.total(out, batch))
    torch.testing.assert_close(items.weight.sum(), loss.weight(out, batch))


@pytest.mark.parametrize("name", CURVED)
def test_the_middle_of_the_ggn_is_the_hessian_in_the_outputs(name):
    _, loss, out, batch, _ = case(name)
    torch.testing.assert_close(dense_middle(loss, "ggn", out, batch), dense_hessian(loss, out, batch))


@pytest.mark.parametrize("name", CASES)
def test_the_middle_of_the_empirical_fisher_is_the_sum_of_outer_products(name):
    _, loss, out, batch, over = case(name)
    torch.testing.assert_close(dense_middle(loss, "empirical", out, batch), outer_products(loss, out, batch, over))


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("name", [name for name in CURVED if name != "kl"])
def test_outer_products_of_the_roots_add_up_to_the_hessian(name, chunk):
    _, loss, out, batch, _ = case(name)
    stacks = list(loss.roots(out, batch, chunk))
    assert all(len(stack) <= chunk for stack in stacks)
    roots = torch.cat(stacks)
    assert len(roots) == loss.num_roots(out, batch)
    # a root touches one item of every sample, and samples do not mix: put each on its own
    rows = torch.cat([torch.diag_embed(root.reshape(len(out), -1).T).permute(1, 2, 0).flatten(1) for root in roots])
    torch.testing.assert_close(rows.T @ rows, dense_hessian(loss, out, batch))


@pytest.mark.parametrize("name", CLOSED)
def test_draws_have_the_hessian_as_their_second_moment(name):
    _, loss, out, batch, over = case(name)
    num = 600

    def drawn(k):
        return loss.draw(out, batch, lambda count, stream: random_uniform(count, ("test", k, stream)))

    draws = torch.stack([drawn(k) for k in range(num)])
    torch.testing.assert_close(drawn(7), draws[7])  # keyed: the same again
    items = torch.stack([per_item(c, over) for c in draws])  # (S, items, size)
    outer = torch.einsum("sni,snj->nij", items, items) / num
    truth = per_item_hessians(dense_hessian(loss, out, batch), out, over)
    spread = torch.einsum("sni,snj->nij", items.square(), items.square()) / num
    assert ((outer - truth).abs() <= 5 * (spread / num).sqrt() + 1e-12).all()
    assert (items.mean(0).abs() <= 5 * (items.square().mean(0) / num).sqrt() + 1e-12).all()


def per_item_hessians(hessian, out, over):
    places = per_item(torch.arange(out.numel()).reshape(out.shape), over)
    return torch.stack([hessian[rows][:, rows] for rows in places])


def test_the_middle_of_the_fisher_is_the_mean_of_the_outer_products_of_the_draws():
    _, loss, out, batch, _ = case("images")
    draws = normal(3, *out.shape, seed=9)
    items = torch.stack([per_item(c, (1,)) for c in draws])
    truth = torch.einsum("sni,snj->nij", items, items) / 3
    dense = dense_middle(loss, "fisher", out, batch, draws)
    torch.testing.assert_close(per_item_hessians(dense, out, (1,)), truth)
    with pytest.raises(ValueError, match="needs drawn cotangents"):
        loss.middle("fisher", out, batch, out)


# ------------------------------------------------------------------------------------ layouts of cross-entropy


def test_classes_may_be_the_last_dimension():
    out, y = normal(2, 3, 5), labels(2, 3, classes=5)
    loss = as_loss(nn.CrossEntropyLoss())
    torch.testing.assert_close(loss.total(out, (None, y)), loss.total(out.movedim(2, 1), (None, y)))
    torch.testing.assert_close(loss.total(out, (None, y)) / 6, F.cross_entropy(out.flatten(0, 1), y.flatten()))


def test_a_layout_that_fits_twice_must_be_said():
    out, y = normal(2, 3, 3), labels(2, 3, classes=3)
    with pytest.raises(ValueError, match="dimension 1 and in the last; choose one"):
        CrossEntropy().total(out, (None, y))
    first, last = CrossEntropy(class_dim=1), CrossEntropy(class_dim=-1)
    torch.testing.assert_close(first.total(out, (None, y)) / 6, F.cross_entropy(out, y))
    torch.testing.assert_close(last.total(out, (None, y)) / 6, F.cross_entropy(out.mT, y))


@pytest.mark.parametrize("name", ["cross-entropy", "images"])
def test_margins_and_probabilities_are_those_of_the_definition(name):
    _, loss, out, (_, y), _ = case(name)
    items = loss.items(out, (None, y))
    logits, y = per_item(out, (1,)), y.flatten()
    torch.testing.assert_close(items.probabilities, logits.softmax(-1))
    for margin, f, label in zip(items.margin, logits, y, strict=True):
        torch.testing.assert_close(margin, f[label] - max(f[j] for j in range(4) if j != label))


def test_ignored_items_have_no_weight_and_no_curvature():
    _, loss, out, batch, _ = case("ignore_index")
    assert loss.items(out, batch).weight.tolist() == [1, 0, 1, 1, 0]
    assert not loss.middle("ggn", out, batch, normal(5, 4, seed=8))[[1, 4]].any()


@pytest.mark.parametrize(
    ("loss", "out", "y", "message"),
    [
        (
            CrossEntropy(),
            normal(3, 4),
            labels(3, 1),
            r"targets \(3, 1\) do not fit outputs \(3, 4\); labels must have shape \(3,\)",
        ),
        (CrossEntropy(), normal(3, 4, 2), labels(3, 5), r"labels must have shape \(3, 2\) or \(3, 4\)"),
        (CrossEntropy(), normal(3, 4), labels(3, 4), r"one-hot, make them soft targets, y\.float\(\)"),
        (CrossEntropy(), normal(3, 4), labels(3).double(), r"if they are labels, make them integers, y\.long\(\)"),
        (CrossEntropy(), normal(3), labels(3), r"needs outputs \(batch, classes, ...\), got \(3,\); give batches"),
        (CrossEntropy(), normal(3, 4), SOFT, r"soft targets \(5, 4\) must have the shape of the outputs \(3, 4\)"),
        (CrossEntropy(WEIGHTS[:3]), normal(3, 4), labels(3), r"class weights must have shape \(4,\).*got \(3,\)"),
        (CrossEntropy(class_dim=2), normal(2, 3, 5), labels(2, 5), r"targets \(2, 5\) do not fit"),
        (SquaredError(), normal(3, 1), normal(3), r"targets \(3,\) must have the shape of the outputs \(3, 1\)"),
        (BinaryCrossEntropy(), normal(3), normal(3, 1), r"targets \(3, 1\) must have the shape of the outputs \(3,\)"),
        (BinaryCrossEntropy(torch.ones(5, 1)), normal(5, 3), COIN, r"differ between the samples of a batch"),
        (
            CallableLoss(lambda o, y: (o - y) ** 2),
            normal(3, 1),
            normal(3, 1),
            r"one number.*got shape \(3, 1\)",
        ),
        (CallableLoss(lambda o, y: 1.0), normal(3, 1), normal(3, 1), "got float"),
    ],
)
def test_what_does_not_fit_is_refused(loss, out, y, message):
    with pytest.raises(ValueError, match=message):
        loss.total(out, (None, y))


@pytest.mark.parametrize("label", [4, -1, 99])
def test_a_label_that_is_no_class_is_refused_in_whatever_batch(label):
    X, y = normal(9, 2), labels(9)
    y[7] = label
    risk = ritz.Risk(nn.Linear(2, 4), nn.CrossEntropyLoss(), (X, y), batch_size=4)
    with pytest.raises(ValueError, match=f"label {label} is not one of the 4 classes"):
        risk.check()


# ----------------------------------------------------------------------------------------- from torch's losses


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, nn.MSELoss, nn.BCEWithLogitsLoss, nn.HuberLoss])
def test_a_loss_that_is_not_a_mean_is_refused(make, reduction):
    with pytest.raises(ValueError, match=f"reduction='{reduction}'.*N \\* H"):
        as_loss(make(reduction=reduction))


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (F.cross_entropy, CrossEntropy),
        (F.mse_loss, SquaredError),
        (F.binary_cross_entropy_with_logits, BinaryCrossEntropy),
        (F.l1_loss, CallableLoss),
    ],
)
def test_functions_of_torch_are_known(function, kind):
    assert isinstance(as_loss(function), kind)


def test_a_loss_of_ritz_is_taken_as_it_is_or_with_the_target_that_is_said():
    own = CrossEntropy(label_smoothing=0.1)
    assert as_loss(own) is own
    aimed = as_loss(own, lambda batch: batch["z"])
    assert aimed.label_smoothing == 0.1
    assert float(aimed.total(torch.zeros(1, 2), {"z": torch.tensor([0])})) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (nn.CrossEntropyLoss, TypeError, r"the class CrossEntropyLoss; give an instance"),
        (CrossEntropy, TypeError, r"the class CrossEntropy; give an instance"),
        (nn.NLLLoss(weight=WEIGHTS), ValueError, "class weights is not supported"),
        ("mse", TypeError, "a callable.*got 'mse'"),
    ],
)
def test_what_is_no_loss_is_refused(loss, error, message):
    with pytest.raises(error, match=message):
        as_loss(loss)


@pytest.mark.parametrize("function", [nn.NLLLoss(), F.nll_loss])
def test_the_ggn_of_a_loss_that_is_linear_in_its_input_is_refused(function):
    out, batch = normal(5, 4).log_softmax(-1), (None, labels(5))
    with pytest.raises(UnsupportedError, match=r"is linear in its input.*nn\.CrossEntropyLoss"):
        as_loss(function).middle("ggn", out, batch, out)


def test_ignored_targets_of_a_loss_that_is_not_known_are_refused():
    with pytest.raises(ValueError, match=r"weighted right only by nn\.CrossEntropyLoss"):
        as_loss(nn.NLLLoss()).total(normal(5, 4), (None, SOME))


def test_a_callable_has_no_fisher_and_says_so():
    loss = as_loss(nn.HuberLoss())
    for ask in (lambda: loss.draw(None, None, None), lambda: loss.middle("fisher", normal(2, 2), (0, normal(2, 2)), 0)):
        with pytest.raises(UnsupportedError, match=r"needs a likelihood.*ritz\.GGN or ritz\.EmpiricalFisher"):
            ask()


def test_a_loss_that_is_not_convex_has_no_roots():
    loss = as_loss(lambda out, y: (out - y).cos().mean())
    with pytest.raises(UnsupportedError, match="not convex in the outputs"):
        list(loss.roots(normal(5, 2), (None, normal(5, 2, seed=4)), 2))


def test_the_target_is_the_last_of_a_tuple_or_named_like_a_label():
    y = labels(3)
    for batch in ((0, y), [0, 0, y], {"x": 0, "labels": y}, {"y": y}):
        assert default_target(batch) is y
    with pytest.raises(ValueError, match=r"no target in a batch with keys \['x'\]; pass target="):
        default_target({"x": 0})
    with pytest.raises(ValueError, match=r"expected batches \(inputs, targets\).*got Tensor"):
        default_target(y)


@pytest.mark.parametrize(
    ("function", "keywords", "name"),
    [
        (F.cross_entropy, {"weight": WEIGHTS, "ignore_index": 2, "label_smoothing": 0.1}, "cross-entropy"),
        (F.binary_cross_entropy_with_logits, {"pos_weight": WEIGHTS[:3]}, "bce"),
        (F.mse_loss, {}, "mse"),
    ],
)
def test_keywords_that_are_set_before_are_known(function, keywords, name):
    _, out, y, _ = CASES[name]
    loss = as_loss(partial(function, **keywords))
    assert not isinstance(loss, CallableLoss)
    torch.testing.assert_close(loss.total(out, (None, y)) / loss.weight(out, (None, y)), function(out, y, **keywords))


def test_a_sum_that_is_set_before_is_refused_and_a_strange_keyword_is_left_to_the_function():
    with pytest.raises(ValueError, match="reduction='sum'"):
        as_loss(partial(F.cross_entropy, reduction="sum"))
    assert isinstance(as_loss(partial(F.mse_loss, target=torch.zeros(1))), CallableLoss)


def test_a_target_may_be_a_dictionary():
    """Several heads: the rows of all its tensors go to the items."""

    def heads(out, y):
        return F.cross_entropy(out[:, :3], y["kind"]) + F.smooth_l1_loss(out[:, 3:], y["box"])

    batch = {"x": normal(4, 2), "kind": labels(4, classes=3), "box": normal(4, 2, seed=2), "names": list("abcd")}
    loss, out = as_loss(heads, lambda batch: batch), normal(4, 5)
    items = loss.items(out, batch)
    assert items.loss.shape == (4,)
    torch.testing.assert_close((items.loss * items.weight).sum(), loss.total(out, batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_roots_of_any_callable_exist_in_few_digits(dtype):
    out, batch = normal(6, 5).to(dtype), (None, labels(6, classes=5))
    loss = as_loss(lambda out, y: F.nll_loss(out.log_softmax(-1), y))
    roots = torch.cat(list(loss.roots(out, batch, 2)))
    assert roots.dtype == dtype
    truth = as_loss(nn.CrossEntropyLoss()).middle("ggn", out.double(), batch, torch.ones(6, 5).double().cumsum(1))
    found = torch.einsum("cnd,cne,ne->nd", roots.double(), roots.double(), torch.ones(6, 5).double().cumsum(1))
    torch.testing.assert_close(found, truth, rtol=0, atol=40 * torch.finfo(dtype).eps)
