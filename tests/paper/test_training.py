"""Training: the schedule, cut or killed runs that go on to the same bits, processes that share a batch, bad input."""

import os

import pytest
import torch
from torch.nn.functional import cross_entropy

from ortho import LanguageModel
from paper.tasks.task import NONE, Batch
from paper.training import CheckpointError, Recipe, Trainer

RECIPE = Recipe(12, 1e-2, 6, weight_decay=0.1)


@pytest.fixture(autouse=True)
def one_thread():
    """Sums of several threads need not be rounded like those of one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(dropout=0.2):
    return LanguageModel(11, 8, 2, 2, max_length=9, dropout=dropout, generator=torch.Generator().manual_seed(0))


def draw(count, generator):
    tokens = torch.randint(11, (count, 10), generator=generator)
    answers = tokens[:, 1:].clone()
    answers[:, :4] = NONE
    return Batch((tokens[:, :-1],), answers)


def make(recipe=RECIPE, *, seed=0, dropout=0.2, **kwargs):
    torch.manual_seed(5)  # for dropout
    return Trainer(model(dropout), draw, recipe, torch.Generator().manual_seed(seed), **kwargs)


def equal(a, b):
    return all(map(torch.equal, a.model.state_dict().values(), b.model.state_dict().values()))


def test_a_step_is_adamws_on_the_mean_of_the_answers():
    """Compared with the same step written out: decay of matrices only, a gradient cut to norm 1, the first rate."""
    run, own = make(dropout=0.0), model(0.0)
    batch = draw(6, torch.Generator().manual_seed(0))
    logits = own(*batch.inputs)
    loss = sum(
        cross_entropy(logits[row, place], batch.answers[row, place])
        for row in range(6)
        for place in range(4, 9)
    ) / (6 * 5)  # fmt: skip
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in own.parameters()]).norm()
    optimiser = torch.optim.AdamW(
        [
            {"params": [p for p in own.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in own.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        1e-2,  # the rate rises in the first of 12 steps only
    )
    for p in own.parameters():
        p.grad *= min(1, 1 / float(norm))
    optimiser.step()
    run.run(1)
    assert run.losses == pytest.approx([float(loss.detach())], rel=1e-5)
    for got, want in zip(run.model.parameters(), own.parameters(), strict=True):
        # Adam's first step is 1e-2 times the gradient's sign, which is arbitrary where the gradient is only rounding.
        assert ((got - want).abs() > 1e-5).double().mean() < 0.02


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_run_that_is_cut_goes_on_to_the_bit(tmp_path, cut):
    evaluations = {"at": (4, 8, 12), "keep_best": "value"}
    values = {4: 0.5, 8: 0.1, 12: 0.7}

    def started(**kwargs):
        def watch(step):
            return {"value": values[step], "norm": float(run.model.norm.weight.detach().sum())}

        run = make(watch=watch, **evaluations, **kwargs)
        return run

    whole = started()
    whole.run()
    first = started(checkpoint=tmp_path / "a.pt", identity="a run")
    first.run(cut)
    second = started(checkpoint=tmp_path / "a.pt", identity="a run")
    assert second.step == cut and second.seconds > 0
    torch.rand(3)  # what others drew from the global generator does not matter before the run goes on
    second = started(checkpoint=tmp_path / "a.pt", identity="a run")
    second.run()
    assert equal(whole, second) and whole.losses == second.losses and len(whole.losses) == 12
    assert whole.watched == second.watched
    unkept = make()
    unkept.run(8)
    assert equal(unkept, whole)  # the best


def test_another_runs_checkpoint_is_not_used(tmp_path):
    make(checkpoint=tmp_path / "a.pt", identity="one").run(5)
    assert make(checkpoint=tmp_path / "a.pt", identity="other").step == 0
    assert make(checkpoint=tmp_path / "b.pt", identity="one").step == 0


class _Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", ["text", "cut", "evil", "list"])
def test_a_damaged_checkpoint_is_refused_and_left(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.pt"
    make(checkpoint=file, identity="one").run(2)
    if kind == "text":
        file.write_text("no checkpoint")
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    else:
        torch.save(_Evil() if kind == "evil" else [1], file)
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match="a.pt: "):
        make(checkpoint=file, identity="one")
    assert file.read_bytes() == before and not (tmp_path / "evil").exists()


@pytest.mark.bad_input
def test_a_run_that_leaves_the_numbers_stops():
    run = make(Recipe(200, 1e30, 4, clip=1e30))
    with pytest.raises((FloatingPointError, ValueError)):
        run.run()
