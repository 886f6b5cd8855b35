"""Every encoding trains: a few steps on a small model, in which the loss falls and everything learned moves."""

import pytest
import torch

import lengthwise as lw
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.train import TrainConfig, train

OPTIONS = [
    ("alibi", {"learned": True}),
    ("bam", {"learned": "all"}),
    ("rope", {"part": 0.5, "resonance": True}),
    ("fope", {"learned": True}),
    ("grape-m", {"per_head": True}),
    ("ssmax", {"offset": True}),
    ("stick-breaking", {"attend_current": True}),
]
CASES = [(name, {}) for name in lw.ENCODINGS] + OPTIONS


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name} {options or ''}" for name, options in CASES])
def test_an_encoding_trains(name, options):
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "n_positions": 24, "n_embd": 24, "n_layer": 2, "n_head": 3}
    model = LengthwiseForCausalLM(LengthwiseConfig(**sizes, encoding=name, encoding_options=options))
    # Each token tells the next one, seven tokens back tells the one after: content and position both help.
    ids = torch.randint(17, (4, 7)).repeat(1, 4)[:, :24]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(map(torch.isfinite, torch.tensor(losses)))
    assert losses[-1] < 0.8 * losses[0], losses
    still = [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    assert not still, f"these did not move: {still}"


@pytest.mark.prove
@pytest.mark.parametrize("name", lw.ENCODINGS)
def test_an_encoding_trains_in_the_setting_of_the_default_study(name, tmp_path):
    run = train(TrainConfig(encoding=name, steps=50, evaluate_tokens=128, out=str(tmp_path / name)))
    losses = [line["loss"] for line in run.metrics]
    assert len(losses) == 50
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0], losses
