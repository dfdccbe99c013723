import json

import pytest

import slice_model


@pytest.mark.parametrize("model", ["glm52", "dsv32"])
def test_a_ranks_share_divides_what_tensor_parallelism_divides(model):
    whole, share = slice_model.config(model, 24, 1), slice_model.config(model, 24, 8)
    for key, value in whole.items():
        assert share[key] == (value // 8 if key in slice_model.SHARDED else value), key


def test_a_tp_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="tp: expected a divisor of intermediate_size = 12288, got 7"):
        slice_model.config("glm52", 24, 7)
    with pytest.raises(ValueError, match="expected positive numbers"):
        slice_model.config("glm52", 0, 8)


def test_written_words_are_one_token_each(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    slice_model.write(tmp_path, layers=4)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    size = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    assert made.get_vocab_size() == size == 19360
    assert made.encode("w3 w19359 nonsense").ids == [3, 19359, 2]
