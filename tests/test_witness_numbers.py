"""Second witness: the authors' numbers, and other people's code where there is some."""

import pytest
import torch
import torch.nn.functional as F
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention
from witness import assert_same, make

import lengthwise as lw

HALF_OF_16 = [2 ** (-h / 2) for h in range(1, 17)]

# 20 heads, interleaved: the 16 of the power of two below, and every other one of the first eight of 32.
SLOPES = {
    ("geometric", 8): [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    ("interleaved", 8): [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    ("geometric", 12): [
        *(0.629961, 0.396850, 0.25, 0.157490, 0.099213, 0.0625),
        *(0.039373, 0.024803, 0.015625, 0.009843, 0.006201, 0.003906),
    ],
    ("interleaved", 12): [
        *(0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625),
        *(0.707107, 0.353553, 0.176777, 0.088388),
    ],
    ("geometric", 16): HALF_OF_16,
    ("interleaved", 16): HALF_OF_16,
    ("geometric", 20): [2 ** (-0.4 * h) for h in range(1, 21)],
    ("interleaved", 20): [*HALF_OF_16, 2**-0.25, 2**-0.75, 2**-1.25, 2**-1.75],
}

PRINTED = 0.5e-6
"""The numbers of the paper are printed with six decimals."""


def alibi(heads, slopes, length):
    positions = torch.arange(length)
    encoding = lw.make("alibi", heads=heads, width=heads, slopes=slopes)
    return encoding.bias(torch.zeros(1, length, heads), lw.TokenLayout.of(positions)).dense()[0]


@pytest.mark.parametrize(("rule", "heads"), SLOPES)
def test_alibi_has_the_slopes_of_its_rule(rule, heads):
    one_back = alibi(heads, rule, length=2)[:, 1, 0]
    torch.testing.assert_close(one_back.double(), -torch.tensor(SLOPES[rule, heads]).double(), atol=PRINTED, rtol=0)


def test_alibi_has_the_minima_of_figure_12():
    minima = alibi(12, "geometric", length=512).amin((1, 2)).tolist()
    figure = [-321.9, -202.8, -127.8, -80.5, -50.7, -31.9, -20.1, -12.7, -8.0, -5.0, -3.2, -2.0]
    assert [round(minimum, 1) for minimum in minima] == figure


def assert_equal_after_softmax(ours, theirs):
    """Two biases (head, query, key) differ by a number per row at most, in the past of each query."""
    difference = (ours.double() - theirs.double()).tril()
    per_row = difference[..., :1].expand_as(difference).tril()
    # Theirs multiplies slope and position in float32, ours slope and distance: half a unit each, and twice for
    # the two entries compared.
    largest = max(ours.abs().max().item(), theirs.abs().max().item())
    torch.testing.assert_close(difference, per_row, atol=2 * torch.finfo(torch.float32).eps * largest, rtol=0)


@pytest.mark.parametrize("heads", [7, 8, 12, 20])
def test_interleaved_alibi_is_blooms_after_the_softmax(heads):
    theirs = build_alibi_tensor(torch.ones(1, 63, dtype=torch.long), heads, torch.float32)
    assert_equal_after_softmax(alibi(heads, "interleaved", 63), theirs.expand(-1, 63, -1))


@pytest.mark.parametrize("heads", [7, 8, 12, 20])
def test_interleaved_alibi_is_mpts_after_the_softmax(heads):
    assert_equal_after_softmax(alibi(heads, "interleaved", 63), build_mpt_alibi_tensor(heads, 63).expand(-1, 63, -1))


@pytest.mark.parametrize(
    ("causal", "first_bucket", "borders"),
    [
        (True, 16, [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]),
        (False, 8, [8, 12, 16, 23, 32, 46, 64, 91]),
    ],
    ids=["causal", "two-sided"],
)
def test_t5_buckets_begin_where_they_should(causal, first_bucket, borders):
    encoding = lw.make("t5", heads=1, width=1, causal=causal)
    with torch.no_grad():
        encoding.table.copy_(torch.arange(32.0)[:, None])
    query, key = torch.tensor([200]), torch.arange(401)
    layout = lw.TokenLayout.of(query, key, start=200, causal=causal)
    buckets = encoding.bias(torch.zeros(1, 1, 1), layout).dense()[0, 0, 0].long().tolist()
    past, ahead = buckets[200::-1], buckets[200:]
    assert past[:first_bucket] == list(range(first_bucket))
    assert [past.index(first_bucket + n) for n in range(len(borders))] == borders
    assert past == sorted(past)
    if not causal:
        assert ahead[1:] == [16 + bucket for bucket in past[1:]]


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
@pytest.mark.parametrize(("queries", "keys"), [(211, 211), (5, 211)])
def test_t5_is_transformers_own(causal, queries, keys):
    theirs = T5Attention(
        T5Config(num_heads=7, d_model=21, d_kv=3, is_decoder=causal), has_relative_attention_bias=True, layer_idx=0
    )
    ours = lw.make("t5", heads=7, width=21, causal=causal)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.copy_(ours.table)
    key = torch.arange(keys)
    got = ours.bias(torch.zeros(1, queries, 21), lw.TokenLayout.of(key[-queries:], key)).dense()
    assert torch.equal(got, theirs.compute_bias(queries, keys, past_seen_tokens=keys - queries))


def test_the_forgetting_transformer_is_cable_without_weights_under_softplus():
    # torch's softplus is linear beyond 20, where a float32 cannot tell and a float64 can.
    u = torch.linspace(-19, 19, 101, dtype=torch.float64)
    assert_same(-F.softplus(u), F.logsigmoid(-u), roundings=4)
    fox, cable = make("fox", seed=1), make("cable-nw", seed=1)
    cable.step = lambda x: F.softplus(-cable.to_step(x).transpose(1, 2))
    x, positions = torch.randn(3, 23, 21, dtype=torch.float64), torch.arange(23)
    ours, theirs = (encoding.bias(x, lw.TokenLayout.of(positions)).dense() for encoding in (fox, cable))
    assert_same(ours, theirs, roundings=100, scale=theirs.abs().max())


@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("name", ["kerple", "kerple-power"])
def test_kerple_stays_positive_however_far_training_flings_it(name, maximize):
    torch.manual_seed(6)
    encoding = lw.make(name, heads=7, width=21)
    optimiser = torch.optim.SGD(encoding.parameters(), lr=1e3, maximize=maximize)
    positions = torch.arange(64)
    for _ in range(5):
        bias = encoding.bias(torch.zeros(1, 64, 21), lw.TokenLayout.of(positions)).dense()
        assert bias.isfinite().all()
        assert (bias <= 0).all()
        assert (encoding.p > 0).all()
        assert (encoding.a > 0).all()
        optimiser.zero_grad()
        bias.mean().backward()
        optimiser.step()


@pytest.mark.parametrize("name", ["kerple", "kerple-power"])
def test_kerple_stays_positive_when_weights_are_averaged(name):
    models = [make(name, seed=seed) for seed in range(5)]
    average = torch.optim.swa_utils.AveragedModel(models[0])
    for model in models:
        average.update_parameters(model)
    positions = torch.arange(64)
    bias = average.module.bias(torch.zeros(1, 64, 21), lw.TokenLayout.of(positions)).dense()
    assert (bias.tril() <= 0).all()
    assert (average.module.p > 0).all()
    assert (average.module.a > 0).all()


# Computed in plain Python from the paper's formula, as attention-gym has it.
SANDWICH = {
    (8, 0): {0: 64.0, 1: 62.09368, 2: 57.38186, 10: 42.82002, 100: 30.54345, 1000: 10.17773},
    (12, 11): {0: 8.0, 1: 7.76171, 100: 3.81793},
}


@pytest.mark.parametrize(("heads", "head"), SANDWICH)
def test_sandwich_has_the_numbers_of_its_formula(heads, head):
    encoding = lw.make("sandwich", heads=heads, width=heads)
    last_row = encoding.bias(torch.zeros(1, 1001, heads), lw.layout(1001)).dense()[0, head, -1].flip(0)
    for distance, number in SANDWICH[heads, head].items():
        assert float(last_row[distance]) == pytest.approx(number, abs=0.5e-5 + 4e-6)


@pytest.mark.parametrize(("name", "options"), [("bam", {}), ("bam", {"learned": "all"}), ("alibi", {"learned": True})])
def test_what_contains_alibi_starts_as_alibi(name, options):
    slopes = {} if name == "bam" else {"slopes": "interleaved"}
    encoding = lw.make(name, heads=7, width=7, **options, **slopes)
    got = encoding.bias(torch.zeros(1, 63, 7), lw.layout(63)).dense()[0].detach()
    offset = 1e-5 if name == "bam" else 0.0
    assert_same(got.tril(), (alibi(7, "interleaved", 63) - offset).tril(), roundings=8)
