import pytest

from lightrft.config.reward_models import reward_folders


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_upstreams_ways_to_name_none(text):
    assert reward_folders(text) == {}


def test_one_folder_has_a_name_and_several_have_theirs_in_their_order():
    assert reward_folders("path/to/it") == {"reward_model": "path/to/it"}
    assert list(reward_folders('{"safe": "a", "helpful-2": "b"}').items()) == [("safe", "a"), ("helpful-2", "b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ', "must be a folder or a JSON object"),
        ('{"a": "x", "a": "y"}', "the name 'a' is given twice"),
        ('{"a": 1}', "must map names to folders: 'a' has 1"),
        ('{"a": ""}', "must map names to folders"),
        ('{"a/b": "x"}', "'a/b' is no such name"),
        ('{"": "x"}', "'' is no such name"),
    ],
)
def test_what_names_no_models_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        reward_folders(text)
