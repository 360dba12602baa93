"""A call is the same as the last where tensors lie as they did and modules are set as they were."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import ritz
from ritz.sameness import Settings, is_static, place_of, settings_of


def test_a_place_changes_with_the_storage_and_not_with_the_values():
    p = nn.Parameter(torch.ones(2))
    here = place_of([p])
    with torch.no_grad():
        p.add_(1)
    assert place_of([p]) == here
    p.data = torch.ones(2)
    assert place_of([p]) != here


def test_a_model_is_static_where_all_its_modules_are_known():
    class Block(nn.Sequential):
        pass

    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Dropout())
    assert is_static(model.modules())
    assert not is_static(nn.Sequential(model, Block()).modules())
    handle = model[0].register_forward_hook(lambda *_: None)
    assert not is_static(model.modules())
    handle.remove()
    handle = model[0].register_full_backward_hook(lambda *_: None)
    assert not is_static(model.modules())
    handle.remove()
    model[0].forward = lambda x: x
    assert not is_static(model.modules())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[1].eval(),
        lambda model: setattr(model[0], "p", np.float64(0.1)),
        lambda model: setattr(model[1], "eps", 0.1),
        lambda model: setattr(model[2], "padding", (1, 1)),
        lambda model: setattr(model, "3", nn.GELU()),
        lambda model: setattr(model[3], "mask", torch.ones(2)),
        lambda model: setattr(model, "3", model[0]),
    ],
    ids=["mode", "rate", "epsilon", "geometry", "kind", "tensor", "the same twice"],
)
@pytest.mark.parametrize("mutable", [True, False])
def test_settings_tell_what_the_modules_would_do(change, mutable):
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm2d(1), nn.Conv2d(1, 1, 3), nn.ReLU())
    if mutable:
        model[3].mask = torch.zeros(2)
    settings = Settings()
    before = settings_of(model.modules())
    for _ in range(2):
        assert settings.of(list(model.modules())) == settings_of(model.modules()) == before
    change(model)
    for _ in range(2):
        assert settings.of(list(model.modules())) == settings_of(model.modules()) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[1].sizes.append(3),
        lambda model: model[1].shapes[0].append(3),
        lambda model: model[1].mask.set_(torch.zeros(3)),
        lambda model: model._modules.update({"0": model[1], "1": model[0]}),
        lambda model: model[2]._modules.update({"0": model[2][1], "1": model[2][0]}),
    ],
    ids=["list", "list in a tuple", "tensor", "order", "order of the same twice"],
)
def test_settings_are_found_to_have_changed_within_the_same_objects(change):
    model = nn.Sequential(nn.Tanh(), nn.ReLU(), nn.Sequential(nn.Sigmoid(), nn.GELU(), nn.GELU()))
    model[2][2] = model[2][0]
    model[1].sizes, model[1].shapes, model[1].mask = [1, 2], ([1], 2), torch.zeros(2)
    settings, modules = Settings(), list(model.modules())
    before = settings.of(modules)
    assert settings.of(modules) == before
    change(model)
    assert settings.of(list(model.modules())) == settings_of(model.modules()) != before


def test_a_number_that_was_set_twice_since_is_seen_though_it_lies_where_the_first_did():
    layer = nn.Dropout(0.25)
    settings = Settings()
    before = settings.of([layer])
    for number in range(100):  # what is not held any more makes room for the next
        layer.p = number / 1000.0
        layer.p = 0.125 + number / 1000.0
    assert settings.of([layer]) != before


def test_settings_that_are_copied_look_anew():
    settings, layer = Settings(), nn.Dropout(0.25)
    found = settings.of([layer])
    again = copy.deepcopy(settings)
    assert again.of([layer]) == found
    assert again.of([layer]) is not found


class Slope:
    def __call__(self, x):
        return nn.functional.leaky_relu(x, 0.1)


OWN = ["relu", nn.functional.silu, nn.functional.gelu, torch.tanh, nn.LeakyReLU(0.1)]


USERS = [lambda x: x.relu(), partial(nn.functional.leaky_relu, negative_slope=0.1), Slope(), nn.LeakyReLU(0.1).forward]


@pytest.mark.parametrize(("activation", "known"), [(f, True) for f in OWN] + [(f, False) for f in USERS])
def test_a_function_that_a_module_was_given_is_known_if_it_is_of_torch(activation, known):
    assert is_static(nn.TransformerEncoderLayer(4, 1, 8, activation=activation).modules()) is known


def test_products_follow_a_function_of_the_user_in_a_module_of_torch():
    torch.manual_seed(0)
    slope = [0.1]
    layer = nn.TransformerEncoderLayer(
        4, 1, 8, batch_first=True, activation=lambda x: nn.functional.leaky_relu(x, slope[0])
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), layer, nn.Flatten(), nn.Linear(8, 3))
    risk = ritz.Risk(model, nn.CrossEntropyLoss(), (torch.randn(6, 4), torch.arange(6) % 3))
    H = ritz.Hessian(risk)
    before = H.dense()
    slope[0] = 0.9
    after = ritz.Hessian(risk).dense()
    assert (after - before).norm() > 0.01 * before.norm()
    torch.testing.assert_close(H.dense(), after)
