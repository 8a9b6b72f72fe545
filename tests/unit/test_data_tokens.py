"""Which tokens a document becomes and which of them the model has to predict."""

from typing import Any

import pytest
from tokenizers import processors

from fourfold.data.parallel import encode_parallel
from fourfold.data.tokens import encode, encode_all
from fourfold.data.vocabulary import check_vocabulary, pad_id
from tests.unit.data_words import MARKED, PLAIN, WORDS, chat, shown, tokenizer


def test_text_is_all_target_between_bos_and_eos() -> None:
    assert shown({"text": "a b"}, by=tokenizer()) == ["[<s>]", "[a]", "[b]", "[</s>]"]
    assert shown({"text": "a b"}, by=tokenizer(bos=False)) == ["[a]", "[b]", "[</s>]"]


def test_eos_is_not_doubled() -> None:
    own_eos = tokenizer()
    own_eos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    assert shown({"text": "a"}, by=own_eos) == ["[a]", "[</s>]"]


def test_text_without_eos_token_is_refused() -> None:
    with pytest.raises(ValueError, match="tiny-words has no eos token"):
        encode({"text": "a"}, tokenizer=tokenizer(eos_token=None))


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_only_the_assistant_is_target(template: str) -> None:
    messages = chat("u:a b", "a:c", "u:d", "a:e f")
    expected = "<s> <u> a b </s> <a> [c] [</s>] <u> d </s> <a> [e] [f] [</s>]"
    assert " ".join(shown({"messages": messages}, by=tokenizer(template))) == expected


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_conversation_without_assistant_has_no_target(template: str) -> None:
    assert shown({"messages": chat("u:a", "u:b")}, by=tokenizer(template)) == [
        "<s>",
        "<u>",
        "a",
        "</s>",
        "<u>",
        "b",
        "</s>",
    ]


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_empty_answer_still_has_its_end(template: str) -> None:
    assert shown({"messages": chat("u:a", "a:")}, by=tokenizer(template)) == [
        "<s>",
        "<u>",
        "a",
        "</s>",
        "<a>",
        "[</s>]",
    ]


def test_none_valued_keys_of_arrow_do_not_reach_the_template() -> None:
    strict = MARKED.replace("{% for m in messages %}", "{% for m in messages %}{% if 'tools' in m %}b{% endif %}")
    messages = [{**message, "tools": None} for message in chat("u:a", "a:c")]
    assert shown({"messages": messages}, by=tokenizer(strict)) == ["<s>", "<u>", "a", "</s>", "<a>", "[c]", "[</s>]"]


def test_opening_answer_without_marks_is_no_target() -> None:
    assert shown({"messages": chat("a:a", "u:b", "a:c")}, by=tokenizer(PLAIN))[-6:] == [
        "<u>",
        "b",
        "</s>",
        "<a>",
        "[c]",
        "[</s>]",
    ]
    assert not any(encode({"messages": chat("a:a", "u:b")}, tokenizer=tokenizer(PLAIN)).is_target)


def test_no_template_is_refused() -> None:
    with pytest.raises(ValueError, match="tiny-words has no chat template"):
        encode({"messages": chat("u:a", "a:b")}, tokenizer=tokenizer())


def test_template_that_rewrites_earlier_turns_is_refused() -> None:
    """As those do that drop the reasoning of all but the last answer."""
    rewriting = PLAIN.replace("{{ m.content }}</s>{% else %}", "{{ m.content if loop.last else 'g' }}</s>{% else %}")
    assert rewriting != PLAIN
    assert any(encode({"messages": chat("u:a", "a:b")}, tokenizer=tokenizer(rewriting)).is_target)
    with pytest.raises(ValueError, match=r"tiny-words has no \{% generation %\} marks, and message 1"):
        encode({"messages": chat("u:a", "a:b", "u:c", "a:d")}, tokenizer=tokenizer(rewriting))


def test_generation_prompt_that_is_no_prefix_is_refused() -> None:
    other = PLAIN.replace("{% if add_generation_prompt %}<a>", "{% if add_generation_prompt %}<sys>")
    with pytest.raises(ValueError, match=r"no prefix of the conversation's.*'b'"):
        encode({"messages": chat("u:a", "a:b")}, tokenizer=tokenizer(other))


def test_marks_around_nothing_are_refused() -> None:
    idle = "{% generation %}{% endgeneration %}" + PLAIN
    with pytest.raises(ValueError, match="tiny-words marks no token of an assistant turn"):
        encode({"messages": chat("u:a", "a:b")}, tokenizer=tokenizer(idle))
    assert not any(encode({"messages": chat("u:a")}, tokenizer=tokenizer(idle)).is_target)


def test_empty_answer_between_tight_marks_is_no_fault_of_the_template() -> None:
    tight = MARKED.replace("{{ m.content }}</s>{% endgeneration %}", "{{ m.content }}{% endgeneration %}</s>")
    assert tight != MARKED
    assert not any(encode({"messages": chat("u:a", "a:")}, tokenizer=tokenizer(tight)).is_target)


def mixed(count: int) -> list[dict[str, Any]]:
    letters = "abcdefg"
    return [
        {"messages": chat("u:a", f"a:{letters[i % 7]}")} if i % 3 == 0 else {"text": " ".join(letters[: i % 7 + 1])}
        for i in range(count)
    ]


def test_batches_keep_the_order_of_mixed_documents() -> None:
    words = tokenizer(MARKED)
    assert list(encode_all(mixed(150), tokenizer=words)) == [
        encode(document, tokenizer=words) for document in mixed(150)
    ]


def test_several_processes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.data.parallel.CHUNK", 1000)  # more than one chunk
    words = tokenizer(MARKED)
    documents = mixed(150)
    assert list(encode_parallel(documents, tokenizer=words, num_proc=2)) == list(encode_all(documents, tokenizer=words))


def test_long_text_is_no_warning(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    words = tokenizer(MARKED, model_max_length=4)
    assert len(encode({"text": "a " * 50}, tokenizer=words).input_ids) == 52
    encode({"messages": chat("u:a", "a:" + "b " * 50)}, tokenizer=words)
    encode({"messages": chat("u:a", "a:" + "b " * 50)}, tokenizer=tokenizer(PLAIN, model_max_length=4))
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_vocabulary_larger_than_the_models() -> None:
    words = tokenizer()
    check_vocabulary(words, len(WORDS), model_path="m")
    check_vocabulary(words, len(WORDS) + 50, model_path="m")  # padded embeddings are common
    with pytest.raises(
        ValueError, match=rf"{len(WORDS)} tokens but model.path=some/model has vocab_size={len(WORDS) - 1}"
    ):
        check_vocabulary(words, len(WORDS) - 1, model_path="some/model")
    words.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="<new>"):
        check_vocabulary(words, len(WORDS), model_path="m")


def test_vocabulary_may_hold_the_image_token_of_a_sibling() -> None:
    words = tokenizer(extra_special_tokens={"image_token": "<image>"})
    assert len(words) == len(WORDS) + 1
    check_vocabulary(words, len(WORDS), model_path="gemma-3-1b")


def test_pad_id() -> None:
    assert pad_id(tokenizer()) == 0
    assert pad_id(tokenizer(pad_token=None)) == 2
    assert pad_id(tokenizer(pad_token=None, eos_token=None)) == 0
