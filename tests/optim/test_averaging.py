"""The average of iterates against means taken by hand, in all the company that a model may keep."""

import copy
import functools
import io

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import ritz
from ritz.errors import NonFiniteError, NumericalWarning, UnsupportedError
from ritz.optim import KFAC, IterateAverage


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def walk(model: nn.Module, average: IterateAverage, counts: int, seed: int = 1) -> list[Tensor]:
    """A random walk of the weights, one count of the average after each move; the weights after each."""
    g, seen = torch.Generator().manual_seed(seed), []
    for _ in range(counts):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=g).to(p))
        average.step()
        seen.append(flat(model))
    return seen


def batch(size: int = 16, seed: int = 2) -> Tensor:
    return torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------ the mean


@pytest.mark.parametrize(("start", "every"), [(0, 1), (3, 1), (3, 2), (0, 4)])
def test_the_average_is_the_mean_of_every_so_many_iterates_beyond_the_start(start, every):
    model = network()
    average = IterateAverage(model, start, every)
    seen = walk(model, average, 11)
    chosen = [w for count, w in enumerate(seen, start=1) if count > start and (count - start) % every == 0]
    assert average.num_averaged == len(chosen)
    torch.testing.assert_close(flat(average.model), torch.stack(chosen).mean(0))
    assert torch.equal(flat(model), seen[-1])  # and the model goes its own way


def test_at_the_end_of_each_epoch_or_in_steps_it_is_the_same_average():
    """T_avg epochs of n steps: start = T_avg n and every = n."""
    model, other = network(), network()
    by_epoch, by_step = IterateAverage(model, start=2), IterateAverage(other, start=2 * 5, every=5)
    for epoch in range(4):
        for step in range(5):
            walk(other, by_step, 1, seed=10 * epoch + step)
    for epoch in range(4):
        for step in range(5):
            walk(model, IterateAverage(model, start=1), 1, seed=10 * epoch + step)
        by_epoch.step()
    assert by_epoch.num_averaged == by_step.num_averaged == 2
    assert torch.equal(flat(by_epoch.model), flat(by_step.model))


def test_it_is_the_average_of_torch():
    model = network()
    average, reference = IterateAverage(model), AveragedModel(model)
    for seed in range(5):
        walk(model, average, 1, seed)
        reference.update_parameters(model)
    assert torch.equal(flat(average.model), flat(reference.module))


def test_an_optimisers_parameters_are_averaged_without_a_model():
    model = network()
    optimizer = torch.optim.SGD([{"params": model[2].parameters(), "lr": 0.1}, {"params": [model[0].weight]}], lr=0.2)
    average = IterateAverage(optimizer)
    seen = walk(model, average, 4)
    before = flat(model)
    with average.swapped():
        mean = torch.stack(seen).mean(0)
        mean[12:16] = before[12:16]  # the first bias is nobody's
        torch.testing.assert_close(flat(model), mean)
    assert torch.equal(flat(model), before)
    with pytest.raises(UnsupportedError, match="knows no model: pass model="):
        _ = average.model
    named = IterateAverage(optimizer, model=model)
    walk(model, named, 1)
    assert torch.equal(flat(named.model), flat(model))


def test_weights_of_few_bits_are_added_up_in_float32():
    """In bfloat16 the mean of 300 ones and a 2 is 1 however often it is added up."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    average = IterateAverage(model)
    for count in range(300):
        nn.init.constant_(model.weight, 2.0 if count % 2 else 1.0)
        average.step()
    assert average.state_dict()["mean"]["weight"].dtype == torch.float32
    assert average.state_dict()["mean"]["weight"].item() == pytest.approx(1.5, rel=1e-6)
    assert average.model.weight.dtype == torch.bfloat16
    with average.swapped():
        assert model.weight.item() == 1.5
    assert model.weight.item() == 2.0


def test_tied_frozen_and_integer_parameters_come_along():
    model = network()
    model[2].weight = nn.Parameter(torch.randn(2, 4))
    model.tied = nn.Linear(4, 2, bias=False)
    model.tied.weight = model[2].weight
    model[0].bias.requires_grad_(False)
    model.codes = nn.Parameter(torch.arange(3), requires_grad=False)  # as of quantised weights
    average = IterateAverage(model)
    average.step()
    nn.init.zeros_(model[2].weight)
    average.step()
    assert average.model.tied.weight is average.model[2].weight
    assert torch.equal(average.model.codes, model.codes)
    assert not average.model[0].bias.requires_grad
    assert torch.equal(average.model[0].bias, model[0].bias)


def test_complex_weights_are_averaged():
    weight = torch.tensor([1 + 2j], requires_grad=True)
    average = IterateAverage(torch.optim.SGD([weight], lr=0.1))
    for value in (1 + 2j, 3 - 4j):
        with torch.no_grad():
            weight.fill_(value)
        average.step()
    with average.swapped():
        assert weight.item() == 2 - 1j


def test_weights_that_are_not_finite_are_refused_and_the_average_is_kept():
    model = network()
    average = IterateAverage(model)
    walk(model, average, 2)
    before = flat(average.model)
    with torch.no_grad():
        model[2].bias[0] = torch.inf
    with pytest.raises(NonFiniteError, match=r"'2.bias' is not finite after count 3"):
        average.step()
    assert average.num_averaged == 2
    assert torch.equal(flat(average.model), before)


# --------------------------------------------------------------------------------------------------- when to start


@pytest.mark.parametrize("mode", ["max", "min"])
def test_auto_starts_when_the_best_is_patience_values_ago(mode):
    model = network()
    average = IterateAverage(model, "auto", patience=2, mode=mode)
    sign = 1 if mode == "max" else -1
    seen, decided = [], []
    for value in (1.0, 3.0, 2.0, 3.5, 3.5, 3.0, 9.0, 1.0):
        seen += walk(model, average, 1, seed=len(seen))
        decided.append(average.observe(sign * value))
    assert decided == [False] * 5 + [True] * 3  # 3.5 again is not better, nor is 3.0
    assert average.start == 6
    torch.testing.assert_close(flat(average.model), torch.stack(seen[6:]).mean(0))


def test_a_validation_value_that_is_nan_is_refused():
    with pytest.raises(ValueError, match="is NaN: it cannot tell when to start"):
        IterateAverage(network(), "auto").observe(float("nan"))


def test_before_the_start_there_is_no_average_and_the_error_says_when():
    model = network()
    average = IterateAverage(model, start=3)
    average.step()
    with pytest.raises(RuntimeError, match="nothing has been averaged yet: 1 counts, and the start is after 3"):
        _ = average.model
    with pytest.raises(RuntimeError, match=r"observe\(\) has not decided"), IterateAverage(model, "auto").swapped():
        pass


# -------------------------------------------------------------------------------------------------- BatchNorm


def test_refreshed_statistics_are_those_of_the_average_over_the_data():
    model, x = normed(), batch()
    average = IterateAverage(model)
    walk(model, average, 3)
    average.refresh([x[:8], x[8:]])
    inputs = average.model[0](x)
    torch.testing.assert_close(average.model[1].running_mean, inputs.mean(0))
    parts = torch.stack([part.var(0) for part in inputs.split(8)]).mean(0)
    torch.testing.assert_close(average.model[1].running_var, parts)
    assert average.model[1].momentum == 0.1
    assert not average.model.training


@pytest.mark.parametrize("kind", ["tensors", "loader", "dictionary"])
def test_data_may_come_in_many_forms(kind):
    model, x = normed(), batch()
    average, reference = IterateAverage(model), AveragedModel(model)
    walk(model, average, 1)
    reference.update_parameters(model)
    update_bn([x], reference)
    y = torch.zeros(16)
    if kind == "dictionary":
        average.refresh([{"pixels": x, "label": y}], forward=lambda model, batch: model(batch["pixels"]))
    else:
        data = torch.utils.data.TensorDataset(x, y)
        average.refresh((x, y) if kind == "tensors" else torch.utils.data.DataLoader(data, batch_size=16))
    reference.eval()
    assert torch.equal(average.model(x), reference(x))


def test_tensors_are_cut_into_parts_of_about_one_size():
    """257 samples are not 256 and one more, of which BatchNorm could take no variance."""
    model, x = normed(), batch(257)
    average = IterateAverage(model)
    average.step()
    average.refresh((x, torch.zeros(257)))
    inputs = average.model[0](x)
    mean = (inputs[:129].mean(0) + inputs[129:].mean(0)) / 2
    torch.testing.assert_close(average.model[1].running_mean, mean)


def test_statistics_that_belong_to_the_last_iterate_are_warned_of():
    model = normed()
    average = IterateAverage(model)
    walk(model, average, 2)
    with pytest.warns(NumericalWarning, match=r"those of the last iterate, not of the average: call refresh\(\)"):
        _ = average.model
    with pytest.warns(NumericalWarning, match=r"call refresh\(\)"), average.swapped():
        pass
    average.refresh([batch()])
    _ = average.model
    walk(model, average, 1)
    with pytest.warns(NumericalWarning, match=r"call refresh\(\)"):
        _ = average.model


def test_a_refresh_leaves_model_and_generators_alone_also_when_it_fails():
    model = normed().append(nn.Dropout(0.5))
    average = IterateAverage(model)
    walk(model, average, 2)
    average.refresh([batch()])
    before, rng, good = copy.deepcopy(model.state_dict()), torch.get_rng_state(), average.model[1].running_mean.clone()
    loader = torch.utils.data.DataLoader(batch(), batch_size=4, shuffle=True)
    average.refresh(loader)
    average.refresh([batch()])
    with pytest.raises(ValueError, match="the data is empty: there is no batch"):
        average.refresh([])
    with pytest.raises(ValueError, match="the data is empty"):
        average.refresh((torch.zeros(0, 3),))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        average.refresh([batch(), torch.zeros(4, 9)])
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert model.training
    assert torch.equal(average.model[1].running_mean, good)
    assert average.model[1].momentum == 0.1


def test_a_model_without_batchnorm_needs_no_refresh():
    model = network()
    average = IterateAverage(model)
    average.step()
    average.refresh([batch()])
    assert all(torch.equal(a, b) for a, b in zip(average.model.parameters(), model.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------------- swapping


def test_swapping_gives_the_average_with_its_statistics_and_always_swaps_back():
    model, x = normed(), batch()
    average = IterateAverage(model)
    walk(model, average, 3)
    model(x)  # statistics of its own
    average.refresh([x])
    expected, before = average.model(x), copy.deepcopy(model.state_dict())
    model.eval()
    with average.swapped():
        assert torch.equal(model(x), expected)
        model.train()
        model(x)  # moves running statistics
    assert model.training  # modes are the caller's
    with pytest.raises(KeyError), average.swapped():
        raise KeyError
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_average_does_not_feed_back():
    """Training with an average that is looked at gives the weights of training without, bit for bit."""
    x, y = batch(), torch.zeros(16, 2)

    def trained(looked_at: bool) -> Tensor:
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        average = IterateAverage(model, start=1)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if average.step() and looked_at:
                average.refresh([x])
                with average.swapped():
                    model(x)
                average.model(x)
        return torch.cat([flat(model), model[1].running_mean])

    assert torch.equal(trained(True), trained(False))


def test_inside_a_swap_nothing_is_averaged_or_swapped_again():
    average = IterateAverage(network())
    average.step()
    with average.swapped():
        with pytest.raises(RuntimeError, match="would be averaged with itself; leave"):
            average.step()
        with pytest.raises(RuntimeError, match="swapped in already"), average.swapped():
            pass
    average.step()


# ------------------------------------------------------------------------------------------------------- copies


class Hooking(torch.optim.SGD):
    """An optimiser that listens to modules, as preconditioners do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.heard = []
        model[0].register_forward_hook(self.hear)
        model[0].register_forward_pre_hook(functools.partial(self.hear, out=None))
        model[0].register_full_backward_hook(self.hear)

    def hear(self, module, args, out):
        self.heard.append(module)


def test_the_copy_of_a_hooked_model_has_no_hooks_of_an_optimiser_but_keeps_those_of_the_model():
    model = network()
    optimizer, doubled = Hooking(model), []
    model[0].register_forward_hook(lambda module, args, out: doubled.append(1) or 2 * out)
    average = IterateAverage(model)
    average.step()
    x = batch()
    clone = average.model
    optimizer.heard.clear()
    torch.testing.assert_close(clone(x), model[2](torch.tanh(2 * nn.functional.linear(x, *model[0].parameters()))))
    clone(x).sum().backward()
    assert optimizer.heard == []
    assert len(doubled) == 2
    model(x.requires_grad_()).sum().backward()
    assert len(optimizer.heard) == 3  # the model's own are all there


def test_the_average_of_a_model_under_kfac_can_be_evaluated():
    model, x = normed(), batch()
    optimizer = KFAC(model, lr=0.05, damping=0.1, loss="mse")
    average, seen = IterateAverage(model), []
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), torch.zeros(16, 2)).backward()
        optimizer.step()
        average.step()
        average.refresh([x])
        average.model(x).sum().backward()  # its hooks are idle
        seen.append(flat(model))
    torch.testing.assert_close(flat(average.model), torch.stack(seen).mean(0))


def test_a_model_that_cannot_be_copied_can_be_swapped():
    model = network()
    model.cache = model[0].weight * 2  # as old weight_norm keeps
    average = IterateAverage(model)
    average.step()
    with pytest.raises(UnsupportedError, match=r"cannot be copied \(.*; evaluate inside swapped\(\)"):
        _ = average.model
    with average.swapped():
        pass


def test_the_copy_is_one_object_and_can_be_studied():
    model = network()
    average = IterateAverage(model)
    walk(model, average, 2)
    first = average.model
    walk(model, average, 1)
    assert average.model is first
    risk = ritz.Risk(average.model, nn.MSELoss(), (batch(), torch.zeros(16, 2)))
    loss = nn.functional.mse_loss(first(batch()), torch.zeros(16, 2))
    assert float(risk.loss()) == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("where", ["step", "model", "load_state_dict", "refresh"])
def test_what_is_done_in_an_evaluation_under_inference_mode_can_be_gone_on_with(where):
    found = []
    for inside in (True, False):
        model = normed()
        average = IterateAverage(model)

        def at(what: str, inside: bool = inside) -> torch.inference_mode:
            return torch.inference_mode(inside and what == where)

        with at("step"):
            walk(model, average, 2)
        walk(model, average, 2, seed=3)
        with at("model"), pytest.warns(NumericalWarning, match="refresh"):
            assert not average.model.training
        with at("refresh"):
            average.refresh([batch()])
        with at("load_state_dict"):
            average.load_state_dict(average.state_dict())
        walk(model, average, 2, seed=4)
        average.refresh([batch()])
        average.model(batch()).sum().backward()
        found.append(torch.cat([flat(average.model), *(b.flatten() for b in average.model.buffers())]))
    assert torch.equal(*found)


def test_a_model_inside_a_wrapper_is_averaged_by_itself():
    """A copy of the wrapper would wait for the other ranks where one alone evaluates the average."""

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("all ranks have to call this together")

    inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    average, plain = IterateAverage(DistributedDataParallel(inner)), IterateAverage(inner)
    for one in (average, plain):
        one.step()
        one.refresh((torch.randn(8, 2), torch.zeros(8)))
    assert average.model(torch.randn(4, 2)).shape == (4, 3)
    plain.load_state_dict(average.state_dict())  # with a wrapper or without


# ------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("start", [2, "auto"])
def test_a_resumed_average_goes_on_bit_for_bit(start):
    def run(resume: bool) -> tuple[Tensor, Tensor]:
        model = normed()
        average = IterateAverage(model, start, patience=1)
        for count in range(6):
            walk(model, average, 1, seed=count)
            average.observe(-count)
            if average.num_averaged == 2:
                average.refresh([batch()])
            if resume and count in (0, 3):
                file = io.BytesIO()
                torch.save({"model": model.state_dict(), "average": average.state_dict()}, file)
                file.seek(0)
                saved = torch.load(file)
                model = normed(seed=9)
                model.load_state_dict(saved["model"])
                average = IterateAverage(model, start, patience=1)
                average.load_state_dict(saved["average"])
        with pytest.warns(NumericalWarning):
            final = average.model
        return flat(final), final[1].running_mean

    for straight, resumed in zip(run(False), run(True), strict=True):
        assert torch.equal(straight, resumed)


def test_refreshed_statistics_are_saved_with_the_average():
    model, x = normed(), batch()
    average = IterateAverage(model)
    walk(model, average, 2)
    average.refresh([x])
    other = IterateAverage(normed(seed=9))
    other.load_state_dict(average.state_dict())
    assert torch.equal(other.model(x), average.model(x))  # and nothing warns


def test_a_state_does_not_change_with_the_average_it_was_taken_from():
    model = network()
    average = IterateAverage(model)
    walk(model, average, 1)
    state = average.state_dict()
    kept = copy.deepcopy(state["mean"])
    walk(model, average, 1)
    assert all(torch.equal(kept[name], state["mean"][name]) for name in kept)


def test_the_average_of_other_parameters_is_refused():
    average = IterateAverage(network())
    average.step()
    with pytest.raises(
        ValueError, match=r"has parameters 0.weight \(4, 3\), .*, this one weight \(2, 3\), bias \(2,\)"
    ):
        IterateAverage(nn.Linear(3, 2)).load_state_dict(average.state_dict())


# ---------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"start": -1}, "start must be 'auto' or a number of steps that is not negative, got -1"),
        ({"start": "soon"}, "got 'soon'"),
        ({"every": 0}, "at least 1, got 0 and 5"),
        ({"patience": 0}, "at least 1, got 1 and 0"),
        ({"mode": "best"}, "mode must be 'max' or 'min', got 'best'"),
        ({"model": nn.Linear(1, 1)}, "two models were given"),
    ],
)
def test_bad_settings_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        IterateAverage(network(), **keywords)


def test_bad_sources_are_refused():
    with pytest.raises(TypeError, match="average a model or the parameters of an optimiser, got list"):
        IterateAverage([torch.zeros(1)])
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="4 of the 4 parameters of the optimiser are not in the model given"):
        IterateAverage(optimizer, model=network())


def test_parameters_that_come_late_are_refused():
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    average = IterateAverage(optimizer)
    average.step()
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    with pytest.raises(ValueError, match="5 parameters are trained, but 4 were averaged; add parameter groups before"):
        average.step()
