import gc
import subprocess
import sys

import pytest

from flows.loading import loading


def test_no_garbage_is_searched_while_modules_load_and_it_is_again_after_an_error():
    def load():
        with loading():
            assert not gc.isenabled()
            raise ImportError("no such module")

    with pytest.raises(ImportError):
        load()

    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_a_process_that_loaded_duckdb_ends_without_a_list_of_leaks():
    program = "from flows.loading import loading\nwith loading(): import duckdb\nduckdb.connect().execute('select 1')"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert (done.stdout, done.stderr) == ("", "")
