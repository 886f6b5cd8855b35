"""Both sides of the diagonal: maps of two-sided heads, ours and others', and how far left differs from right."""

import pytest
import torch
import transformers as hf
from encoder_kit import loud_encoder
from model_kit import tokens

from lengthwise.inspect import position_maps
from lengthwise.views.figures import corner_note, legend
from lengthwise.views.page.payload import view_payload

SMALL = {"vocab_size": 101, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
BERT = SMALL | {"intermediate_size": 32, "max_position_embeddings": 66}
THEIRS = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)),
    "minilm": lambda: hf.BertModel(hf.BertConfig(**BERT)),
    "modernbert": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(**SMALL, intermediate_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    ),
    "mpnet": lambda: hf.MPNetForMaskedLM(hf.MPNetConfig(**BERT)),
    "deberta": lambda: hf.DebertaV2ForMaskedLM(
        hf.DebertaV2Config(**BERT, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8)
    ),
    "t5": lambda: hf.T5EncoderModel(
        hf.T5Config(vocab_size=101, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3)
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_both_triangles_of_other_people_s_encoders_are_seen(name):
    torch.manual_seed(0)
    model = THEIRS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    maps = position_maps(model, tokens(2, 17), quantity="scores", shown="first")
    assert not maps.maps[0].causal
    assert maps.values.shape == (3, 17, 17)
    assert maps.values.isfinite().all()
    assert ((maps.asymmetry > 0) & (maps.asymmetry < 1)).all()


def test_asymmetry_is_0_where_sides_are_alike_and_counts_the_odd_part():
    ids = tokens(1, 17)
    for encoding, alike in (("alibi", True), ("kerple", True), ("t5", False), ("t5-clamped", False)):
        maps = position_maps(loud_encoder(encoding), ids, quantity="bias")
        assert not maps.maps[0].causal
        assert bool((maps.asymmetry == 0).all()) == alike, encoding
        values = maps.values.double()
        odd, whole = (values - values.mT) / 2, values - values.mean((1, 2), keepdim=True)
        wanted = odd.square().sum((1, 2)).sqrt() / whole.square().sum((1, 2)).sqrt()
        assert torch.allclose(maps.asymmetry[0].double(), wanted, atol=1e-6), encoding


def test_figures_and_page_have_the_third_number_where_there_are_two_sides():
    ids = tokens(2, 17)
    maps = position_maps(loud_encoder("cable"), ids, quantity="bias")
    assert "sides: how far left and right differ" in legend(maps)
    assert "sides" in corner_note(maps.maps[0], 0)
    maps.figure()
    (layer,) = view_payload(maps)
    assert layer["asymmetry"] == pytest.approx(maps.asymmetry[0].tolist())
    assert layer["causal"] is False


def test_our_encoders_can_be_drawn_in_every_quantity():
    for encoding in ("rope", "cable", "learned"):
        for quantity in ("scores", "weights", "profile"):
            maps = position_maps(loud_encoder(encoding), tokens(1, 17), quantity=quantity)
            assert maps.asymmetry.isfinite().all()
