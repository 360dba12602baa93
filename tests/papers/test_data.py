"""The papers' data sets: found, checked, read and split; what is not the official file is not trusted."""

import gzip
import hashlib
import io
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from ritz.papers.data import (
    DATASETS,
    Archive,
    DataSet,
    File,
    Norm,
    Text,
    all_windows,
    find,
    images,
    load,
    load_images,
    load_text,
    pickles,
    windows,
)

NOWHERE = Archive("none", "none", "", 0)


def md5(raw: bytes) -> str:
    return hashlib.md5(raw).hexdigest()


def placed(root: Path, path: str, raw: bytes, packed: bool = False) -> File:
    """A file below the root, gzipped or not, and its row of a table."""
    target = root / (f"{path}.gz" if packed else path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(raw) if packed else raw)
    return File(path, md5(raw), NOWHERE)


# --------------------------------------------------------------------------------------------- the table


def test_every_file_of_the_table_has_a_checksum_and_an_archive_with_a_server():
    for data in DATASETS.values():
        assert data.form == "digits" or (data.urls and data.train)
        for file in data.files:
            assert len(bytes.fromhex(file.md5)) == len(bytes.fromhex(file.archive.md5)) == 16
            assert file.archive.size > 1000
    assert [len(DATASETS[name].archives) for name in ("MNIST", "CIFAR10", "CIFAR100", "digits")] == [4, 1, 1, 0]
    assert all(url.endswith("/") for data in DATASETS.values() for url in data.urls)


def test_a_name_that_the_table_lacks_is_refused_with_those_it_has():
    with pytest.raises(ValueError, match="no data set is called 'mnist'; there are MNIST, FashionMNIST, CIFAR10"):
        load("mnist")


def test_the_papers_normalise_cifar_by_the_network_and_mnist_always_alike():
    assert find("CIFAR100").norm("vgg16_bn").std == (0.229, 0.224, 0.225)
    assert find("CIFAR10").norm("wide_resnet28_10").mean == (0.4914, 0.4822, 0.4465)
    assert find("MNIST").norm() == find("MNIST").norm("mlp") == Norm((0.5,), (0.5,))
    with pytest.raises(ValueError, match=r"CIFAR100 is normalised for all_cnn_c, .*, not 'mlp'"):
        find("CIFAR100").norm("mlp")
    with pytest.raises(ValueError, match="tinyshakespeare is normalised for no network"):
        find("tinyshakespeare").norm()


def test_normalisation_is_that_of_each_channel():
    norm = Norm((0.2, 0.4), (0.5, 0.25), scale=100.0)
    pixels = torch.randint(256, (3, 2, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    truth = torch.stack([(pixels[:, 0] / 100 - 0.2) / 0.5, (pixels[:, 1] / 100 - 0.4) / 0.25], dim=1)
    torch.testing.assert_close(norm(pixels, torch.float64), truth)
    assert norm(pixels).dtype == torch.float32
    with pytest.raises(ValueError, match=r"expected images \(N, 2, height, width\), got \(3, 1, 4, 5\)"):
        norm(pixels[:, :1])


def test_normalisation_leaves_images_that_are_numbers_already_alone():
    numbers = torch.full((1, 1, 2, 2), 255.0)
    assert Norm((0.5,), (0.5,))(numbers, numbers.dtype).unique().tolist() == [1.0]
    assert numbers.unique().tolist() == [255.0]


# --------------------------------------------------------------------------------------------- idx files


def idx(raw: torch.Tensor) -> bytes:
    """An idx file of bytes."""
    return bytes([0, 0, 8, raw.ndim]) + b"".join(struct.pack(">I", n) for n in raw.shape) + bytes(raw.flatten())


PIXELS = torch.randint(256, (9, 2, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([3, 1, 0, 2, 3, 0, 1, 2, 3], dtype=torch.uint8)


@pytest.fixture
def small(tmp_path) -> DataSet:
    """Seven training images of 2 x 3 and two test images, as idx files, two of them gzipped."""
    return DataSet(
        name="small",
        form="idx",
        shape=(1, 2, 3),
        classes=4,
        held_out=3,
        train=(placed(tmp_path, "raw/x", idx(PIXELS[:7])), placed(tmp_path, "raw/y", idx(LABELS[:7]), packed=True)),
        test=(placed(tmp_path, "raw/tx", idx(PIXELS[7:]), packed=True), placed(tmp_path, "raw/ty", idx(LABELS[7:]))),
    )


def test_images_stay_bytes_with_a_channel_and_are_read_gzipped_or_not(small, tmp_path):
    for split, part in (("train", slice(7)), ("test", slice(7, None))):
        X, y = load(small, tmp_path, split=split)
        assert X.dtype == torch.uint8
        assert y.dtype == torch.int64
        assert torch.equal(X, PIXELS[part, None])
        assert torch.equal(y, LABELS[part].long())


def test_the_last_of_the_training_set_are_held_out(small, tmp_path):
    (X, y), (fit, _), (val, held) = (load(small, tmp_path, split=split) for split in ("train", "fit", "val"))
    assert torch.equal(torch.cat([fit, val]), X)
    assert torch.equal(held, y[-3:])
    with pytest.raises(ValueError, match="has 7 training images, so 7 cannot be held out"):
        load(replace(small, held_out=7), tmp_path, split="val")


def test_a_file_with_another_checksum_is_refused_unless_told_not_to_look(small, tmp_path):
    placed(tmp_path, "raw/x", idx(PIXELS[:7] ^ 1))
    with pytest.raises(ValueError, match=r"raw/x is not the official file of small: its md5 is .*, not .*; remove it"):
        load(small, tmp_path)
    assert torch.equal(load(small, tmp_path, check=False)[0], PIXELS[:7, None] ^ 1)


def test_a_gzipped_file_that_is_cut_short_is_refused(small, tmp_path):
    path = tmp_path / "raw" / "y.gz"
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(ValueError, match=r"y\.gz is cut short or damaged"):
        load(small, tmp_path)


def test_flat_images_from_minus_one_to_one_are_those_that_the_papers_norm_gives(tmp_path):
    gen = torch.Generator().manual_seed(2)
    for begin, num in (("train", 3), ("t10k", 2)):
        pixels = torch.randint(256, (num, 28, 28), dtype=torch.uint8, generator=gen)
        placed(tmp_path, f"MNIST/raw/{begin}-images-idx3-ubyte", idx(pixels))
        placed(tmp_path, f"MNIST/raw/{begin}-labels-idx1-ubyte", idx(torch.arange(num, dtype=torch.uint8)))
    for split, (X, y) in zip(("train", "test"), load_images("MNIST", tmp_path), strict=True):
        pixels, labels = load("MNIST", tmp_path, split=split, check=False)
        torch.testing.assert_close(X, find("MNIST").norm("mlp")(pixels).flatten(1))
        assert torch.equal(y, labels)
    with pytest.raises(ValueError, match="digits is not of MNIST's kind"):
        load_images("digits")


def test_labels_must_fit_the_images_and_the_classes(small, tmp_path):
    with pytest.raises(ValueError, match="labels up to 3; wanted as many labels, of 3 classes"):
        load(replace(small, classes=3), tmp_path)
    with pytest.raises(ValueError, match="has 7 images and 2 labels"):
        load(replace(small, train=(small.train[0], small.test[1])), tmp_path)


def test_a_missing_data_set_says_where_it_was_looked_for_and_how_to_get_it(tmp_path, monkeypatch):
    command = (
        r"get the official files of CIFAR100: python -c \"from ritz.papers.data import download; download\('CIFAR100', "
    )
    with pytest.raises(FileNotFoundError, match=rf"neither train nor .* is in {tmp_path}/cifar-100-python; {command}"):
        load("CIFAR100", tmp_path)
    monkeypatch.delenv("RITZ_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=rf"no folder with CIFAR100: set RITZ_DATA or give root=.*{command}"):
        load("CIFAR100")


def test_data_is_found_through_the_environment_and_in_the_folder_of_the_system(small, tmp_path, monkeypatch):
    monkeypatch.delenv("RITZ_DATA", raising=False)
    system = replace(small, elsewhere=(str(tmp_path / "raw"),))
    assert len(load(system)[0]) == 7
    assert len(load(system, tmp_path / "empty")[0]) == 7
    with pytest.raises(FileNotFoundError, match=r"neither z nor z\.gz is in .*/raw; get the official files of small"):
        load(replace(system, train=(replace(small.train[0], path="raw/z"), small.train[1])))
    with pytest.raises(FileNotFoundError, match=r"in .*/empty/raw or .*/raw; get the .*empty"):
        load(replace(system, train=(replace(small.train[0], path="raw/z"), small.train[1])), tmp_path / "empty")
    monkeypatch.setenv("RITZ_DATA", str(tmp_path))
    assert len(load(small)[0]) == 7


def test_what_is_no_split_and_what_has_no_images_is_refused():
    with pytest.raises(ValueError, match="split must be one of train, fit, val, test, got 'valid'"):
        load("MNIST", split="valid")
    with pytest.raises(ValueError, match="tinyshakespeare is text and has no images: read it with load_text"):
        load("tinyshakespeare")


# ----------------------------------------------------------------------------------------------- pickles


class Python2(pickle._Pickler):
    """Writes as Python 2 did: strings are strings of bytes, and NumPy is at its old address."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value: bytes) -> None:
        self.write(b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<I", len(value)))
        self.write(value)
        self.memoize(value)

    dispatch[bytes] = save_string


def python2(content: object) -> bytes:
    file = io.BytesIO()
    Python2(file, protocol=2).dump(content)
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


COLOURS = np.random.default_rng(0).integers(0, 256, (5, 12), dtype=np.uint8)  # 3 x 2 x 2


def cifar(root: Path, *batches: bytes, labels: str = "labels") -> DataSet:
    """A data set in CIFAR's manner whose training files are these."""
    files = tuple(placed(root, f"batches/{number}", raw) for number, raw in enumerate(batches))
    return DataSet(name="colours", form="pickle", shape=(3, 2, 2), train=files, test=files[:1], labels=labels)


@pytest.mark.parametrize("write", [python2, lambda content: pickle.dumps(content, protocol=4)])
def test_pickles_of_old_and_new_are_read_as_pickle_itself_reads_them(tmp_path, write):
    first = {b"data": COLOURS[:3], b"fine_labels": [5, 0, 9], b"batch_label": b"one", b"filenames": [b"a", b"b", b"c"]}
    second = {b"data": COLOURS[3:], b"fine_labels": [1, 2], b"coarse_labels": [0, 0]}
    batches = [write(first), write(second)]
    assert (pickle.loads(batches[0], encoding="bytes")[b"data"] == COLOURS[:3]).all()  # else the test is of nothing
    X, y = load(cifar(tmp_path, *batches, labels="fine_labels"), tmp_path)
    assert torch.equal(X, torch.from_numpy(COLOURS).reshape(5, 3, 2, 2))
    assert y.tolist() == [5, 0, 9, 1, 2]


def test_pixels_of_a_row_are_channel_by_channel(tmp_path):
    raw = python2({b"data": np.arange(12, dtype=np.uint8)[None], b"labels": [0]})
    assert load(cifar(tmp_path, raw), tmp_path)[0][0, 1].tolist() == [[4, 5], [6, 7]]


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_even_if_its_checksum_is_right(tmp_path, protocol):
    target = tmp_path / "harm"
    for evil in (Calls(eval, f"open({str(target)!r}, 'w')"), Calls(Path.touch, target), Calls(np.save, target, 1)):
        for raw in (pickle.dumps(evil, protocol), pickle.dumps({b"data": evil, b"labels": [0]}, protocol)):
            data = cifar(tmp_path, raw)
            with pytest.raises(ValueError, match=r"batches/0 is refused: it asks for .*, which no file"):
                load(data, tmp_path)
            with pytest.raises(ValueError, match="is refused"):
                load(data, tmp_path, check=False)
    assert not list(tmp_path.glob("harm*"))
    pickle.loads(raw)  # it does do harm
    assert list(tmp_path.glob("harm*"))


def test_a_pickle_is_not_opened_before_its_checksum_is_right(tmp_path, monkeypatch):
    data = cifar(tmp_path, python2({b"data": COLOURS, b"labels": [0] * 5}))
    placed(tmp_path, "batches/0", python2({b"data": COLOURS ^ 1, b"labels": [0] * 5}))
    monkeypatch.setattr(images, "read_pickle", lambda *_: pytest.fail("it was opened"))
    for check in (True, False):
        with pytest.raises(ValueError, match="batches/0 is not the official file of colours"):
            load(data, tmp_path, check=check)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "not a file of CIFAR: it wants a dictionary with data and labels"),
        ({b"data": COLOURS}, "it wants a dictionary with data and labels"),
        ({b"data": [1], b"labels": [1]}, "its data is no array of rows, or its labels no list"),
        ({b"data": COLOURS[0], b"labels": [1]}, "its data is no array of rows"),
        ({b"data": COLOURS, b"labels": 3}, "its labels no list"),
        ({b"data": COLOURS, b"labels": [1, 2]}, "has 5 images and 2 labels"),
        ({b"data": COLOURS, b"labels": [1, 2, 3, 4, 5.0]}, "must be as many integers"),
        ({b"data": COLOURS.astype(np.float64), b"labels": [0] * 5}, "refused: it holds an array that is not of bytes"),
        ({b"data": np.asfortranarray(COLOURS), b"labels": [0] * 5}, "refused: it holds an array that is not of bytes"),
        ({b"data": COLOURS.astype(object), b"labels": [0] * 5}, "refused: it holds an array that is not of bytes"),
        ({b"data": np.uint8(3), b"labels": [0]}, r"refused: it asks for numpy.*scalar"),
    ],
)
def test_a_pickle_of_something_else_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        pickles.read_pickle(pickle.dumps(content, protocol=3), "labels")


def test_a_damaged_pickle_is_refused():
    raw = python2({b"data": COLOURS, b"labels": [0] * 5})
    for cut in range(0, len(raw), 7):
        with pytest.raises(ValueError, match="is refused"):
            pickles.read_pickle(raw[:cut], "labels")
    short = raw.replace(b"U<", b"U;").replace(COLOURS.tobytes(), COLOURS.tobytes()[1:])
    with pytest.raises(ValueError, match=r"it holds 59 bytes for an array \(5, 12\)"):
        pickles.read_pickle(short, "labels")


# ------------------------------------------------------------------------------------------------ digits


def test_the_digits_are_those_of_scikit_learn_in_one_order():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    parts = [load("digits", split=split) for split in ("fit", "val", "test")]
    assert [len(y) for _, y in parts] == [1000, 200, 597]
    X, y = (torch.cat(column) for column in zip(*parts, strict=True))
    assert sorted(map(tuple, torch.cat([X.flatten(1).long(), y[:, None]], 1).tolist())) == sorted(
        (*map(int, row), int(label)) for row, label in zip(pixels, labels, strict=True)
    )
    numbers = find("digits").norm()(X)
    assert (float(numbers.min()), float(numbers.max())) == (0.0, 1.0)


# -------------------------------------------------------------------------------------------------- text


@pytest.fixture
def verse(tmp_path) -> DataSet:
    return DataSet(name="verse", form="text", train=(placed(tmp_path, "text/verse.txt", b"to be or not to be", True),))


@pytest.mark.parametrize(("level", "size"), [("characters", 7), ("bytes", 256)])
def test_codes_stand_for_the_characters_of_the_text_in_order(verse, tmp_path, level, size):
    text = load_text(verse, tmp_path, level=level)
    assert (len(text.train), len(text.val), len(text.vocabulary)) == (16, 2, size)
    assert text.decode(torch.cat([text.train, text.val])) == "to be or not to be"
    assert torch.equal(text.encode("to be or not to "), text.train)
    assert text.vocabulary == bytes(sorted(text.vocabulary))


def test_a_character_outside_the_vocabulary_is_named(verse, tmp_path):
    with pytest.raises(ValueError, match="the vocabulary of 7 has no b'BT'"):
        load_text(verse, tmp_path).encode("To Be")


def test_what_is_no_text_or_no_level_is_refused():
    with pytest.raises(ValueError, match="MNIST is not a text: read it with load"):
        load_text("MNIST")
    with pytest.raises(ValueError, match="level must be 'characters' or 'bytes', got 'words'"):
        load_text(level="words")


def test_windows_are_pieces_of_the_text_with_what_follows_and_named_by_their_key():
    codes = torch.arange(7, 57, dtype=torch.uint8)
    inputs, targets = windows(codes, 8, 2000, (0, 1))
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))
    assert torch.equal(targets, inputs + 1)
    assert sorted(set(inputs[:, 0].tolist())) == list(range(7, 49))  # each of the 42 starts that leave room
    assert torch.equal(inputs, windows(codes, 8, 2000, (0, 1))[0])
    assert not torch.equal(inputs, windows(codes, 8, 2000, (0, 2))[0])


def test_windows_side_by_side_cover_the_text_but_for_a_short_rest():
    inputs, targets = all_windows(torch.arange(13), 4)
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(targets, inputs + 1)
    assert len(all_windows(torch.arange(12), 4)[0]) == 2  # nothing follows the third
    for too_long in (0, 13):
        with pytest.raises(ValueError, match=f"a window of {too_long} and what follows it do not fit"):
            windows(torch.arange(13), too_long, 1, (0,))


def test_a_text_is_decoded_whatever_its_bytes():
    text = Text(torch.tensor([255, 65], dtype=torch.uint8), torch.tensor([]), bytes(range(256)))
    assert text.decode(text.train) == "�A"


# ------------------------------------------------------------------------------------------ the real ones


@pytest.mark.parametrize("name", ["MNIST", "FashionMNIST"])
def test_the_real_images_are_the_official_ones(data_root, name):
    X, y = load(name, data_root, split="fit")
    assert (X.shape, y.bincount().numel()) == ((55_000, 1, 28, 28), 10)
    test, labels = load(name, data_root, split="test")
    assert test.shape == (10_000, 1, 28, 28)
    assert int((labels == 0).sum()) == {"MNIST": 980, "FashionMNIST": 1000}[name]


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_the_real_cifar_has_its_known_size_classes_and_mean_colours(data_root, name):
    data = find(name)
    if not (data_root / data.test[0].path).is_file():
        pytest.skip(f"{data.test[0].path} is not below RITZ_DATA")
    X, y = load(name, data_root, split="train")
    assert X.shape == (50_000, 3, 32, 32)
    assert y.bincount().tolist() == [50_000 // data.classes] * data.classes
    known = {"CIFAR10": (0.4914, 0.4822, 0.4465), "CIFAR100": (0.5071, 0.4865, 0.4409)}[name]
    sums = torch.stack([channel.sum(dtype=torch.int64) for channel in X.unbind(1)])
    torch.testing.assert_close(sums / (50_000 * 1024 * 255), torch.tensor(known), atol=1e-4, rtol=0)
    assert len(load(name, data_root, split="test")[1]) == 10_000


def test_the_real_text_has_65_characters_and_its_usual_split(data_root):
    text = load_text(root=data_root)
    assert (len(text.vocabulary), len(text.train), len(text.val)) == (65, 1_003_854, 111_540)
    assert text.decode(text.train[:14]) == "First Citizen:"
