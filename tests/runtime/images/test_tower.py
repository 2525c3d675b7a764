"""The tower around its graphs: what is kept, what is counted, and which artifacts fit each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmc.runtime.binding.devices import DEVICE_OPTIONS
from llmc.runtime.images.image_error import ImageError, NoImages
from llmc.runtime.images.rows_cache import RowsCache
from llmc.runtime.images.tower import Tower, TowerClosed, check_fit, tower_options

from support.image_forms import MISTRAL3, SMOLVLM, HeldEncoder, SumEncoder, encoded, form_of, picture


def test_an_image_is_encoded_once(tmp_path: Path) -> None:
    form = form_of(tmp_path, SMOLVLM)
    encoder = SumEncoder(form, 4)
    tower = Tower(form, encoder, "tower")
    data = encoded(picture(100, 50))
    first, again = (tower.rows(tower.look(data)) for _ in range(2))
    assert first is again
    assert len(encoder.calls) == len(tower.look(data).tiling.tiles)
    assert (tower.stats.images, tower.stats.reused) == (1, 1)
    assert tower.stats.seconds > 0
    tower.rows(tower.look(encoded(picture(100, 50, seed=1))))
    assert tower.stats.images == 2


def test_rows_are_of_one_tower(tmp_path: Path) -> None:
    form, data = form_of(tmp_path, SMOLVLM), encoded(picture(100, 50))
    names = [Tower(form, SumEncoder(form, 4), name).look(data).identity for name in ("one", "one", "other")]
    assert names[0] == names[1] != names[2]


def test_closing_waits_for_a_tile_and_no_more(tmp_path: Path) -> None:
    form = form_of(tmp_path, SMOLVLM)
    encoder = HeldEncoder(form, 4)
    tower = Tower(form, encoder, "tower")
    first, second = (tower.look(picture(100, 50, seed=seed)) for seed in range(2))
    assert len(first.tiling.tiles) > 1
    with ThreadPoolExecutor(3) as threads:
        running, waiting = threads.submit(tower.rows, first), threads.submit(tower.rows, second)
        assert encoder.begun.wait(60)
        closing = threads.submit(tower.close)
        assert tower._stopping.wait(60)
        assert not closing.done()
        assert not encoder.released
        encoder.go_on.set()
        closing.result(60)
        assert encoder.released
        assert len(encoder.calls) == 1
        for ended in (running, waiting):
            with pytest.raises(TowerClosed, match="is closed: open the model again"):
                ended.result(60)
    tower.close()
    with pytest.raises(TowerClosed):
        tower.rows(first)


def test_a_cache_holds_what_was_used_last() -> None:
    cache = RowsCache(3 * 40)
    rows = [np.full((1, 10), number, np.float32) for number in range(4)]
    for number in range(3):
        cache.put(bytes([number]), rows[number])
    assert cache.get(b"\0") is rows[0]
    cache.put(b"\3", rows[3])
    assert cache.get(b"\1") is None
    assert [cache.get(bytes([number])) is not None for number in range(4)] == [True, False, True, True]
    assert cache.num_bytes == 120
    cache.put(b"large", np.zeros((1, 31), np.float32))
    assert cache.get(b"large") is None
    assert cache.num_bytes == 120


def test_a_sliver_is_refused(tmp_path: Path) -> None:
    form = form_of(tmp_path, MISTRAL3)
    with pytest.raises(ImageError, match="an image of 5000x2 pixels: it is too narrow"):
        Tower(form, SumEncoder(form, 4), "tower").look(picture(5000, 2))


def test_a_tower_has_the_device_of_its_engine_and_none_of_its_budgets() -> None:
    shared = {
        "eager": True,
        "num_threads": 3,
        "device_number": "1",
        "cuda_library": "libcuda.so",
        "weight_memory": "auto",
    }
    own = {
        "offload_mib": 100, "offload_ring_mib": 10, "graph_mib": 7, "graph_prompt_mib": 2, "graph_order": "1,0",
        "kv_bytes": 1 << 20, "max_num_seqs": 4,
    }  # fmt: skip
    found = tower_options({**shared, **own, "pin_threads": True, "idle_spin_us": 1000})
    assert found == {**shared, "pin_threads": False, "idle_spin_us": 0}
    names = {name for options in DEVICE_OPTIONS.values() for name in options}
    assert set(found) <= names


def test_artifacts_must_fit(tmp_path: Path) -> None:
    form, path = form_of(tmp_path, SMOLVLM), Path("m-images.llmc")
    text = SimpleNamespace(states_use=2, states_width=64, vocab_size=1000)
    check_fit(path, 64, form.states_width, form, text, Path("m.llmc"))
    with pytest.raises(NoImages, match=r"m.llmc was compiled without images: compile its model with --images"):
        check_fit(path, 64, form.states_width, form, SimpleNamespace(**{**vars(text), "states_use": 0}), Path("m.llmc"))
    with pytest.raises(NoImages, match=r"gives rows of 32 numbers and m.llmc takes 64"):
        check_fit(path, 32, form.states_width, form, text, Path("m.llmc"))
    with pytest.raises(NoImages, match="takes patches of 5 numbers, not 192"):
        check_fit(path, 64, 5, form, text, Path("m.llmc"))
