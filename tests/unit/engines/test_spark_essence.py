"""Which line of a Spark error the user reads."""

from __future__ import annotations

import sys

from syncline.engines.spark import essence


def test_a_package_that_the_executors_lack_is_named_with_the_variable_to_set():
    shown = essence(
        Exception("An exception was thrown\nTraceback:\n  File x\nModuleNotFoundError: No module named 'pyarrow'")
    )
    assert shown.startswith("ModuleNotFoundError: No module named 'pyarrow'. ")
    assert f"such as {sys.executable}" in shown
    assert "PYSPARK_PYTHON" in shown


def test_the_last_line_of_pythons_traceback_is_chosen_before_javas():
    assert (
        essence(Exception("Job aborted.\nValueError: 3 is odd.\n at org.apache.spark.Java")) == "ValueError: 3 is odd."
    )
