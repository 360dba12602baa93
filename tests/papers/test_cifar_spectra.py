"""The networks on CIFAR-100: what is trained, and what is measured on it."""

import json
import math
from functools import partial
from shutil import rmtree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ritz.loggers import Memory
from ritz.papers import cifar_spectra as study
from ritz.papers.cifar_spectra_figure import figure
from ritz.papers.experiment import Setting
from ritz.papers.loop import Training, initial
from ritz.papers.recipe import Recipe, fingerprint, on_parameters
from ritz.switches import convolution_precision, is_tf32

PAPER = Setting("paper")


def images(name, root, device, split):
    """Noise in the place of CIFAR-100."""
    g = torch.Generator().manual_seed(len(split))
    return torch.randint(256, (20, 3, 32, 32), generator=g, dtype=torch.uint8), torch.randint(100, (20,), generator=g)


@pytest.fixture
def noise(monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(study, "load", images)


class Tiny(nn.Sequential):
    """Convolution, BatchNorm, ReLU, affine: 23 parameters."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)
        )


def tiny(seed=0):
    torch.manual_seed(seed)
    model, g = Tiny(), torch.Generator().manual_seed(seed)
    return model, (torch.randn(12, 1, 4, 4, generator=g), torch.randint(3, (12,), generator=g))


def recipe(**settings):
    return Recipe(name="tiny", model=Tiny, optimizer=on_parameters, epochs=1, **{"batch_size": 4, **settings})


def trained(model, average=None, stop="finished"):
    return Training(
        model=model, average=average, along={}, history=Memory(), optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        damping=None, steps=1, seconds=0.0, stop=stop,
    )  # fmt: skip


def dense(model, batches, mode):
    """The Hessian of the mean over batches, by reverse mode twice, row by row."""
    model.train(mode == "train")
    params = list(model.parameters())
    loss = torch.stack([F.cross_entropy(model(x), y) for x, y in batches]).mean()
    flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, params, create_graph=True)])
    rows = [torch.cat([p.flatten() for p in torch.autograd.grad(x, params, retain_graph=True)]) for x in flat]
    return torch.stack(rows)


# ------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("network", "count"),
    [
        ("allcnn", 1_387_108), ("preresnet", 1_726_388), ("preresnet-published", 1_726_388),
        ("wideresnet", 36_546_980), ("wideresnet-published", 36_546_980), ("vgg", 15_299_748),
    ],
)  # fmt: skip
def test_at_paper_budget_the_networks_are_the_published_ones(network, count):
    with torch.device("meta"):
        model = study.model_of(network, PAPER)()
    assert sum(p.numel() for p in model.parameters()) == count
    assert study.is_published(network, PAPER)


@pytest.mark.parametrize(
    ("network", "count", "rates"),
    [("preresnet", 1_726_388, [1.0, 1.0]), ("wideresnet", 36_546_980, [1.0, 1.0, 1.0, 0.38125])],
)
def test_one_of_each_is_the_published_one_at_short_budget_too_and_its_schedule_shrinks_with_the_epochs(
    network, count, rates
):
    short = Setting("short")
    with torch.device("meta"):
        model = study.model_of(f"{network}-published", short)()
    assert sum(p.numel() for p in model.parameters()) == count
    made = study.sgd_recipe(f"{network}-published", short, 0, 5e-4)
    assert (made.epochs, made.batch_size) == (len(rates), 128)
    assert [round(made.schedule(made.epochs)(t), 6) for t in range(made.epochs)] == rates


@pytest.mark.parametrize("network", ["preresnet", "preresnet-published", "wideresnet", "wideresnet-published"])
def test_a_shallow_network_is_one_of_the_family_and_says_so(network):
    setting = Setting("smoke")
    model = study.model_of(network, setting)()
    assert [len(getattr(model, f"stage{i}")) for i in (1, 2, 3)] == [1, 1, 1]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
    assert not study.is_published(network, setting)


def test_recipes_are_as_published():
    sgd = study.sgd_recipe("wideresnet", PAPER, 3, 5e-4)
    assert (sgd.epochs, sgd.batch_size, sgd.seed) == (300, 128, 3)
    keywords = {"kind": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    assert sgd.optimizer.keywords == keywords
    assert [round(sgd.schedule(300)(t), 6) for t in (0, 150, 210, 270, 299)] == [1.0, 1.0, 0.505, 0.01, 0.01]
    assert sgd.augment.keywords["norm"].mean == (0.4914, 0.4822, 0.4465)
    averaged = study.gadam_recipe(PAPER, 0)
    assert averaged.optimizer.keywords == {"lr": 5e-4, "weight_decay": 0.25, "start": 161 / 300}
    assert [round(averaged.schedule(300)(t), 6) for t in (80, 145, 299)] == [1.0, 0.5, 0.5]
    assert averaged.augment.keywords["norm"].mean == (0.485, 0.456, 0.406)


def test_arms_of_a_seed_begin_at_the_same_weights():
    setting = Setting("smoke")
    starts = [initial(study.sgd_recipe("allcnn", setting, 1, decay)).state_dict() for decay in (0.0, 5e-4)]
    assert all(torch.equal(starts[0][name], starts[1][name]) for name in starts[0])
    other = initial(study.sgd_recipe("allcnn", setting, 2, 0.0)).state_dict()
    assert not torch.equal(other["conv1.weight"], starts[0]["conv1.weight"])


@pytest.mark.filterwarnings("ignore:products in float32 are off")  # after a few steps from a random start
def test_weight_decays_run_at_smoke_budget_and_both_papers_share_the_runs(noise, tmp_path):
    setting, seen = Setting("smoke", runs=tmp_path), []
    rows, claims = study.run_decays("allcnn", setting, lambda *args: seen.append(args))
    assert [(row["arm"], row["seed"]) for row in rows][:4] == [
        ("decay 0", 0), ("decay 0.0001", 0), ("decay 0.0005", 0), ("decay 0", 1)
    ]  # fmt: skip
    assert seen[-1][1] == seen[-1][2]
    assert {claim.paper for claim in claims} == {"seed 000", "seed 002"}
    assert rows[2]["weight_norm"] < rows[1]["weight_norm"] < rows[0]["weight_norm"]
    assert len(rows[0]["curve"]["epoch"]) == 2
    assert sorted(p.name for p in (tmp_path / "cifar-allcnn").iterdir())[0] == "decay-0-seed-0"
    again, _ = study.run_decays("allcnn", setting, lambda *args: None)
    assert json.dumps(again) == json.dumps(rows)  # to the seconds that training took
    assert len(figure(json.loads(json.dumps(rows))).axes) == 3


PUBLISHED = ["decay-0-seed-0", "decay-0.0005-seed-0", "decay-0-seed-1", "decay-0.0005-seed-1"]


def published(**settings):
    """The rows and claims of wideresnet-published at smoke budget, and what was left."""
    setting = Setting("smoke", **settings)
    rows, claims = study.run_decays("wideresnet-published", setting, lambda *args: None)
    return rows, claims, setting.left


@pytest.mark.filterwarnings("ignore:products in float32 are off")  # after a few steps from a random start
def test_runs_that_are_not_begun_in_time_are_named_and_the_others_judged(noise, tmp_path):
    assert published(runs=tmp_path, until=0.0) == ([], [], PUBLISHED)
    whole, claims, left = published(runs=tmp_path)
    assert [(row["network"], row["probes"], row["weight_decay"]) for row in whole] == [
        ("wideresnet", 1, 0.0), ("wideresnet", 1, 5e-4)
    ] * 2  # fmt: skip
    assert left == []
    assert not [claim.text for claim in claims if "one network each" in claim.text]  # two seeds have intervals
    for name in PUBLISHED[1:]:
        rmtree(tmp_path / "cifar-wideresnet-published" / name)
        rows, claims, left = published(runs=tmp_path, until=0.0)
        late = PUBLISHED.index(name)
        assert json.dumps(rows) == json.dumps([row for at, row in enumerate(whole) if at == 0 or at > late])
        assert left == PUBLISHED[1 : late + 1]
        several = [claim for claim in claims if "one network each" not in claim.text and "another" not in claim.text]
        assert {claim.verdict for claim in several} <= {"not decidable"}
        assert len(figure(rows).axes) == 2 * max(sum(row["seed"] == seed for row in rows) for seed in (0, 1))


@pytest.mark.filterwarnings("ignore:products in float32 are off")
def test_a_kill_while_a_network_is_measured_leaves_its_training(noise, tmp_path, monkeypatch):
    measure = study.curvature

    def killed(model, data, mode, **settings):
        if mode == "train":
            raise KeyboardInterrupt
        return measure(model, data, mode, **settings)

    monkeypatch.setattr(study, "curvature", killed)
    with pytest.raises(KeyboardInterrupt):
        published(runs=tmp_path)
    folder = tmp_path / "cifar-wideresnet-published" / PUBLISHED[0]
    assert (folder / "epoch-000002.json").exists()
    monkeypatch.setattr(study, "curvature", measure)
    rows, _, _ = published(runs=tmp_path)
    assert [start["epoch"] for start in json.loads((folder / "run.json").read_text(encoding="utf8"))["starts"]] == [
        0,
        2,
    ]
    assert rows[0]["train"].keys() == rows[0]["eval"].keys()


def test_gadam_runs_beside_sgd_at_smoke_budget_and_its_average_is_measured(noise):
    rows, claims = study.run_optimisers(Setting("smoke"), lambda *args: None)
    assert [row["arm"] for row in rows] == ["SGD", "Gadam"] * 2
    assert all(set(row["train"]) == set(row["eval"]) for row in rows)
    assert all(row["stop"] == "finished" for row in rows)
    assert {claim.paper for claim in claims} == {"seed 000"}
    json.dumps(rows)


# ---------------------------------------------------------------------------------------------------- measurement


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_curvature_is_that_of_the_dense_hessian_in_either_mode_of_batchnorm(mode):
    model, data = tiny()
    model = study.refreshed(model, recipe(), data)
    found = study.curvature(model, data, mode, batch_size=4, steps=20, probes=4, seed=0)
    H = dense(model, list(zip(data[0].split(4), data[1].split(4), strict=True)), mode)
    values = torch.linalg.eigvalsh(H)
    assert found["lambda_max"][0] == pytest.approx(float(values[-1]), rel=1e-5)
    assert found["lambda_min"][0] == pytest.approx(float(values[0]), rel=1e-5)
    norm = float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
    size = len(values)
    for key, truth in (
        ("trace_per_param", values.sum() / size),
        ("moment2_per_param", values.square().sum() / size),
        ("metric_a_eq7", values.sum() + norm**2 / 2),
    ):
        assert found[key][1] <= float(truth) <= found[key][2]
    assert sum(found["weights"]) == pytest.approx(1.0, abs=1e-3)


def test_products_are_not_in_tf32_and_torch_is_left_as_it_was(monkeypatch):
    model, data = tiny()
    before, seen = convolution_precision(), []

    def refuse(*args, **settings):
        seen.append(is_tf32(convolution_precision()))
        raise ArithmeticError

    monkeypatch.setattr(study, "spectrum", refuse)
    with pytest.raises(ArithmeticError):
        study.curvature(model, data, "eval", batch_size=4, steps=2, probes=1, seed=0)
    assert (seen, convolution_precision()) == ([False], before)
    assert is_tf32(before)  # torch's default, else the test could not fail


def test_the_two_modes_of_batchnorm_have_different_hessians():  # else the test above could not tell them apart
    model, data = tiny()
    batches = list(zip(data[0].split(4), data[1].split(4), strict=True))
    model = study.refreshed(model, recipe(), data)
    first, second = (torch.linalg.eigvalsh(dense(model, batches, mode))[-1] for mode in ("eval", "train"))
    assert abs(first - second) > 0.01 * abs(first)


def shifted(x, key):
    return x + 1.0


def test_statistics_are_renewed_on_augmented_batches_and_on_a_copy():
    model, data = tiny()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = study.refreshed(model, recipe(augment=shifted), data)
    conv = nn.functional.conv2d(data[0] + 1.0, model[0].weight, model[0].bias)  # batches of one size: the mean of all
    torch.testing.assert_close(found[1].running_mean, conv.detach().mean((0, 2, 3)))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert model.training
    assert not found.training


def test_what_is_measured_is_the_average_where_there_is_one():
    model, data = tiny()
    other, _ = tiny(1)
    parts = {"train": data, "val": data, "test": data}
    how = {"images": 8, "steps": 3, "probes": 2, "modes": ("eval",)}
    plain, averaged = (study.finish(trained(model, average), recipe(), parts, **how) for average in (None, other))
    norms = [math.sqrt(sum(float(p.detach().square().sum()) for p in net.parameters())) for net in (model, other)]
    assert [plain["weight_norm"], averaged["weight_norm"]] == pytest.approx(norms)
    assert plain["metric_a"] == pytest.approx(norms[0] / 2)
    assert plain["gap_loss_test"] == 0.0
    assert plain["gap_error_val"] == 0.0
    assert (plain["precision"], plain["val_images"]) == ("float32", 12)


def test_a_run_that_diverged_has_nothing_measured():
    model, data = tiny()
    lost = trained(model, stop="diverged: the loss of step 1 is nan")
    assert study.finish(lost, recipe(), {"train": data}, images=8, steps=3, probes=2, modes=("eval",)) == {}


def test_gaps_are_in_percent_and_held_out_less_trained():
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    x = torch.tensor([[1.0], [1.0]])
    found = study._fit(
        model, {"train": (x, torch.tensor([0, 0])), "val": (x, torch.tensor([0, 1])), "test": (x, torch.tensor([1, 1]))}
    )
    assert [found["gap_error_val"], found["gap_error_test"]] == [50.0, 100.0]
    assert found["gap_loss_test"] == pytest.approx(2.0)  # log(1 + e^2) - log(1 + e^-2)


# ----------------------------------------------------------------------------------------------------- real images


def test_the_real_images_are_split_as_published(data_root):
    torch.set_default_dtype(torch.float32)
    if not (data_root / "cifar-100-python").is_dir():
        pytest.skip("there is no CIFAR-100 in RITZ_DATA")
    data = study.load_data("allcnn", Setting("short", data_root))
    assert [len(data[name][0]) for name in ("train", "val", "test")] == [45_000, 5_000, 10_000]
    assert abs(float(data["train"][0].mean())) < 0.5


def test_recipes_have_fingerprints():
    made = partial(study.sgd_recipe, "preresnet", Setting("short"), 0)
    assert fingerprint(made(0.0)) != fingerprint(made(1e-4))
