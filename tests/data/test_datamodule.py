"""TextDataModule: prepared once a content, whole epochs, clear errors."""

import logging
import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch

from lightning_ptdp.data import END_OF_TEXT, TextDataModule, preparation


@pytest.fixture
def module_of(tmp_path):
    """A data module with a cache of its own and sizes for small text."""

    def make(paths=None, **options) -> TextDataModule:
        defaults = {"vocab_size": 260, "seq_len": 16, "batch_size": 4, "val_fraction": 0.3}
        sources = {"paths": None if paths is None else str(paths), "cache_dir": str(tmp_path / "cache")}
        return TextDataModule(**{**sources, **defaults, **options})

    return make


@pytest.fixture
def tokenised(monkeypatch) -> Counter:
    """Counts what is tokenised."""
    count: Counter = Counter()
    plain = preparation.tokenise

    def counted(*args, **options) -> None:
        count["splits"] += 1
        plain(*args, **options)

    monkeypatch.setattr(preparation, "tokenise", counted)
    return count


def ready(module: TextDataModule) -> TextDataModule:
    module.prepare_data()
    module.setup()
    return module


def real_tokens(loader) -> Counter:
    labels = torch.cat([batch["labels"].flatten() for batch in loader])
    return Counter(labels[labels != -100].tolist())


def test_batches_are_dicts_of_two_int64_matrices(module_of, forty_files):
    batch = next(iter(ready(module_of(forty_files)).train_dataloader()))
    assert sorted(batch) == ["input_ids", "labels"]
    assert all(part.shape == (4, 16) and part.dtype == torch.int64 for part in batch.values())


def test_an_epoch_has_each_token_once_and_so_has_the_next(module_of, forty_files):
    module = ready(module_of(forty_files))
    expected = Counter(module.prepared.stream("train").read(0, 10**9).tolist())
    loader = module.train_dataloader()
    assert real_tokens(loader) == expected
    assert real_tokens(loader) == expected


def test_a_loader_process_is_sent_the_folder_and_not_the_tokens(module_of, forty_files):
    stream = ready(module_of(forty_files)).prepared.stream("train")
    sent = pickle.dumps(stream)
    assert len(sent) < 1000 < len(stream)
    assert pickle.loads(sent).read(0, 10**9).tolist() == stream.read(0, 10**9).tolist()


def test_two_caches_get_the_same_bytes(module_of, forty_files):
    one = ready(module_of(forty_files)).prepared
    other = ready(module_of(forty_files, cache_dir=str(one.folder.parent / "other"))).prepared
    for name in ("tokenizer.json", "train/tokens.arrow", "validation/tokens.arrow"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()


def test_splits_together_hold_every_document(module_of, forty_files):
    module = ready(module_of(forty_files))
    ids = [module.prepared.stream(split).read(0, 10**9).tolist() for split in ("train", "validation")]
    texts = module.tokenizer.decode(ids[0] + ids[1], skip_special_tokens=False).split(END_OF_TEXT)
    assert sorted(texts[:-1]) == sorted(file.read_text() for file in forty_files.iterdir())


def test_a_second_run_tokenises_nothing_even_from_elsewhere(module_of, forty_files, tokenised, monkeypatch, tmp_path):
    ready(module_of(forty_files))
    assert tokenised["splits"] == 2
    monkeypatch.chdir(tmp_path)
    ready(module_of("corpus"))
    ready(module_of("corpus/*.txt", seq_len=8, batch_size=1))
    assert tokenised["splits"] == 2


@pytest.mark.parametrize("options", [{"vocab_size": 270}, {"val_fraction": 0.4}])
def test_other_options_are_prepared_anew(module_of, forty_files, tokenised, options):
    ready(module_of(forty_files))
    ready(module_of(forty_files, **options))
    assert tokenised["splits"] == 4


def test_changed_content_is_prepared_anew(module_of, forty_files, tokenised):
    before = ready(module_of(forty_files)).prepared
    (forty_files / "3.txt").write_text("something else")
    after = ready(module_of(forty_files)).prepared
    assert tokenised["splits"] == 4
    assert before.folder != after.folder


def test_a_killed_preparation_passes_for_nothing(module_of, forty_files, tokenised, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("lightning_ptdp.data.store.shutil.rmtree", lambda *args, **options: None)
        patch.setattr(preparation, "_write_part", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            module_of(forty_files).prepare_data()
    module = module_of(forty_files)
    assert len(list(module.cache.glob(".aside-*/tokenizer.json"))) == 1
    ready(module)
    assert tokenised["splits"] == 2


def test_a_damaged_cache_is_named(module_of, forty_files):
    module = ready(module_of(forty_files))
    for file in (module.prepared.folder / "train").iterdir():
        file.unlink()
    with pytest.raises(RuntimeError, match=r"holds 0 tokens where \d+ were written.*delete the folder"):
        module.train_dataloader()


def test_each_node_prepares_its_own_cache(module_of, forty_files, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    module = module_of(forty_files)
    assert module.prepare_data_per_node
    assert ready(module).prepared.folder.parent == module.cache


def test_a_node_without_the_cache_is_told(module_of, forty_files):
    with pytest.raises(RuntimeError, match=r"no prepared corpus for these options in .*prepare_data_per_node=True"):
        module_of(forty_files).setup()


def test_an_empty_validation_split_is_an_error(module_of, write_files):
    folder = write_files({str(number): f"text {number}" for number in range(5)})
    with pytest.raises(ValueError, match=r"validation split is empty.*of 5 documents"):
        module_of(folder, val_fraction=0.0001).prepare_data()


def test_no_validation_gives_no_loader(module_of, forty_files):
    assert ready(module_of(forty_files, val_fraction=0.0)).val_dataloader() == []


def test_validation_files_of_ones_own_leave_all_else_to_training(module_of, forty_files, tmp_path):
    (tmp_path / "held.txt").write_text("held out text that is longer than one sequence\n")
    prepared = ready(module_of(forty_files, val_paths=str(tmp_path / "held.txt"))).prepared
    assert (prepared.train.num_documents, prepared.validation.num_documents) == (40, 1)


def test_a_corpus_smaller_than_a_sequence_is_an_error(module_of, write_files):
    folder = write_files({"a": "tiny", "b": "text"})
    module = module_of(folder, seq_len=512, val_fraction=0.0)
    with pytest.raises(ValueError, match=r"has \d+ tokens \(2 documents\) to train on, seq_len=512"):
        ready(module)


def test_a_validation_split_smaller_than_a_sequence_is_a_warning(module_of, forty_files, tmp_path, caplog):
    (tmp_path / "held.txt").write_text("held")
    with caplog.at_level(logging.WARNING, "lightning_ptdp"):
        ready(module_of(forty_files, val_paths=str(tmp_path / "held.txt")))
    assert "the validation split has 5 tokens, less than one sequence of seq_len=16" in caplog.text


def test_a_tokenizer_of_ones_own_is_used(module_of, forty_files):
    given = ready(module_of(forty_files, vocab_size=280)).prepared.tokenizer_path
    module = ready(module_of(forty_files, tokenizer=str(given)))
    assert module.prepared.vocab_size == 280
    assert module.prepared.tokenizer_path.read_text() == given.read_text()


def test_a_saved_dataset_is_a_source(module_of, tmp_path):
    rows = datasets.Dataset.from_dict({"body": [f"row {number} of text" for number in range(40)]})
    rows.save_to_disk(tmp_path / "saved")
    prepared = ready(module_of(dataset=str(tmp_path / "saved"), text_column="body")).prepared
    assert prepared.train.num_documents + prepared.validation.num_documents == 40


def test_the_order_follows_from_the_seed(module_of, forty_files):
    def first(seed: int) -> list[int]:
        loader = ready(module_of(forty_files, seed=seed)).train_dataloader()
        return next(iter(loader))["labels"].flatten().tolist()

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_replicas_take_turns_in_one_order(module_of, forty_files):
    def epoch(replica: int, num_replicas: int) -> list[list[int]]:
        module = ready(module_of(forty_files))
        module.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": num_replicas, "rank": replica})
        loader = module.train_dataloader()
        loader.sampler.set_epoch(3)
        return [row for batch in loader for row in batch["input_ids"].tolist()]

    alone, pair = epoch(0, 1), [epoch(replica, 2) for replica in range(2)]
    assert [row for rows in zip(*pair, strict=True) for row in rows][: len(alone)] == alone


def test_a_checkpoint_carries_the_tokenizer(module_of, forty_files, caplog):
    module = ready(module_of(forty_files))
    state = module.state_dict()
    assert state["tokenizer"] == Path(module.prepared.tokenizer_path).read_text()
    module.load_state_dict(state)
    assert "another tokenizer" not in caplog.text
    module.load_state_dict({"tokenizer": "{}"})
    assert "the checkpoint was trained with another tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "some"}, "text comes from one source"),
        ({"val_split": "test"}, "val_split names a split of dataset"),
        ({"seq_len": 0}, "seq_len must be at least 1; got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"vocab_size": 100}, "vocab_size must be at least 257; got 100"),
        ({"val_fraction": 1.0}, "less than 1; got 1.0"),
        ({"tokenizer": "/nowhere.json"}, r"/nowhere\.json cannot be loaded"),
    ],
)
def test_a_wrong_option_is_named_at_once(module_of, options, message):
    with pytest.raises(ValueError, match=message):
        module_of("text.txt", **options)


def test_reading_before_set_up_is_told(module_of):
    with pytest.raises(RuntimeError, match="known once"):
        _ = module_of("text.txt").prepared
