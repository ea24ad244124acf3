import pytest

from lightrft.strategy.utils.checkpoint_folder import (
    MARK,
    checkpoint_name,
    checkpoints,
    complete_checkpoints,
    delete,
    fault,
    newest_complete,
    open_partial,
    partial_of,
    publish,
    sweep,
)


@pytest.fixture
def save(tmp_path):
    """Writes a checkpoint of one file, in a folder."""

    def save(step, text="weights"):
        folder = tmp_path / checkpoint_name(step)
        open_partial(folder)
        (partial_of(folder) / "roles").mkdir()
        (partial_of(folder) / "roles" / ".metadata").write_text(text)
        publish(folder)
        return folder

    return save


def test_checkpoints_are_ordered_by_step_and_not_by_name(tmp_path, save):
    """CKPT-04: the ninth digit comes after eight nines."""
    for step in (10, 9, 100_000_000, 99_999_999):
        save(step)
    (tmp_path / "step_00000011.1").mkdir()
    assert list(checkpoints(tmp_path)) == list(complete_checkpoints(tmp_path)) == [9, 10, 99_999_999, 100_000_000]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MARK).unlink(), "it is half-written"),
        (lambda folder: (folder / "roles" / ".metadata").unlink(), "roles/.metadata is missing"),
        (lambda folder: (folder / "roles" / ".metadata").write_text("wei"), "roles/.metadata has 3 bytes of 7"),
        (lambda folder: folder.rename(partial_of(folder)), "it is half-written"),
    ],
)
def test_a_broken_one_is_refused_with_its_fault_and_the_one_before_is_taken(tmp_path, save, damage, reason):
    """CKPT-05"""
    good, bad = save(9), save(12)
    assert newest_complete(tmp_path) == (bad, {})
    damage(bad)
    newest, refused = newest_complete(tmp_path)
    assert newest == good
    assert list(refused.values()) == [reason]


def test_what_is_half_written_again_does_not_hide_the_whole_one(tmp_path, save):
    whole = save(12)
    open_partial(whole)
    assert newest_complete(tmp_path) == (whole, {})


def test_no_folder_at_all_holds_no_checkpoint(tmp_path):
    assert newest_complete(tmp_path / "none") == (None, {})


def test_a_broken_one_is_replaced_when_its_step_is_saved_again(tmp_path, save):
    """CKPT-05"""
    folder = save(12, "wrong")
    (folder / MARK).unlink()
    save(12, "right")
    assert fault(folder) is None
    assert (folder / "roles" / ".metadata").read_text() == "right"
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_sweeping_removes_what_is_broken_up_to_the_last_complete_one(tmp_path, save):
    for step in (3, 6, 9, 12):
        save(step)
    for step in (3, 12):
        (tmp_path / checkpoint_name(step) / MARK).unlink()
    open_partial(tmp_path / checkpoint_name(5))
    sweep(tmp_path, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(step) for step in (6, 9, 12)]


def test_a_deletion_takes_the_mark_first(tmp_path, save, monkeypatch):
    """CKPT-05: a kill in the middle of it leaves nothing that looks complete."""
    folder = save(9)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete(folder)
    assert fault(folder) == "it is half-written"
