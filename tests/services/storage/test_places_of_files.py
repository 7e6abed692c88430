"""Where the files of runs are: the mark of a folder of runs."""

import threading

from services.storage.mirror import MARK, files_place, places_here


def test_all_callers_see_the_same_mark(tmp_path, monkeypatch):
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    for number in range(50):
        runs, found = tmp_path / str(number), []
        both = threading.Barrier(2)

        def look(runs=runs, found=found, both=both):
            both.wait(10)
            found.append(files_place(runs))

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert found == [(runs / MARK).read_text()] * 2
        assert [path.name for path in runs.iterdir()] == [MARK]


def test_runs_of_a_folder_that_got_a_store_are_still_here(tmp_path, monkeypatch):
    monkeypatch.delenv("PENSTOCK_STORE", raising=False)
    before = files_place(tmp_path)
    assert places_here(tmp_path) == {before}
    monkeypatch.setenv("PENSTOCK_STORE", "s3://bucket/runs")
    assert places_here(tmp_path) == {before, "s3://bucket/runs"}
    assert places_here(tmp_path / "new") == {"s3://bucket/runs"}
