"""A loader of one rank's share is walked as the loader of the whole that it was made from."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

import ritz
from ritz.loaders import whole_of

DATA = TensorDataset(torch.arange(11.0)[:, None], torch.zeros(11, 1))


def seen(loader):
    return torch.cat([x for x, _ in loader])[:, 0].tolist()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_distributed_sampler_gives_way_to_the_data_set_without_what_it_repeats(shuffle, rank):
    sampler = DistributedSampler(DATA, num_replicas=3, rank=rank, shuffle=shuffle)
    loader = DataLoader(DATA, batch_size=2, sampler=sampler)
    assert len(seen(loader)) * 3 == 12  # one sample is repeated
    assert seen(whole_of(loader, 3)) == list(range(11))


def test_with_one_rank_a_loader_stays_as_it_is():
    loader = DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, num_replicas=3, rank=0))
    assert whole_of(loader, 1) is loader


@pytest.mark.parametrize("data", [(torch.zeros(2, 1), torch.zeros(2, 1)), [1, 2], DataLoader(DATA, batch_size=4)])
def test_data_that_is_no_share_stays_as_it_is(data):
    assert whole_of(data, 2) is data


def test_a_stream_stays_as_it_is():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    loader = DataLoader(Stream())
    assert whole_of(loader, 2) is loader


def test_settings_of_the_loader_are_kept():
    def doubled(rows):
        return torch.stack([2 * x for x, _ in rows]), torch.zeros(len(rows), 1)

    sampler = DistributedSampler(DATA, num_replicas=2, rank=1)
    whole = whole_of(DataLoader(DATA, batch_size=4, sampler=sampler, collate_fn=doubled, drop_last=True), 2)
    assert seen(whole) == [2.0 * i for i in range(8)]


def test_a_sampler_inside_batches_of_the_users_own_is_refused():
    class Own(BatchSampler):
        pass

    sampler = Own(DistributedSampler(DATA, num_replicas=2, rank=0), batch_size=2, drop_last=False)
    with pytest.raises(ValueError, match=r"DistributedSampler inside a Own.*share=True"):
        whole_of(DataLoader(DATA, batch_sampler=sampler), 2)


def test_the_loader_that_accelerate_makes_is_undone():
    data_loader = pytest.importorskip("accelerate.data_loader")
    plain = DataLoader(DATA, batch_size=2)
    shares = [data_loader.prepare_data_loader(plain, num_processes=2, process_index=rank) for rank in (0, 1)]
    assert all(len(seen(share)) < 11 for share in shares)
    assert all(seen(whole_of(share, 2)) == list(range(11)) for share in shares)
    place = {"device": torch.device("cpu"), "put_on_device": True, "dispatch_batches": True}
    sent = data_loader.prepare_data_loader(plain, num_processes=2, process_index=0, **place)
    with pytest.raises(ValueError, match=r"shared out by Accelerate.*before accelerator.prepare"):
        whole_of(sent, 2)


def test_the_loader_that_fabric_makes_is_undone():
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1)
    loader = wrappers._FabricDataLoader(DataLoader(DATA, batch_size=2, sampler=sampler))
    assert seen(whole_of(loader, 2)) == list(range(11))


def test_the_model_that_fabric_makes_is_unwrapped():
    wrappers = pytest.importorskip("lightning.fabric.wrappers")
    fabric = pytest.importorskip("lightning.fabric")
    model = torch.nn.Linear(1, 1)
    wrapped = fabric.Fabric(accelerator="cpu", devices=1).setup(model)
    assert isinstance(wrapped, wrappers._FabricModule)
    risk = ritz.Risk(wrapped, torch.nn.MSELoss(), DataLoader(DATA, batch_size=4))
    assert risk.model is model
    assert risk.names == ("weight", "bias")


def test_the_model_that_accelerate_makes_is_unwrapped():
    accelerate = pytest.importorskip("accelerate")
    model = torch.nn.Linear(1, 1)
    wrapped = accelerate.Accelerator(cpu=True).prepare(model)
    assert ritz.Risk(wrapped, torch.nn.MSELoss(), DataLoader(DATA, batch_size=4)).model is model
