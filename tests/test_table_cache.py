"""What is cached from token to token must never outlive what it was made of."""

import pytest
import torch

import lengthwise as lw
from lengthwise.bias import DistanceBias, LineBias

KEYS = 40


def make(name: str, **options) -> lw.Encoding:
    torch.manual_seed(0)
    return lw.make(name, heads=3, width=12, head_dim=4, train_length=16, **options)


def decoded(encoding: lw.Encoding, keys: int = KEYS) -> lw.Bias:
    """The bias of the newest token."""
    positions = torch.arange(keys)
    with torch.no_grad():
        return encoding.bias(torch.zeros(1, 1, 12), lw.TokenLayout.of(positions[-1:], positions))


def table(bias: lw.Bias) -> torch.Tensor:
    if isinstance(bias, LineBias):
        return bias.slope
    assert isinstance(bias, DistanceBias)
    return bias.table


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """To the last bit or two: a vector's power may round other than that of the numbers left over at its end."""
    assert torch.allclose(a, b, rtol=2**-22, atol=0)


@pytest.fixture(params=["kerple", "kerple-power", "t5", "fire", "fire beyond L"])
def encoding(request):
    name, _, beyond = request.param.partition(" ")
    return make(name, **({"threshold": 8.0} if beyond else {}))


def test_a_table_serves_the_next_tokens_too(encoding):
    first = table(decoded(encoding))
    assert table(decoded(encoding, KEYS + 1)) is first
    assert decoded(encoding, KEYS + 1).dense().shape[-1] == KEYS + 1


@pytest.mark.parametrize("name", ["kerple", "kerple-power", "fire"])
def test_a_table_that_no_longer_reaches_is_made_anew(name):
    encoding = make(name, **({"threshold": 1e4} if name == "fire" else {}))
    assert table(decoded(encoding)) is not table(decoded(encoding, 600))


def test_a_cached_table_gives_the_row_of_one_pass(encoding):
    positions = torch.arange(KEYS)
    decoded(encoding, KEYS - 1)
    whole = encoding.bias(torch.zeros(1, KEYS, 12), lw.TokenLayout.of(positions))
    assert_same(decoded(encoding).dense()[0, :, 0], whole.dense()[0, :, -1])


def test_a_parameter_that_changes_unseen_makes_a_new_table(encoding):
    before = decoded(encoding).dense()
    parameters = list(encoding.parameters())
    for parameter in parameters:
        versions = parameter._version
        parameter.data.mul_(1.5)
        assert parameter._version == versions
    after = decoded(encoding).dense()
    fresh = encoding.bias(torch.zeros(1, 1, 12), lw.layout(1, past=KEYS - 1)).dense()
    assert_same(after, fresh)
    assert not torch.equal(after, before)


def test_where_a_gradient_may_be_wanted_nothing_is_cached(encoding):
    decoded(encoding)
    bias = encoding.bias(torch.zeros(1, 1, 12), lw.layout(1, past=KEYS - 1))
    assert bias.needs_grad
    assert table(bias).requires_grad


def test_positions_of_inference_mode_are_taken():
    with torch.inference_mode():
        key = torch.arange(4)
        assert (
            decoded(make("kerple"), 4).shape
            == make("kerple").bias(torch.zeros(1, 1, 12), lw.TokenLayout.of(key[-1:], key)).shape
        )


@pytest.mark.parametrize("beyond", [False, True])
def test_fire_far_along_with_few_keys_is_a_part_of_the_whole(beyond):
    encoding, late = make("fire", threshold=8.0 if beyond else 2000.0), torch.arange(996, 1004)
    everything, x = torch.arange(1004), torch.zeros(1, 8, 12)
    whole = encoding.bias(torch.zeros(1, 1004, 12), lw.TokenLayout.of(everything)).dense()
    assert_same(encoding.bias(x, lw.TokenLayout.of(late[-4:], late)).dense(), whole[:, :, -4:, -8:])
