"""Text to tokens: the template in use, and prompts for which no response can be generated."""

import string

import pytest

from rollout.prompts import ChatTokenizer, PromptError
from services.contracts import Cause, Prompt
from services.storage.errors import StoreError

PLAIN = "{{ messages[0]['content'] }}"
PICKY = "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}{{ messages[0]['content'] }}"


def prompt(*texts):
    messages = tuple({"role": "user", "content": text} for text in texts)
    return Prompt(id="p000007", messages=messages, verifier="pattern", reference={})


def ids_of(characters):
    """Ids of the tiny model's tokenizer: seven special tokens, then string.printable ('0' is 7)."""
    return [7 + int(character) for character in characters]


def test_the_tokenizer_s_own_template_opens_the_assistant_s_turn(tiny_model):
    assert ChatTokenizer(str(tiny_model), 9).prompt_ids(prompt("12")).tolist() == [2, 4, *ids_of("12"), 5]


def test_a_template_file_replaces_the_tokenizer_s_template(tiny_model, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(PLAIN)
    assert ChatTokenizer(str(tiny_model), 9, str(file)).prompt_ids(prompt("12")).tolist() == ids_of("12")


def test_a_template_beside_the_recipe_comes_with_the_run(tiny_model):
    tokenizer = ChatTokenizer(str(tiny_model), 9, "./chat.jinja", {"./chat.jinja": PLAIN})
    assert tokenizer.prompt_ids(prompt("12")).tolist() == ids_of("12")
    with pytest.raises(StoreError, match="expected the name of a file that the run was submitted with"):
        ChatTokenizer(str(tiny_model), 9, "./chat.jinja", {"./other": PLAIN})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("root:TOP-SECRET\n{% for x TOP-SECRET %}", "TemplateSyntaxError in line 2"),
        ("{{ TOP_SECRET.missing.field }}", "UndefinedError"),
    ],
)
def test_errors_of_a_template_do_not_quote_it(tiny_model, tmp_path, text, said):
    file = tmp_path / "chat.jinja"
    file.write_text(text)
    with pytest.raises(PromptError) as caught:
        ChatTokenizer(str(tiny_model), 9, str(file)).prompt_ids(prompt("1"))
    assert str(caught.value) == f"prompt 'p000007' was rejected by the chat template: {said}"


def test_errors_of_a_tokenizer_do_not_quote_it(tiny_model, tmp_path):
    for file in tiny_model.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").write_text('{"version": "TOP-SECRET", "model": "TOP-SECRET"}')
    with pytest.raises(ValueError, match="expected a folder with a tokenizer that transformers can load") as caught:
        ChatTokenizer(str(tmp_path), 9)
    assert "SECRET" not in str(caught.value)


def test_template_none_joins_the_texts(tiny_model):
    ids = ChatTokenizer(str(tiny_model), 9, "none").prompt_ids(prompt("1", "2")).tolist()
    newline = 7 + string.printable.index("\n")
    assert ids == [*ids_of("1"), newline, newline, *ids_of("2")]


def test_a_base_model_without_a_template_names_the_setting(tiny_model, tmp_path):
    for file in tiny_model.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(
        ValueError, match=r"model\.chat_template: null is not valid: expected .* 'none' .* no template$"
    ):
        ChatTokenizer(str(tmp_path), 9)
    assert ChatTokenizer(str(tmp_path), 9, "none").prompt_ids(prompt("1")).tolist() == ids_of("1")


def test_a_template_that_cannot_be_read_names_the_setting(tiny_model):
    with pytest.raises(StoreError, match=r"^model\.chat_template: '/no/such\.jinja' is not valid"):
        ChatTokenizer(str(tiny_model), 9, "/no/such.jinja")


def test_one_token_above_max_prompt_tokens_is_too_long(tiny_model):
    tokenizer = ChatTokenizer(str(tiny_model), 9)
    assert len(tokenizer.prompt_ids(prompt("1" * 6))) == 9
    with pytest.raises(PromptError, match="'p000007': 10 tokens is not valid: expected at most 9") as caught:
        tokenizer.prompt_ids(prompt("1" * 7))
    assert caught.value.cause is Cause.TOO_LONG


def test_a_prompt_that_the_template_rejects_has_its_own_cause(tiny_model, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(PICKY)
    with pytest.raises(PromptError, match="one message only") as caught:
        ChatTokenizer(str(tiny_model), 9, str(file)).prompt_ids(prompt("1", "2"))
    assert caught.value.cause is Cause.REFUSED
