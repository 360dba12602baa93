"""The loss along lines and planes, against the same network called by hand at the same weights."""

import copy
import math

import pytest
import torch
from cases import make, mlp, problem, truth
from torch import Tensor, nn

import ritz
from ritz.landscape import (
    eigenvector_directions,
    filter_normalised,
    interpolate,
    line,
    plane,
    plane_through,
    random_direction,
)


def by_hand(risk: ritz.Risk, loss: nn.Module, vector: Tensor, buffers: dict[str, Tensor] | None = None) -> Tensor:
    """Torch's own mean loss of a copy of the model with these weights, in evaluation mode, all samples at once."""
    model = copy.deepcopy(risk.model).eval()
    model.load_state_dict({**model.state_dict(), **risk.space.split(vector), **(buffers or {})})
    X, y = (torch.cat(parts) for parts in zip(*(batch.data for batch in risk.batches), strict=True))
    return loss(model(X), y).detach()


def flat(risk: ritz.Risk) -> Tensor:
    return risk.space.join(risk.params())


def conv_norm(seed: int) -> nn.Module:
    """A network with BatchNorm, its statistics as after some training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.3, 2.0)
    return model


def norm_risk(seed: int = 0, **options: object) -> ritz.Risk:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        data = torch.randn(12, 4), torch.randint(3, (12,))
    return ritz.Risk(conv_norm(seed), nn.CrossEntropyLoss(), data, **{"batch_size": 5, **options})


class Double(nn.Module):
    """One weight with two minima, 1 and -1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w**2 - 1).square() * x


# ------------------------------------------------------------------------------------------------- directions


def test_a_random_direction_has_unit_length_and_a_seed():
    risk = problem("mlp_mse").risk()
    d = random_direction(risk, 3)
    assert float(d.norm()) == pytest.approx(1.0)
    assert torch.equal(d, random_direction(risk, 3))
    assert not torch.allclose(d, random_direction(risk, 4))


def filters(weight: Tensor, module: nn.Module) -> list[Tensor]:
    """Each output unit's weights, cut out one by one."""
    if not isinstance(module, nn.ConvTranspose2d):
        return list(weight)
    group_in, group_out = weight.shape[0] // module.groups, weight.shape[1]
    return [weight[g * group_in : (g + 1) * group_in, o] for g in range(module.groups) for o in range(group_out)]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 4),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(4, 6, 3),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.Bilinear(3, 2, 4),
        nn.Embedding(5, 3),
    ],
    ids=lambda layer: f"{type(layer).__name__}-{getattr(layer, 'groups', 1)}",
)
def test_every_filter_of_a_direction_has_the_norm_of_that_of_the_weights(layer):
    risk = ritz.Risk(layer, nn.MSELoss(), (torch.ones(1), torch.ones(1)))  # never called
    d = risk.space.split(filter_normalised(risk, 1))["weight"]
    weight = layer.weight.detach()
    pairs = zip(filters(d, layer), filters(weight, layer), strict=True)
    assert all(float(a.norm()) == pytest.approx(float(b.norm())) for a, b in pairs)
    assert not torch.allclose(d, weight)


def test_one_dimensional_tensors_stay_or_move_as_one_filter():
    risk = norm_risk()
    zero, kept = (risk.space.split(filter_normalised(risk, biases=kept)) for kept in (False, True))
    for name, p in risk.params().items():
        if p.ndim == 1:
            assert not zero[name].any()
            assert float(kept[name].norm()) == pytest.approx(float(p.norm()))
        else:
            assert torch.equal(zero[name], kept[name])


def test_a_scalar_stays_or_moves_by_its_size():
    class Tempered(nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.temperature = nn.Parameter(torch.tensor(-3.0))

        def forward(self, x):
            return self.temperature * super().forward(x)

    risk = ritz.Risk(Tempered(), nn.MSELoss(), (torch.ones(1, 2), torch.ones(1, 1)))
    zero, moved = (risk.space.split(filter_normalised(risk, biases=kept))["temperature"] for kept in (False, True))
    assert (float(zero), float(moved.abs())) == (0.0, pytest.approx(3.0))


def test_a_shared_weight_has_one_part_in_a_direction():
    risk = problem("language").risk()
    d = filter_normalised(risk)
    assert len(d) == sum(p.numel() for p in risk.model.parameters())  # torch counts shared ones once
    weight = risk.space.split(d)["embedding.weight"]
    torch.testing.assert_close(weight.norm(dim=1), risk.model.output.weight.norm(dim=1).detach())


def test_a_filter_of_zeros_does_not_move():
    model = nn.Linear(3, 2, bias=False)
    model.weight.data[0] = 0
    d = filter_normalised(ritz.Risk(model, nn.MSELoss(), (torch.ones(1, 3), torch.ones(1, 2)))).reshape(2, 3)
    assert not d[0].any()
    assert d[1].any()


def test_a_picture_along_filter_normalised_directions_does_not_see_a_rescaling_of_layers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False))
        data = torch.randn(9, 4), torch.randint(3, (9,))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(100)
        other[2].weight.div_(100)
    seen = [ritz.Risk(m, nn.CrossEntropyLoss(), data) for m in (model, other)]
    first, second = (line(risk, filter_normalised(risk), num=5).losses for risk in seen)
    torch.testing.assert_close(first, second)
    first, second = (line(risk, random_direction(risk), num=5).losses for risk in seen)
    assert not torch.allclose(first, second, rtol=0.1)


def test_directions_of_eigenvectors_are_those_of_the_dense_matrix():
    H = truth("mlp_mse", "Hessian")
    values, vectors = torch.linalg.eigh(H)
    rows = eigenvector_directions(ritz.Hessian(problem("mlp_mse").risk()), 2, "both", tol=1e-8)
    torch.testing.assert_close((rows @ vectors[:, [-1, 0]]).diagonal().abs(), torch.ones(2))
    assert (rows.max(1).values == rows.abs().max(1).values).all()
    assert values[0] < 0  # so that both ends are not the same end


def test_a_direction_in_which_nothing_moves_is_refused():
    with pytest.raises(ValueError, match=r"no filter to normalise.*biases=True"):
        filter_normalised(problem("mlp_relu").risk(params="*.bias"))


# ------------------------------------------------------------------------------------------------------ lines


@pytest.mark.parametrize("name", ["mlp_relu", "mlp_weighted", "mlp_soft", "residual", "conv"])
def test_losses_along_a_line_are_those_of_the_network_at_those_weights(name):
    case = problem(name)
    risk = case.risk()
    d = random_direction(risk, 2)
    found = line(risk, d, radius=2.0, num=5)
    expected = torch.stack([by_hand(risk, case.loss, flat(risk) + t * d) for t in found.coordinates])
    torch.testing.assert_close(found.losses, expected)
    assert found.coordinates.tolist() == [-2.0, -1.0, 0.0, 1.0, 2.0]


def test_errors_are_the_share_of_wrong_labels():
    case = problem("mlp_relu")
    risk = case.risk()
    d = random_direction(risk)
    found = line(risk, d, radius=3.0, num=5)
    X, y = case.data
    for t, error in zip(found.coordinates, found.errors, strict=True):
        model = copy.deepcopy(case.model)
        model.load_state_dict(risk.space.split(flat(risk) + t * d))
        assert float(error) == pytest.approx(float((model(X).argmax(1) != y).double().mean()))
    assert 0 < float(found.errors.max()) <= 1


def test_a_mistake_counts_once_whatever_the_weight_of_its_class():
    case = problem("mlp_relu")
    X, y = case.data
    weights = torch.arange(1.0, 1.0 + int(y.max()) + 1, dtype=X.dtype) ** 3
    risk = ritz.Risk(case.model, nn.CrossEntropyLoss(weight=weights), case.data)
    wrong = (case.model(X).argmax(1) != y).double().mean()
    assert float(line(risk, random_direction(risk), num=3).errors[1]) == pytest.approx(float(wrong))
    assert ritz.measure(risk, measures=["train_error"])["train_error"].value == pytest.approx(float(wrong))


def test_ignored_items_are_neither_right_nor_wrong():
    found = line(problem("language").risk(), random_direction(problem("language").risk()), num=3)
    wrong = found.errors[1] * 15  # 15 targets are not padding
    assert float(wrong) == pytest.approx(round(float(wrong)))


@pytest.mark.parametrize("name", ["mlp_mse", "mlp_soft", "mlp_custom"])
def test_a_loss_without_labels_has_no_errors(name):
    risk = problem(name).risk()
    assert line(risk, random_direction(risk), num=3, derivatives=False).errors is None


@pytest.mark.parametrize(("label", "known"), [(1.0, True), (0.5, False)])
def test_two_classes_of_one_output_have_errors_where_all_labels_are_hard(label, known):
    y = torch.tensor([[0.0], [1.0], [0.0], [label]])
    risk = ritz.Risk(nn.Linear(2, 1), nn.BCEWithLogitsLoss(), (torch.ones(4, 2), y), batch_size=2)
    errors = line(risk, torch.ones(3), radius=9.0, num=3).errors
    assert (None if errors is None else errors[[0, 2]].tolist()) == ([0.5, 0.5] if known else None)


def test_an_opaque_loss_has_a_line_too():
    case = problem("mlp_mse")
    risk = ritz.Risk(
        case.model, data=case.batches, batch_loss=lambda m, b: ((m(b[0]) - b[1]).square().mean(1).sum(), len(b[0]))
    )
    d = random_direction(risk)
    found = line(risk, d, num=3)
    assert found.errors is None
    torch.testing.assert_close(found.losses, line(case.risk(), d, num=3).losses)


def test_one_class_has_no_errors():
    risk = ritz.Risk(nn.Linear(2, 1), nn.CrossEntropyLoss(), (torch.ones(3, 2), torch.zeros(3, dtype=torch.long)))
    assert line(risk, torch.ones(3), num=3).errors is None


@pytest.mark.parametrize("name", ["mlp_mse", "residual", "attention"])
def test_curvature_and_slope_are_those_of_the_dense_matrix(name):
    case = problem(name)
    risk = case.risk()
    d = 3 * random_direction(risk, 1)
    found = line(risk, d, grid=(-1e-3, 0.0, 1e-3))
    assert float(found.curvature) == pytest.approx(float(d @ truth(name, "Hessian") @ d))
    assert float(found.slope) == pytest.approx(float(d @ risk.gradient()))
    assert float(found.second_difference) == pytest.approx(float(found.curvature), rel=1e-4)
    assert found.norm == pytest.approx(3.0)


def test_the_second_difference_of_a_parabola_is_exact_on_any_grid():
    model = nn.Linear(2, 1)
    risk = ritz.Risk(model, nn.MSELoss(), (torch.randn(5, 2), torch.randn(5, 1)))
    d = torch.tensor([1.0, -2.0, 0.5])
    found = line(risk, d, grid=[-3.0, -0.5, 0.0, 2.0])
    assert float(found.second_difference) == pytest.approx(float(found.curvature))


@pytest.mark.parametrize("grid", [[0.0, 1.0], [-1.0, 1.0], [-1.0, 0.0]])
def test_a_grid_without_neighbours_of_zero_has_no_difference(grid):
    risk = problem("mlp_mse").risk()
    found = line(risk, random_direction(risk), grid=grid, derivatives=False)
    assert found.slope is None
    assert found.curvature is None
    with pytest.raises(ValueError, match="needs a grid with a point at 0 and neighbours"):
        _ = found.second_difference


def test_a_loss_that_is_not_finite_is_infinite_in_the_picture_and_no_error():
    risk = norm_risk(dtype=torch.float32)
    found = line(risk, filter_normalised(risk), radius=1e38, num=5, derivatives=False)
    assert found.losses[[0, 1, 3, 4]].isinf().all()
    assert float(found.losses[2]) == pytest.approx(risk.loss())
    assert not found.losses.isnan().any()
    assert not found.errors.isnan().any()


def test_batch_statistics_are_those_of_the_weights_on_the_line():
    risk = norm_risk(mode="train", batch_size=12)
    d = random_direction(risk)
    found = line(risk, d, num=3)
    model = copy.deepcopy(risk.model).train()
    model.load_state_dict({**model.state_dict(), **risk.space.split(flat(risk) + d)})
    X, y = next(iter(risk.batches)).data
    assert float(found.losses[2]) == pytest.approx(nn.functional.cross_entropy(model(X), y).item())


def test_a_point_costs_one_forward_pass_over_the_data():
    calls = []

    class Counted(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    data = torch.randn(10, 2), torch.randn(10, 1)
    risk = ritz.Risk(Counted(2, 1), nn.MSELoss(), data, batch_size=5)
    risk.check()
    calls.clear()
    line(risk, torch.ones(3), num=21, derivatives=False)
    assert sum(calls) == 21 * 10 + 1  # and a look at one sample, for classes


# ---------------------------------------------------------------------------------------------- interpolation


def test_the_ends_of_an_interpolation_are_the_two_solutions():
    risk, other = norm_risk(0), conv_norm(1)
    found = interpolate(risk, other.state_dict(), num=5, over=0.5)
    assert found.coordinates.tolist() == [-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    X, y = (torch.cat(parts) for parts in zip(*(batch.data for batch in risk.batches), strict=True))
    assert float(found.losses[2]) == pytest.approx(risk.loss())
    assert float(found.losses[6]) == pytest.approx(nn.functional.cross_entropy(other.eval()(X), y).item())
    vector = risk.space.join(dict(other.named_parameters())).detach()
    assert found.distance == pytest.approx(float((vector - flat(risk)).norm()))


def test_statistics_move_with_the_weights_where_they_are_given():
    risk, other = norm_risk(0), conv_norm(1)
    loss, theirs = nn.CrossEntropyLoss(), dict(other.named_parameters())
    middle = ((risk.space.join(theirs) + flat(risk)) / 2).detach()
    halfway = {
        name: (risk.model.state_dict()[name] + buffer) / 2
        for name, buffer in other.named_buffers()
        if buffer.is_floating_point()
    }
    given = interpolate(risk, other.state_dict(), num=3).losses[1]
    assert float(given) == pytest.approx(float(by_hand(risk, loss, middle, halfway)))
    absent = interpolate(risk, theirs, num=3).losses[1]
    assert float(absent) == pytest.approx(float(by_hand(risk, loss, middle)))
    assert float(given) != pytest.approx(float(absent))


def test_a_risk_at_other_weights_and_statistics_is_an_end_too():
    risk, other = norm_risk(0), conv_norm(1)
    moved = risk.at(other.state_dict())
    found = interpolate(moved, risk.model.state_dict(), num=3)
    back = interpolate(risk, other.state_dict(), num=3)
    torch.testing.assert_close(found.losses.flip(0), back.losses)


def test_beyond_an_end_statistics_stay_those_of_the_end():
    risk, other = norm_risk(0), conv_norm(1)
    other[1].running_var.fill_(1e-3)  # beyond it a variance would be negative
    found = interpolate(risk, other.state_dict(), num=3, over=1.0)
    vector = 2 * risk.space.join(dict(other.named_parameters())).detach() - flat(risk)
    expected = by_hand(risk, nn.CrossEntropyLoss(), vector, dict(other.named_buffers()))
    assert float(found.losses[-1]) == pytest.approx(float(expected))


def test_weights_that_are_not_chosen_are_part_of_the_way():
    whole, part = norm_risk(), norm_risk(params="3.*")
    other, third = (conv_norm(seed).state_dict() for seed in (1, 2))
    every, found = (interpolate(risk, other, num=3, over=0.5) for risk in (whole, part))
    assert found.distance == pytest.approx(every.distance)
    torch.testing.assert_close(found.losses, every.losses)
    through = plane_through(part, other, third, num=3)
    torch.testing.assert_close(through.points, plane_through(whole, other, third, num=3).points)


def test_the_barrier_is_the_rise_above_the_chord():
    risk = ritz.Risk(Double(), lambda out, y: out.mean() + 0 * y.mean(), (torch.ones(2, 1), torch.ones(2, 1)))
    found = interpolate(risk, torch.tensor([-1.0]), num=21)
    assert float(found.barrier) == pytest.approx(1.0)
    tilted = interpolate(risk, torch.tensor([-1.5]), num=201)  # from loss 0 to 1.5625
    t = torch.linspace(0, 1, 201)
    rise = ((1 - 2.5 * t).square() - 1).square() - t * 1.5625
    assert float(tilted.barrier) == pytest.approx(float(rise.max()))
    assert found.barrier.exact
    assert "error" not in found.barrier.parts


def test_the_barrier_of_a_convex_loss_is_zero():
    data = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    risk = ritz.Risk(nn.Linear(2, 3), nn.CrossEntropyLoss(), data)
    barrier = interpolate(risk, torch.randn(9, generator=torch.Generator().manual_seed(1)), num=7).barrier
    assert float(barrier) == 0.0
    assert set(barrier.parts) == {"loss", "error"}


def test_a_barrier_over_an_infinite_loss_is_infinite():
    class Pole(nn.Linear):
        def forward(self, x):
            return x / self.weight

    model = Pole(1, 1, bias=False)
    nn.init.ones_(model.weight)
    risk = ritz.Risk(model, nn.MSELoss(), (torch.ones(2, 1), torch.zeros(2, 1)))
    assert float(interpolate(risk, torch.tensor([-1.0]), num=3).barrier) == math.inf
    assert float(interpolate(risk, torch.tensor([-1.0]), num=4).barrier) == pytest.approx(8.0)  # 1 / w^2 at 1 / 3


def test_a_state_dict_that_names_shared_weights_twice_is_understood():
    risk = make("language").risk()
    other = make("language", seed=1).model
    assert {"embedding.weight", "output.weight"} <= set(other.state_dict())
    found = interpolate(risk, other.state_dict(), num=3)
    vector = risk.space.join(dict(other.named_parameters())).detach()
    assert float(found.losses[2]) == pytest.approx(risk.at(vector).loss())


@pytest.mark.parametrize(
    "rename",
    [
        lambda state: {f"module.{name}": x for name, x in state.items()},  # of a data-parallel model
        lambda state: {f"_orig_mod.{name}": x for name, x in state.items()},  # of a compiled one
        lambda state: {name: x for name, x in state.items() if name != "embedding.weight"},  # tied ones saved once
    ],
)
def test_another_solution_goes_by_whatever_names_its_weights_have(rename):
    risk, other = make("language").risk(), make("language", seed=1).model.state_dict()
    wanted, named = interpolate(risk, other, num=3), rename(other)
    assert torch.equal(interpolate(risk, named, num=3).losses, wanted.losses)
    assert torch.equal(
        plane_through(risk, named, other | {"norm.bias": other["norm.bias"] + 1}, num=3).losses[0, 0],
        plane_through(risk, other, other | {"norm.bias": other["norm.bias"] + 1}, num=3).losses[0, 0],
    )
    distances = [ritz.measure(risk, init=init, measures=["distance"])["distance"].value for init in (named, other)]
    assert distances[0] == distances[1] > 0


# ----------------------------------------------------------------------------------------------------- planes


def test_a_plane_holds_the_lines_along_its_directions():
    risk = problem("mlp_relu").risk()
    d, e = filter_normalised(risk, 0), filter_normalised(risk, 1)
    found = plane(risk, d, e, radius=(1.0, 2.0), num=(5, 3))
    assert found.losses.shape == found.errors.shape == (5, 3)
    torch.testing.assert_close(found.losses[:, 1], line(risk, d, num=5).losses)
    torch.testing.assert_close(found.losses[2], line(risk, e, radius=2.0, num=3).losses)
    corner = by_hand(risk, nn.CrossEntropyLoss(), flat(risk) + d - 2 * e)
    assert float(found.losses[4, 0]) == pytest.approx(float(corner))
    assert found.cosine == pytest.approx(float(d @ e / d.norm() / e.norm()))


def test_the_minimum_of_a_plane_is_its_lowest_point():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    risk = ritz.Risk(model, nn.MSELoss(), (torch.eye(2), torch.tensor([[1.0], [-0.5]])))
    found = plane(risk, *torch.eye(2), grid=([-1.0, 0.0, 1.0], [-0.5, 0.0, 0.5, 2.0]))
    assert found.minimum == (1.0, -0.5, 0.0)


def test_a_plane_through_three_solutions_holds_them_at_their_distances():
    risk, loss = norm_risk(0), nn.CrossEntropyLoss()
    first, second = conv_norm(1), conv_norm(2)
    w, a = flat(risk), risk.space.join(dict(first.named_parameters())).detach()
    u = (a - w) / (a - w).norm()
    v = random_direction(risk)
    v = (v - (v @ u) * u) / (v - (v @ u) * u).norm()
    b = w + (a - w) / 2 + 1.5 * v  # above the middle, so that a grid of seven hits all three
    other = {**second.state_dict(), **risk.space.split(b)}
    found = plane_through(risk, first.state_dict(), other, num=7)
    torch.testing.assert_close(
        found.points, torch.tensor([[0.0, 0.0], [(a - w).norm(), 0.0], [(a - w).norm() / 2, 1.5]])
    )
    assert float(found.losses[1, 1]) == pytest.approx(risk.loss())
    for place, vector, model in (((5, 1), a, first), ((3, 5), b, second)):
        expected = by_hand(risk, loss, vector, dict(model.named_buffers()))  # with its own statistics
        assert float(found.losses[place]) == pytest.approx(float(expected))
    p, q = float(found.x[6]), float(found.y[4])
    flat_only = plane_through(risk, a, b, num=7)
    assert float(flat_only.losses[6, 4]) == pytest.approx(float(by_hand(risk, loss, w + p * u + q * v)))


# ------------------------------------------------------------------------------- results, figures, bad input


def pictures() -> dict[str, object]:
    risk = problem("mlp_relu").risk()
    d, e = filter_normalised(risk, 0), filter_normalised(risk, 1)
    a, b = flat(make("mlp_relu", 1).risk()), flat(make("mlp_relu", 2).risk())
    return {
        "line": line(risk, d, num=5),
        "far": line(norm_risk(dtype=torch.float32), torch.ones(norm_risk().dim), radius=1e38, num=5),
        "interpolation": interpolate(risk, a, num=5),
        "plane": plane(risk, d, e, num=5),
        "through": plane_through(risk, a, b, num=4),
    }


@pytest.mark.parametrize("name", ["line", "far", "interpolation", "plane", "through"])
def test_a_picture_loads_back_equal_and_draws_itself(name, tmp_path):
    picture = pictures()[name]
    assert ritz.load(picture.save(tmp_path / name)) == picture
    ax = picture.plot()
    assert ax.get_xlabel()
    assert picture.plot(ax) is ax
    ax.figure.savefig(tmp_path / "figure.png")


def test_no_errors_are_not_drawn_on_an_axis_of_hundredths_of_a_percent():
    torch.manual_seed(0)
    x = torch.tensor([[-1.0], [1.0]])
    risk = ritz.Risk(torch.nn.Linear(1, 2), torch.nn.CrossEntropyLoss(), (x, torch.tensor([0, 1])))
    sure = risk.at({"weight": torch.tensor([[-9.0], [9.0]]), "bias": torch.zeros(2)})
    ax = line(sure, random_direction(sure, 0), radius=0.1, num=5).plot()
    right = next(other for other in ax.figure.axes if other is not ax)
    assert right.get_ylim() == (0.0, 1.0)


def test_infinite_losses_are_gaps_in_a_figure():
    curve = pictures()["far"].plot().get_lines()[0].get_ydata()
    assert [math.isfinite(y) for y in curve] == [False, False, True, False, False]


def test_the_parabola_in_the_figure_is_that_of_slope_and_curvature():
    risk = problem("mlp_mse").risk()
    found = line(risk, random_direction(risk), radius=0.1, num=5)
    t, y = found.plot().get_lines()[1].get_data()
    expected = float(found.losses[2]) + float(found.slope) * t + float(found.curvature) * t**2 / 2
    drawn = [i for i in range(len(t)) if math.isfinite(y[i])]
    assert len(drawn) > 300
    assert y[drawn] == pytest.approx(expected[drawn])


def test_contours_of_a_plane_are_equally_spaced_in_the_logarithm():
    ax = pictures()["plane"].plot()
    levels = torch.as_tensor(ax.collections[0].levels)
    torch.testing.assert_close(levels.log().diff(), levels.log().diff().mean().expand(len(levels) - 1))


@pytest.mark.parametrize("shift", [0.0, -3.0])
def test_constant_and_negative_losses_can_be_drawn(shift):
    risk = ritz.Risk(Double(), lambda out, y: out.mean() + shift, (torch.ones(2, 1), torch.ones(2, 1)))
    line(risk, torch.ones(1), num=5).plot()
    model = mlp([2, 2, 1])
    risk = ritz.Risk(model, lambda out, y: shift * out.square().mean(), (torch.ones(2, 2), torch.ones(2, 1)))
    ax = plane(risk, random_direction(risk, 0), random_direction(risk, 1), num=3).plot()
    assert ax.get_xlim() == ax.get_ylim() == (-1.0, 1.0)  # where there is no contour too


def test_progress_counts_points():
    risk, seen = problem("mlp_relu").risk(), []
    other = torch.zeros(risk.dim)
    for run, total in (
        (lambda p: line(risk, random_direction(risk), num=3, progress=p), 3),
        (lambda p: interpolate(risk, other, num=4, over=0.4, progress=p), 6),
        (lambda p: plane(risk, random_direction(risk), random_direction(risk, 1), num=3, progress=p), 9),
        (lambda p: plane_through(risk, other, random_direction(risk), num=(2, 3), progress=p), 6),
    ):
        seen.clear()
        run(lambda done, of: seen.append((done, of)))
        assert seen == [(i + 1, total) for i in range(total)]


def test_the_model_is_left_as_it_was():
    risk = norm_risk()
    before = copy.deepcopy(risk.model.state_dict())
    state, training = torch.get_rng_state(), [m.training for m in risk.model.modules()]
    d = filter_normalised(risk)
    line(risk, d, num=3)
    interpolate(risk, conv_norm(1).state_dict(), num=3)
    plane(risk, d, random_direction(risk), num=3)
    assert all(torch.equal(before[name], t) for name, t in risk.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert training == [m.training for m in risk.model.modules()]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r, d: line(r, d[:-1]), r"flat vector \(dim=\d+,\), got"),
        (lambda r, d: line(r, [1.0]), "got list"),
        (lambda r, d: line(r, 0 * d), "finite and not zero"),
        (lambda r, d: line(r, d * math.nan), "finite and not zero"),
        (lambda r, d: line(r, d, num=4), "odd and at least 3.*got 4"),
        (lambda r, d: line(r, d, num=1), "odd and at least 3"),
        (lambda r, d: line(r, d, radius=0.0), "radius must be positive and finite, got 0"),
        (lambda r, d: line(r, d, radius=math.inf), "radius must be positive and finite"),
        (lambda r, d: line(r, d, radius=1.0, grid=[0.0, 1.0]), "either radius= or grid=, not both"),
        (lambda r, d: line(r, d, grid=[1.0, 0.0]), "finite numbers in ascending order"),
        (lambda r, d: line(r, d, grid=[1.0]), "at least two finite numbers"),
        (lambda r, d: plane(r, d, -2 * d), "parallel: they span a line"),
        (lambda r, d: plane(r, d, d.flip(0), num=(3, 3, 3)), "a pair, got 3"),
        (lambda r, d: interpolate(r, d, num=2), "num >= 3"),
        (lambda r, d: interpolate(r, d, over=-0.1), "over >= 0, got .* over=-0.1"),
        (lambda r, d: interpolate(r, d[:-1]), "flat vector"),
        (lambda r, d: interpolate(r, {}), "the other solution has no '0.weight'"),
        (lambda r, d: interpolate(r, {**r.params(), "x": d}), "no parameter or buffer named 'x'"),
        (lambda r, d: interpolate(r, {**r.params(), "0.weight": d}), "0.weight has shape"),
        (lambda r, d: plane_through(r, d, 2 * d - flat(r)), "lie on a line"),
        (lambda r, d: plane_through(r, flat(r), d), "lie on a line"),
        (lambda r, d: plane_through(r, d, d.flip(0), num=1), "at least 2, got 1"),
    ],
)
def test_bad_input_is_refused(call, message):
    risk = problem("mlp_relu").risk()
    with pytest.raises(ValueError, match=message):
        call(risk, random_direction(risk))


def test_a_solution_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="a state dict or a flat vector, got list"):
        interpolate(problem("mlp_relu").risk(), [1.0])


def test_a_solution_that_has_diverged_is_refused():
    risk = problem("mlp_relu").risk()
    with pytest.raises(ritz.errors.NonFiniteError, match="not finite"):
        interpolate(risk, torch.full((risk.dim,), math.nan))
