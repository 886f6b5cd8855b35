"""The loss in chunks is the loss in one piece, its gradients too, and no logits are kept."""

import pytest
import torch
import torch.nn.functional as F
from model_kit import VOCABULARY, loud_model, tokens
from torch import nn

from lengthwise.model import losses
from lengthwise.model.losses import head_loss


def plain(x, weight, labels, reduction):
    return F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten(), reduction=reduction, ignore_index=-100)


def inputs(dtype=torch.float64, length=37):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, length, 8, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(23, 8, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, 23, (3, length), generator=generator)
    labels[0, :5] = -100
    return x, weight, labels


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [7, 37, 512])
def test_loss_and_gradients_are_those_of_cross_entropy(monkeypatch, reduction, chunk):
    monkeypatch.setattr(losses, "CHUNK", chunk)
    x, weight, labels = inputs(torch.float32)
    found, expected = head_loss(x, weight, labels, reduction=reduction), plain(x, weight, labels, reduction)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(2.5 * loss, (x, weight)) for loss in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max() * 37**0.5
    with torch.no_grad():
        assert head_loss(x, weight, labels, reduction=reduction).item() == pytest.approx(expected.item(), rel=1e-6)


def test_one_side_alone_may_learn():
    x, weight, labels = inputs(torch.float32)
    (d_x,) = torch.autograd.grad(head_loss(x, weight.detach(), labels), x)
    (d_weight,) = torch.autograd.grad(head_loss(x.detach(), weight, labels), weight)
    both = torch.autograd.grad(head_loss(x, weight, labels), (x, weight))
    assert torch.equal(d_x, both[0])
    assert torch.equal(d_weight, both[1])


def second_derivative(first: torch.Tensor, of: torch.Tensor, how: str) -> None:
    (slope,) = torch.autograd.grad(first, of, create_graph=True)
    if how == "backward":
        slope.square().sum().backward()
    else:
        torch.autograd.grad(slope.square().sum(), of)


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_a_second_derivative_is_refused_in_words(how):
    x, weight, labels = inputs(torch.float32)
    scale = torch.ones(8, requires_grad=True)
    # Beside the head there is another way to the scale, so that torch has an answer, and a wrong one.
    loss = head_loss(x * scale, weight, labels) + scale.square().sum()
    with pytest.raises(NotImplementedError, match=r"second derivative.*model\(ids, labels=labels\)\.loss"):
        second_derivative(loss, scale, how)


def test_a_compiled_loss_has_the_gradients_of_one_that_is_not():
    x, weight, labels = inputs(torch.float32)
    compiled = torch.compile(head_loss, backend="aot_eager")
    ours, theirs = (torch.autograd.grad(loss(x, weight, labels), (x, weight)) for loss in (compiled, head_loss))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_single_losses_come_without_gradients_only():
    x, weight, labels = inputs(torch.float32)
    with pytest.raises(ValueError, match="no_grad"):
        head_loss(x, weight, labels, reduction="none")
    with torch.no_grad():
        found = head_loss(x, weight, labels, reduction="none")
        assert torch.allclose(found, plain(x, weight, labels, "none").view(3, 37), rtol=1e-5, atol=1e-6)
    assert not found[0, :5].any()


@pytest.mark.parametrize("case", ["cable", "learned", "dapev2-cable"])
def test_the_models_loss_is_that_of_forward_with_labels(case):
    model, ids = loud_model(case).train(), tokens()
    labels = ids.clone()
    labels[1, :7] = -100
    ours, theirs = model.loss(ids, labels), model(ids, labels=labels).loss
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    named = dict(model.named_parameters())
    pairs = zip(*(torch.autograd.grad(loss, list(named.values())) for loss in (ours, theirs)), strict=True)
    for name, (a, b) in zip(named, pairs, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(1.0, float(b.abs().max())), name


def test_no_logits_are_kept_for_backward():
    model, ids = loud_model("none"), tokens(1, 29)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        model.loss(ids, ids)
    assert not [shape for shape in kept if len(shape) > 1 and shape[-1] == VOCABULARY]


def test_autocast_and_half_precision_give_a_float32_loss_near_the_exact_one():
    model, ids = loud_model("kerple"), tokens()
    exact = model.loss(ids, ids).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model.loss(ids, ids)
    mixed.backward()
    assert mixed.dtype == torch.float32
    assert mixed.item() == pytest.approx(exact, rel=0.02)
    half = model.bfloat16().loss(ids, ids)
    half.backward()
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(exact, rel=0.05)


def test_labels_of_another_length_are_named():
    model, ids = loud_model("none"), tokens()
    with pytest.raises(ValueError, match=r"28 tokens long.*29"):
        model.loss(ids, ids[:, :28])
    with pytest.raises(ValueError, match="reduction"):
        model.loss(ids, ids, reduction="average")


def test_another_negative_label_is_no_word():
    model, ids = loud_model("alibi"), tokens()
    labels = ids.clone()
    labels[0, 3] = -1
    with pytest.raises(RuntimeError, match="out of bounds"):
        model.loss(ids, labels)


def test_a_head_that_was_wrapped_is_not_passed_over():
    model, ids = loud_model("alibi"), tokens()
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(NotImplementedError, match=r"a plain head, got a Sequential; use model\(ids, labels"):
        model.loss(ids, ids)
