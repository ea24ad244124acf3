import pytest

from lightrft.config.recipes import Part, read_recipes, sum_of


def test_a_recipe_maps_labels_to_weighted_components_with_options():
    text = (
        "{gsm8k: {last_number: 0.9, mine.py:form: {weight: 0.1, ungradable: -1, tags: [a, b]}}, '*': {exact_match: 1}}"
    )
    recipes = read_recipes(text)
    form = Part("mine.py:form", 0.1, -1.0, {"tags": ["a", "b"]})
    assert recipes.by_label == {"gsm8k": (Part("last_number", 0.9), form), "*": (Part("exact_match"),)}
    assert [part.name for part in recipes.of("gsm8k")] == ["last_number", "form"]
    assert recipes.of("another") == recipes.of(None) == (Part("exact_match"),)


def test_a_recipe_is_read_from_yaml_and_json_files(tmp_path):
    (tmp_path / "recipe.yaml").write_text("gsm8k:\n  last_number: 1\n1:\n  exact_match: 2\n")
    (tmp_path / "recipe.json").write_text('{"gsm8k": {"last_number": 1}, "1": {"exact_match": 2}}')
    expected = {"gsm8k": (Part("last_number"),), "1": (Part("exact_match", 2.0),)}
    for name in ("recipe.yaml", "recipe.json"):
        recipes = read_recipes(str(tmp_path / name))
        assert recipes.by_label == expected
        # A label of the data may be a number.
        assert recipes.of(1) == (Part("exact_match", 2.0),)


def test_numbers_of_json_are_numbers():
    """PyYAML alone takes them for texts, for want of a point or a sign."""
    for text, weight in (("1e-2", 0.01), ("1E3", 1000.0), ("2.5e1", 25.0), ("-1e0", -1.0)):
        assert read_recipes(f'{{"a": {{"x": {text}}}}}').of("a") == (Part("x", weight),)


def test_a_quoted_label_is_a_text_and_a_true_one_is_that_of_the_data():
    recipes = read_recipes("{'yes': {x: 1}, true: {x: 2}, null: {x: 3}, '010': {x: 4}}")
    for label, weight in (("yes", 1.0), (True, 2.0), (None, 3.0), ("010", 4.0)):
        assert recipes.of(label) == (Part("x", weight),)


def test_labels_may_share_a_recipe_by_yamls_anchors():
    recipes = read_recipes("a: &both {x: 1}\nb: *both\nc: {<<: *both, y: 1}")
    assert recipes.of("a") == recipes.of("b") == (Part("x"),)
    assert {part.component for part in recipes.of("c")} == {"x", "y"}


def test_a_label_without_a_recipe_is_an_error_with_the_known_ones():
    """DATA-04"""
    with pytest.raises(ValueError, match=r"'gsm' has none, reward_recipe has gsm8k, geo3k\. Add it, or '\*' for all"):
        read_recipes("{gsm8k: {last_number: 1}, geo3k: {exact_match: 1}}").of("gsm")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "reward_recipe must map labels to components: ''"),
        ("gsm8k", "reward_recipe must map labels to components: 'gsm8k'"),
        ("{}", "reward_recipe must map labels to components"),
        ("[gsm8k]", "reward_recipe must map labels to components"),
        ("{gsm8k: {last_number: 1}", "reward_recipe must be YAML or JSON: "),
        ("gone.yaml", "reward_recipe must name an existing file: gone.yaml is no file."),
        ("{a: last_number}", "a recipe must map components to weights: reward_recipe has 'last_number' for a."),
        ("{a: {}}", "a recipe must map components to weights: reward_recipe has {} for a."),
        ("{a: {x: heavy}}", "weight must be a finite number: reward_recipe has 'heavy' for x of a."),
        ("{a: {x: .nan}}", "weight must be a finite number: reward_recipe has nan for x of a."),
        (f"{{a: {{x: 1{'0' * 400}}}}}", "weight must be a finite number: reward_recipe has 1000"),
        ("{a: {x: true}}", "weight must be a finite number: reward_recipe has True for x of a."),
        ("{a: {x: {weight: .inf}}}", "weight must be a finite number: reward_recipe has inf for x of a."),
        ("{a: {x: {ungradable: null}}}", "ungradable must be a finite number: reward_recipe has None for x of a."),
        ("{a: {x: {1: 2}}}", "options must have names: reward_recipe has {1: 2} for x of a."),
        ("{a: {x: 1, x: 2}}", "reward_recipe may have a key once: x. Drop all but one."),
        ("{yes: {x: 1}}", "a label must be what is written: reward_recipe has yes, which YAML reads as True."),
        ("{010: {x: 1}}", "a label must be what is written: reward_recipe has 010, which YAML reads as 8."),
        ("{a: {x: 1e400}}", "weight must be a finite number: reward_recipe has inf for x of a."),
        ("{a: {x: 1}, a: {y: 1}}", "reward_recipe may have a key once: a. Drop all but one."),
        ("{a: {m.py:f: 1}, b: {n.py:f: 1}}", "different names in metrics: reward_recipe has m.py:f and n.py:f."),
    ],
)
def test_what_is_no_recipe_says_what_is_wrong(text, message):
    with pytest.raises(ValueError) as caught:
        read_recipes(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_parts_with_equal_options_are_graded_once_and_others_apart():
    recipes = read_recipes("{a: {f.py:f: {x: 1}}, b: {f.py:f: {weight: 3, x: 1}}, c: {f.py:f: {x: 2}}}")
    assert [part.options for part in recipes.parts().values()] == [{"x": 1}, {"x": 2}]


def test_without_recipes_components_add_up_and_a_single_one_is_the_whole_reward():
    assert sum_of(["f.py:f", "judge"]).of("any") == (Part("f.py:f"), Part("judge"))
    assert sum_of(["f.py:f"]).of("any") == (Part("f.py:f", is_whole=True),)
    # The value of one would stand for both.
    with pytest.raises(ValueError, match=r"different names in metrics: the flags name f\.py:judge and judge\. Rename"):
        sum_of(["f.py:judge", "judge"])
